"""The devices of a fleet: what each exporter says of its own, and what that comes to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpumem_exporter.cli.fleet.asks import Failure, Nodes
from gpumem_exporter.cli.fleet.naming import Place, places
from gpumem_exporter.cli.fleet.options import LookOptions
from gpumem_exporter.cli.fleet.prometheus import Prometheus
from gpumem_exporter.cli.render.node_tables import device_name, down_sentence
from gpumem_exporter.cli.render.sizes import UNKNOWN, human_bytes, human_ratio
from gpumem_exporter.cli.render.terminal import plain, table
from gpumem_exporter.wire.http import shown_url

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

__all__ = ["Overview", "look"]

Document = Mapping[str, Any]

_COLUMNS = (
    ("exporter", "left"),
    ("gpu", "left"),
    ("name", "cut"),
    ("busy", "right"),
    ("total", "right"),
    ("used", "right"),
    ("free", "right"),
    ("reclaimable", "right"),
    ("fragmented", "right"),
)


@dataclass(frozen=True, slots=True)
class Overview:
    """What the exporters that a query names said of their devices."""

    read: Mapping[Place, Document | Failure]
    warnings: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """Every exporter has answered."""
        return not any(isinstance(document, Failure) for document in self.read.values())

    def document(self) -> dict[str, Any]:
        """All of it, for programs."""
        exporters = []
        for place, it in self.read.items():
            where: dict[str, Any] = {"instance": place.instance, "url": shown_url(place.url)}
            if isinstance(it, Failure):
                exporters.append({**where, "error": it.reason, "devices": []})
            else:
                exporters.append({**where, "error": None, **it})
        return {"exporters": exporters, "warnings": list(self.warnings)}

    def tables(self) -> Iterator[RenderableType]:
        """A row for each device, what is wrong, and the sums at the end, where a shell's user looks first."""
        yield from self._demo()
        yield from self._devices()
        yield from self._troubles()
        yield self._sums()

    def screen(self) -> Iterator[RenderableType]:
        """The same from the top of a screen: what it cuts off at the bottom are devices."""
        yield from self._demo()
        yield self._sums()
        yield from self._troubles()
        yield from self._devices()

    def _answers(self) -> Iterator[tuple[Place, Document]]:
        return ((place, it) for place, it in self.read.items() if not isinstance(it, Failure))

    def _by_device(self) -> list[list[tuple[Place, Document]]]:
        """What is told of each device: one that two exporters see, or one exporter under two names, is one device.

        Simulated ones are called the same on every node.
        """
        told: dict[object, list[tuple[Place, Document]]] = {}
        for place, document in self._answers():
            for index, device in enumerate(_devices(document)):
                uuid = None if document.get("source") == "demo" else device.get("uuid")
                told.setdefault(uuid or (place, index), []).append((place, device))
        return list(told.values())

    def _demo(self) -> Iterator[Text]:
        if any(document.get("source") == "demo" for _, document in self._answers()):
            yield plain("DEMO: simulated devices and processes", "bold yellow")

    def _devices(self) -> Iterator[Table]:
        rows = [_cells(place, device) for place, document in self._answers() for device in _devices(document)]
        if rows:
            yield table("", _COLUMNS, rows)

    def _troubles(self) -> Iterator[Text]:
        for place, it in self.read.items():
            for trouble in (it.reason,) if isinstance(it, Failure) else _troubles(it):
                yield plain(f"{place.instance}: {trouble}", "bold red")
        shared = {tuple(place.instance for place, _ in told) for told in self._by_device() if len(told) > 1}
        for instances in sorted(shared):
            yield plain(f"{' and '.join(instances)} tell of the same devices, which count once", "yellow")

    def _sums(self) -> Text:
        if not self.read:
            return plain("The query names no exporter.")
        devices = [[device for _, device in told] for told in self._by_device()]
        memory = [memory for told in devices if (memory := _memory(told))]
        reclaimable = [known for told in devices if (known := _reclaimable(told)) is not None]
        used, total = (human_bytes(sum(one[name] for one in memory)) for name in ("used_bytes", "total_bytes"))
        answered = len(list(self._answers()))
        said = f"{answered} of {len(self.read)} exporters, {len(devices)} devices: {used} of {total} used"
        back = f"; a clear would give back {human_bytes(sum(reclaimable))}" if reclaimable else ""
        return plain(f"{said}{back}.", "bold")


def look(prometheus: Prometheus, options: LookOptions, token: str) -> Overview:
    """Ask Prometheus for the exporters and each of them for its devices.

    Raises:
        ConfigurationError: the query is wrong, or its series lead to no exporter.
        PrometheusError: the query could not be evaluated.
    """
    found = prometheus.query(options.query)
    exporters = places(found.series, options.instance_url)
    return Overview(_read(exporters, options, token), found.warnings)


def _read(exporters: Sequence[Place], options: LookOptions, token: str) -> Mapping[Place, Document | Failure]:
    nodes = Nodes(exporters, token=token, parallel=options.parallel)
    try:
        return nodes.read(exporters, "devices")
    finally:
        nodes.close()


def _devices(document: Document) -> Sequence[Document]:
    return document.get("devices") or ()


def _memory(told: Iterable[Document]) -> Document | None:
    """Of one device: what the first exporter says that knows it."""
    return next((device["memory"] for device in told if device.get("memory")), None)


def _reclaimable(told: Iterable[Document]) -> int | None:
    """Of one device: what the exporter says to which most of it is known."""
    ledgers = [device["ledger"] for device in told if device.get("ledger")]
    return max((ledger["torch_reclaimable"] for ledger in ledgers if "torch_reclaimable" in ledger), default=None)


def _troubles(document: Document) -> Iterator[str]:
    nvml = document.get("nvml") or {}
    if not nvml.get("up", False):
        yield f"driver: {nvml.get('error') or 'not read yet'}"
    for device in _devices(document):
        if not device.get("up", True):
            yield down_sentence(device)


def _cells(place: Place, device: Document) -> tuple[str | Text, ...]:
    memory, ledger = device.get("memory") or {}, device.get("ledger") or {}
    return (
        place.instance,
        device.get("gpu") or UNKNOWN,
        device_name(device),
        human_ratio(device.get("utilization_ratio")),
        *(human_bytes(memory.get(f"{name}_bytes")) for name in ("total", "used", "free")),
        *(human_bytes(ledger.get(f"torch_{name}")) for name in ("reclaimable", "fragmented")),
    )
