"""The devices of a fleet, as each exporter reports them, and the sums."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpumem_client.wire.http import shown_url
from gpumem_client.wire.units import UNKNOWN, counted, human_bytes, human_ratio
from gpumem_exporter.cli.fleet.options import FleetOptions
from gpumem_exporter.cli.fleet.prometheus import Prometheus
from gpumem_exporter.cli.fleet.requests import Fleet
from gpumem_exporter.cli.fleet.selection import Exporter, Failure, exporters_of
from gpumem_exporter.cli.render.node_tables import DEMO_NOTICE, cache_sentence, device_name, errors_of
from gpumem_exporter.cli.render.terminal import plain, table

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

__all__ = ["Overview", "read_overview"]

Document = Mapping[str, Any]

_SIZES = ("busy", "total", "used", "free", "allocatable", "idle cache", "reclaimable", "fragmented")
_COLUMNS = (("exporter", "left"), ("gpu", "left"), ("name", "cut"), *((name, "right") for name in _SIZES))


@dataclass(frozen=True, slots=True)
class Overview:
    """The devices of the exporters that a query selects."""

    answers: Mapping[Exporter, Document | Failure]
    warnings: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether every exporter answered."""
        return not any(isinstance(answer, Failure) for answer in self.answers.values())

    def document(self) -> dict[str, Any]:
        """Return the JSON document."""
        exporters = []
        for exporter, answer in self.answers.items():
            address: dict[str, Any] = {"instance": exporter.instance, "url": shown_url(exporter.url)}
            if isinstance(answer, Failure):
                exporters.append({**address, "error": answer.reason, "devices": []})
            else:
                exporters.append({**address, "error": None, **answer})
        return {"exporters": exporters, "warnings": list(self.warnings)}

    def tables(self) -> Iterator[RenderableType]:
        """Yield the output of `fleet info`. The sums are last, because a shell shows the end of the output."""
        yield from self._demo_notice()
        yield from self._devices()
        yield from self._errors()
        yield self._sums()

    def screen(self) -> Iterator[RenderableType]:
        """Yield the output of `fleet top`. The devices are last, because a screen shows the start of the output."""
        yield from self._demo_notice()
        yield self._sums()
        yield from self._errors()
        yield from self._devices()

    def _documents(self) -> list[tuple[Exporter, Document]]:
        return [(exporter, answer) for exporter, answer in self.answers.items() if not isinstance(answer, Failure)]

    def _by_device(self) -> list[list[tuple[Exporter, Document]]]:
        """The documents of each device. Two exporters may see one device, or one exporter may have two names."""
        found: dict[object, list[tuple[Exporter, Document]]] = {}
        for exporter, document in self._documents():
            for index, device in enumerate(document.get("devices") or ()):
                # Simulated devices have the same uuids on every node.
                uuid = None if document.get("source") == "demo" else device.get("uuid")
                found.setdefault(uuid or (exporter, index), []).append((exporter, device))
        return list(found.values())

    def _demo_notice(self) -> Iterator[Text]:
        if any(document.get("source") == "demo" for _, document in self._documents()):
            yield plain(DEMO_NOTICE, "bold yellow")

    def _devices(self) -> Iterator[Table]:
        rows = [
            _cells(exporter, device)
            for exporter, document in self._documents()
            for device in document.get("devices") or ()
        ]
        if rows:
            yield table("", _COLUMNS, rows)

    def _errors(self) -> Iterator[Text]:
        for exporter, answer in self.answers.items():
            for error in (answer.reason,) if isinstance(answer, Failure) else errors_of(answer):
                yield plain(f"{exporter.instance}: {error}", "bold red")
        shared = {tuple(one.instance for one, _ in seen) for seen in self._by_device() if len(seen) > 1}
        for instances in sorted(shared):
            yield plain(f"{' and '.join(instances)} report the same devices, which count once", "yellow")

    def _sums(self) -> Text:
        if not self.answers:
            return plain("The query selects no exporter.")
        devices = [[device for _, device in seen] for seen in self._by_device()]
        memory = [memory for seen in devices if (memory := _memory(seen))]
        reclaimable = [size for seen in devices if (size := _reclaimable(seen)) is not None]
        used, total = (human_bytes(sum(one[name] for one in memory)) for name in ("used_bytes", "total_bytes"))
        exporters = counted(len(self.answers), "exporter", "exporters")
        counts = f"{len(self._documents())} of {exporters}, {counted(len(devices), 'device', 'devices')}"
        text = f"{counts}: {used} of {total} used."
        if reclaimable:
            idle = [size for seen in devices if (size := _idle_cache(seen)) is not None]
            unknown = sum(_reclaimable(seen) or 0 for seen in devices if _idle_cache(seen) is None)
            text = f"{text} {cache_sentence(sum(idle) if idle else None, sum(reclaimable), unknown)}."
        return plain(text, "bold")


def read_overview(prometheus: Prometheus, query: str, options: FleetOptions) -> Overview:
    """Query Prometheus for exporters, and each exporter for its devices.

    Raises:
        ConfigurationError: the query is invalid, or its series do not give the address of an exporter.
        PrometheusError: the query could not be evaluated.
    """
    found = prometheus.query(query)
    exporters = exporters_of(found.series, options.instance_url)
    with Fleet(exporters, token=options.token(), trust=options.trust(), parallel=options.parallel) as fleet:
        return Overview(fleet.read(exporters, "devices"), found.warnings)


def _memory(seen: Iterable[Document]) -> Document | None:
    """The memory of a device, from the first exporter that knows it."""
    return next((device["memory"] for device in seen if device.get("memory")), None)


def _reclaimable(seen: Iterable[Document]) -> int | None:
    """The reclaimable bytes of a device, from the exporter that knows the most."""
    ledgers = [device["ledger"] for device in seen if device.get("ledger")]
    return max((ledger["torch_reclaimable"] for ledger in ledgers if "torch_reclaimable" in ledger), default=None)


def _idle_cache(seen: Iterable[Document]) -> int | None:
    """The idle cache of a device, from the exporter that knows the most."""
    return max((size for device in seen if (size := device.get("idle_cache_bytes")) is not None), default=None)


def _cells(exporter: Exporter, device: Document) -> tuple[str | Text, ...]:
    memory, ledger = device.get("memory") or {}, device.get("ledger") or {}
    return (
        exporter.instance,
        device.get("gpu") or UNKNOWN,
        device_name(device),
        human_ratio(device.get("utilization_ratio")),
        *(human_bytes(memory.get(f"{name}_bytes")) for name in ("total", "used", "free")),
        *(human_bytes(device.get(f"{name}_bytes")) for name in ("allocatable", "idle_cache")),
        *(human_bytes(ledger.get(f"torch_{name}")) for name in ("reclaimable", "fragmented")),
    )
