"""What the series of a query select: exporters, and processes there. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from gpumem_client.wire.errors import ConfigurationError
from gpumem_client.wire.http import shown_url
from gpumem_exporter.cli.api_client import Document
from gpumem_exporter.cli.render.columns import natural

_PLACEHOLDER = re.compile(r"\{([a-zA-Z_][a-zA-Z0-9_]*)\}")
# What a label may insert into a URL: a name, an address, a port, and nothing that leads to another host.
_SAFE_IN_URL = re.compile(r"[A-Za-z0-9._:\[\]-]+")
_SHOWN_LENGTH = 200


@dataclass(frozen=True, slots=True)
class Exporter:
    """An exporter of the fleet."""

    instance: str
    """The `instance` label of its series."""
    url: str


@dataclass(frozen=True, slots=True)
class Failure:
    """An outcome that the command line itself found, not an exporter."""

    outcome: str
    reason: str


@dataclass(frozen=True, slots=True)
class Selector:
    """The labels of a series that select processes of one exporter; None for a label that the series lacks."""

    pid: str | None = None
    workload: str | None = None
    rank: str | None = None
    gpu: str | None = None
    uuid: str | None = None

    def devices(self, process: Document) -> tuple[str, ...] | None:
        """Return the uuids of the selected devices of a process.

        The result is None if the series names no device, and empty if the process is not selected.
        """
        identity = {**process, "pid": str(process["pid"])}
        if any(getattr(self, name) not in (None, identity[name]) for name in ("pid", "workload", "rank")):
            return ()
        if self.gpu is None and self.uuid is None:
            return None
        return tuple(
            device["uuid"]
            for device in process["devices"]
            if self.uuid in (None, device["uuid"]) and self.gpu in (None, device["gpu"])
        )


@dataclass(frozen=True, slots=True)
class TargetProcess:
    """A process that acts."""

    exporter: Exporter
    pid: int | str
    workload: str | None
    """None for a process that does not report, as `rank`."""
    rank: str | None
    gpus: tuple[str, ...] = ()
    uuids: tuple[str, ...] | None = None
    """The selected devices; None for all."""

    @property
    def api_target(self) -> dict[str, Any]:
        """The target of a request. Its labels exclude a later process with the same pid."""
        identity = {"pid": self.pid, "workload": self.workload, "rank": self.rank}
        return {name: value for name, value in identity.items() if value is not None}


def exporters_of(series: Iterable[Mapping[str, str]], template: str) -> list[Exporter]:
    """Return the exporters of some series, each once, in natural order."""
    exporters = [_exporter(labels, template) for labels in series]
    # Of several instances at one URL, the first one names the exporter.
    return sorted(
        {exporter.url: exporter for exporter in reversed(exporters)}.values(), key=lambda each: natural(each.instance)
    )


def selectors_of(series: Iterable[Mapping[str, str]], template: str) -> dict[Exporter, list[Selector]]:
    """Return the selectors of some series by exporter, each once."""
    found: dict[str, dict[Selector, None]] = {}
    names = [f.name for f in fields(Selector)]
    series = list(series)
    exporters = exporters_of(series, template)
    for labels in series:
        selector = Selector(**{name: labels.get(name) for name in names})
        if selector == Selector():
            raise ConfigurationError(
                f"--query: the series {_shown(labels)} selects no process; it needs one of the labels "
                f"{', '.join(names)}, as in `sum by (instance, pid) (...)`"
            )
        found.setdefault(_exporter(labels, template).url, {})[selector] = None
    return {exporter: list(found[exporter.url]) for exporter in exporters}


def select(
    exporter: Exporter, selectors: Iterable[Selector], processes: Sequence[Document], *, unreported: bool
) -> tuple[list[TargetProcess], list[tuple[Selector, Failure]]]:
    """Return the selected processes of one exporter, each once, and the selectors without one.

    `processes` are as `/api/v1/processes` lists them. A process that does not report can be a target if `unreported`
    is set.
    """
    selected: dict[str, TargetProcess] = {}
    unmatched = []
    for selector in selectors:
        matching = [(process, uuids) for process in processes if (uuids := selector.devices(process)) != ()]
        able = [(process, uuids) for process, uuids in matching if unreported or process["reporting"]]
        for process, uuids in able:
            key = str(process["pid"])
            selected[key] = _target_process(exporter, process, _union(selected.get(key), uuids))
        if not matching:
            unmatched.append((selector, Failure("gone", "no process matches; it may have exited")))
        elif not able:
            unmatched.append((selector, Failure("unsupported", "the process does not report")))
    return list(selected.values()), unmatched


def _target_process(exporter: Exporter, process: Document, uuids: tuple[str, ...] | None) -> TargetProcess:
    devices = [device for device in process["devices"] if uuids is None or device["uuid"] in uuids]
    gpus = tuple(device["gpu"] or "" for device in devices)
    return TargetProcess(exporter, process["pid"], process["workload"], process["rank"], gpus, uuids)


def _union(known: TargetProcess | None, uuids: tuple[str, ...] | None) -> tuple[str, ...] | None:
    if known is None:
        return uuids
    return None if known.uuids is None or uuids is None else tuple(dict.fromkeys((*known.uuids, *uuids)))


def _exporter(labels: Mapping[str, str], template: str) -> Exporter:
    url = _PLACEHOLDER.sub(lambda match: _address_part(labels, match[1]), template)
    return Exporter(labels.get("instance") or shown_url(url).partition("://")[2] or url, url)


def _address_part(labels: Mapping[str, str], name: str) -> str:
    """The value of a label, checked for its use in a URL."""
    value = labels.get(name, "")
    if not value:
        raise ConfigurationError(
            f"--query: the series {_shown(labels)} has no label {name!r}, which gives the exporter's address; keep "
            f"it, as in `sum by ({name}, pid) (...)`, or set --instance-url"
        )
    if not _SAFE_IN_URL.fullmatch(value):
        raise ConfigurationError(f"--query: {name}={value[:_SHOWN_LENGTH]!r} is not an address; set --instance-url")
    return value


def _shown(labels: Mapping[str, str]) -> str:
    inside = ", ".join(f'{key}="{value}"' for key, value in labels.items() if key != "__name__")
    shown = f"{labels.get('__name__', '')}{{{inside}}}"
    return shown if len(shown) <= _SHOWN_LENGTH else shown[:_SHOWN_LENGTH] + "…"
