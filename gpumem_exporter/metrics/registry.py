"""The lines of the exporter's own metrics, which prometheus_client counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import prometheus_client
from prometheus_client.registry import Collector

from gpumem_exporter.metrics.collector_types import Metric, label_text
from gpumem_exporter.metrics.instruments import Registry


def described(family: prometheus_client.Metric) -> Metric:
    """Return the description of a family that has series."""
    name = f"{family.name}_total" if family.type == "counter" else family.name
    return Metric(name, family.type, family.documentation, tuple(family.samples[0].labels))  # type: ignore[arg-type]


class RegistryLines:
    """The lines of a registry's families; a collector is read again only after a change. Not thread-safe."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._metrics: dict[str, Metric] = {}
        self._rendered: dict[Collector, tuple[object, list[tuple[Metric, Sequence[bytes]]]]] = {}
        self.error: Exception | None = None
        """Why the last page lacks a collector; the others are not affected."""

    def render(self) -> Iterator[tuple[Metric, Sequence[bytes]]]:
        """Yield each family that has series, with its lines."""
        self.error = None
        for collector in tuple(self._registry.collectors):
            # Before the values are read: the page after a change meanwhile has to read them again.
            change = getattr(collector, "change", None)
            last_change, families = self._rendered.get(collector, (None, []))
            if change is None or last_change is not change:
                try:
                    families = [self._family(family) for family in collector.collect() if family.samples]
                except Exception as error:  # noqa: BLE001 - the exposition logs it
                    self.error = error
                    continue
                self._rendered[collector] = change, families
            yield from families

    def _family(self, family: prometheus_client.Metric) -> tuple[Metric, Sequence[bytes]]:
        if (metric := self._metrics.get(family.name)) is None:
            metric = self._metrics[family.name] = described(family)
        lines = [f"{each.name}{label_text(each.labels.items())}{float(each.value)!r}\n" for each in family.samples]
        return metric, ["".join(lines).encode("utf-8", "replace")]
