"""The devices of a fleet, as each exporter reports them, and the sums."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpumem_client.wire.http import shown_url
from gpumem_client.wire.units import counted, human_bytes
from gpumem_exporter.cli.fleet.options import FleetOptions
from gpumem_exporter.cli.fleet.prometheus import Prometheus
from gpumem_exporter.cli.fleet.selection import Exporter, Failure, exporters_of
from gpumem_exporter.cli.render.columns import DEVICE_COLUMNS
from gpumem_exporter.cli.render.layout import Column, Layout, chosen
from gpumem_exporter.cli.render.node_tables import DEMO_NOTICE, cache_sentence, errors_of
from gpumem_exporter.cli.render.terminal import plain
from gpumem_exporter.core.ledger import sum_of_known

if TYPE_CHECKING:
    from rich.text import Text

Document = Mapping[str, Any]

_SIZES = ("total", "used", "free", "allocatable", "idle cache", "reclaimable", "fragmented")
_COLUMNS = (
    Column("exporter", lambda row: row["exporter"], left=True),
    *chosen(DEVICE_COLUMNS, "gpu", "device", "busy", *_SIZES),
)


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

    def parts(self, width: int) -> Iterator[Text]:
        """Yield the output of `fleet info`. The sums are last."""
        if any(document.get("source") == "demo" for _, document in self._documents):
            yield plain(DEMO_NOTICE, "bold yellow")
        rows = [
            {**device, "exporter": exporter.instance}
            for exporter, document in self._documents
            for device in document.get("devices") or ()
        ]
        if rows:
            yield from Layout(_COLUMNS, rows, width).lines(rows)
        for exporter, answer in self.answers.items():
            for error in (answer.reason,) if isinstance(answer, Failure) else errors_of(answer):
                yield plain(f"{exporter.instance}: {error}", "bold red")
        shared = {tuple(one.instance for one, _ in seen) for seen in self._by_device() if len(seen) > 1}
        for instances in sorted(shared):
            yield plain(f"{' and '.join(instances)} report the same devices, which count once", "yellow")
        yield plain(self._sums(), "bold")

    @property
    def _documents(self) -> list[tuple[Exporter, Document]]:
        return [(exporter, answer) for exporter, answer in self.answers.items() if not isinstance(answer, Failure)]

    def _by_device(self) -> list[list[tuple[Exporter, Document]]]:
        """The documents of each device. Two exporters may see one device, or one exporter may have two names."""
        found: dict[object, list[tuple[Exporter, Document]]] = {}
        for exporter, document in self._documents:
            for index, device in enumerate(document.get("devices") or ()):
                # Simulated devices have the same uuids on every node.
                uuid = None if document.get("source") == "demo" else device.get("uuid")
                found.setdefault(uuid or (exporter, index), []).append((exporter, device))
        return list(found.values())

    def _sums(self) -> str:
        if not self.answers:
            return "The query selects no exporter."
        devices = [[device for _, device in seen] for seen in self._by_device()]
        used, total = (
            sum(_most(seen, "memory", f"{name}_bytes") or 0 for seen in devices) for name in ("used", "total")
        )
        exporters = counted(len(self.answers), "exporter", "exporters")
        counts = f"{len(self._documents)} of {exporters}, {counted(len(devices), 'device', 'devices')}"
        text = f"{counts}: {human_bytes(used)} of {human_bytes(total)} used."
        caches = [(_most(seen, "ledger", "torch_reclaimable"), _most(seen, "idle_cache_bytes")) for seen in devices]
        known = [(reclaimable, idle) for reclaimable, idle in caches if reclaimable is not None]
        if known:
            idle = sum_of_known([idle for _, idle in caches])
            unknown = sum(reclaimable for reclaimable, idle in known if idle is None)
            text += f" {cache_sentence(idle, sum(reclaimable for reclaimable, _ in known), unknown)}."
        return text


def read_overview(prometheus: Prometheus, query: str, options: FleetOptions) -> Overview:
    """Query Prometheus for exporters, and each exporter for its devices.

    Raises ConfigurationError if the query is invalid, or its series do not give the address of an exporter, and
    PrometheusError if the query could not be evaluated.
    """
    found = prometheus.query(query)
    exporters = exporters_of(found.series, options.instance_url)
    with options.fleet(exporters) as fleet:
        return Overview(fleet.read(exporters, "devices"), found.warnings)


def _most(seen: Sequence[Document], *path: str) -> int | None:
    """Return the greatest value of a device: if several exporters see it, the exporter that knows the most counts."""
    known = []
    for document in seen:
        value: Any = document
        for name in path:
            value = (value or {}).get(name)
        if value is not None:
            known.append(value)
    return max(known, default=None)
