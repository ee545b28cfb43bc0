"""What the series of a query select: exporters, and processes there. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

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
class Selector:
    """The labels of a series that select processes of one exporter; None for a label that the series lacks."""

    pid: str | None = None
    workload: str | None = None
    rank: str | None = None
    gpu: str | None = None
    uuid: str | None = None

    def admits(self, process: Document) -> bool:
        """Return whether the labels select a process of `/api/v1/processes`."""
        identity = {**process, "pid": str(process["pid"])}
        own = all(getattr(self, name) in (None, identity[name]) for name in ("pid", "workload", "rank"))
        return own and (not self.by_device or bool(self.uuids(process)))

    @property
    def by_device(self) -> bool:
        """Whether the labels name a device."""
        return self.gpu is not None or self.uuid is not None

    def uuids(self, process: Document) -> list[str]:
        """Return the selected devices of a process."""
        return [
            device["uuid"]
            for device in process["devices"]
            if self.uuid in (None, device["uuid"]) and self.gpu in (None, device["gpu"])
        ]


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
    for labels in series:
        selector = Selector(**{name: labels.get(name) for name in names})
        if selector == Selector():
            raise ConfigurationError(
                f"--query: the series {_shown(labels)} selects no process; it needs one of the labels "
                f"{', '.join(names)}, as in `sum by (instance, pid) (...)`"
            )
        found.setdefault(_exporter(labels, template).url, {})[selector] = None
    return {exporter: list(found[exporter.url]) for exporter in exporters_of(series, template)}


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
