"""What a series means: at which exporter, and which of its processes. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from gpumem_exporter.errors import ConfigurationError
from gpumem_exporter.wire.http import shown_url

__all__ = ["Named", "Place", "named_processes", "place_order", "places"]

_LABEL = re.compile(r"\{([a-zA-Z_][a-zA-Z0-9_]*)\}")
_IN_URL = re.compile(r"[A-Za-z0-9._:\[\]-]+")
"""What a label may bring into a URL: a name, an address, a port. Nothing that leads to another host."""
_DIGITS = re.compile(r"(\d+)")
_SHOWN_LENGTH = 200


@dataclass(frozen=True, slots=True)
class Place:
    """An exporter."""

    instance: str
    """What it is called: the label of its series."""
    url: str


@dataclass(frozen=True, slots=True)
class Named:
    """The processes of one exporter that a series names; None where it does not say."""

    pid: str | None = None
    workload: str | None = None
    rank: str | None = None
    gpu: str | None = None
    uuid: str | None = None

    def devices(self, process: Mapping[str, Any]) -> tuple[str, ...] | None:
        """The uuids of a process' devices that are meant, None for all of them; empty if the process is not meant.

        Args:
            process: as `/api/v1/processes` has it.
        """
        if self.pid is not None and self.pid != str(process["pid"]):
            return ()
        if self.workload is not None and self.workload != process["workload"]:
            return ()
        if self.rank is not None and self.rank != process["rank"]:
            return ()
        if self.gpu is None and self.uuid is None:
            return None
        return tuple(
            device["uuid"]
            for device in process["devices"]
            if self.uuid in (None, device["uuid"]) and self.gpu in (None, device["gpu"])
        )

    def __str__(self) -> str:
        return " ".join(f"{f.name}={value}" for f in fields(self) if (value := getattr(self, f.name)) is not None)


def places(series: Iterable[Mapping[str, str]], template: str) -> list[Place]:
    """The exporters of some series, each once, in the order of their names.

    Raises:
        ConfigurationError: a series lacks a label of the template, or it has something in it that is no address.
    """
    by_url: dict[str, Place] = {}
    for labels in series:
        place = _place(labels, template)
        by_url.setdefault(place.url, place)
    return sorted(by_url.values(), key=place_order)


def named_processes(series: Iterable[Mapping[str, str]], template: str) -> dict[Place, list[Named]]:
    """What some series name, by exporter, each once.

    Raises:
        ConfigurationError: as `places`, or a series has no label that names a process.
    """
    by_url: dict[str, tuple[Place, dict[Named, None]]] = {}
    for labels in series:
        place = _place(labels, template)
        named = Named(**{f.name: labels.get(f.name) for f in fields(Named)})
        if named == Named():
            raise ConfigurationError(
                f"--query: the series {_shown(labels)} names no process; it needs one of the labels "
                f"{', '.join(f.name for f in fields(Named))}, as in `sum by (instance, pid) (...)`"
            )
        by_url.setdefault(place.url, (place, {}))[1][named] = None
    return {place: list(named) for place, named in sorted(by_url.values(), key=lambda found: place_order(found[0]))}


def place_order(place: Place) -> list[tuple[int, str]]:
    """Sorts node10 after node9."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in _DIGITS.split(place.instance)]


def _place(labels: Mapping[str, str], template: str) -> Place:
    def value(match: re.Match[str]) -> str:
        found = labels.get(match[1], "")
        if not found:
            raise ConfigurationError(
                f"--query: the series {_shown(labels)} has no label {match[1]!r}, by which its exporter is found; keep "
                f"it, as in `sum by ({match[1]}, pid) (...)`, or say with --instance-url where the exporters are"
            )
        if not _IN_URL.fullmatch(found):
            raise ConfigurationError(
                f"--query: {match[1]}={found[:_SHOWN_LENGTH]!r} is no address; say with --instance-url where the "
                "exporters are"
            )
        return found

    url = _LABEL.sub(value, template)
    return Place(labels.get("instance") or shown_url(url).partition("://")[2] or url, url)


def _shown(labels: Mapping[str, str]) -> str:
    name = labels.get("__name__", "")
    inside = ", ".join(f'{key}="{value}"' for key, value in labels.items() if key != "__name__")
    shown = f"{name}{{{inside}}}"
    return shown if len(shown) <= _SHOWN_LENGTH else shown[:_SHOWN_LENGTH] + "…"
