"""The exporter's own metrics: prometheus_client's counters, gauges, histograms and collectors, and their lines.

A room declares its metrics in the `Registry` that it is given.
"""

# Only for these: prometheus_client takes 8 to 10 µs per series, and a node with 64 processes on 8 devices has 20,000.

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import prometheus_client
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, values
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

from gpumem_exporter.metrics.subjects import Metric, label_text

# For each counter, one more series whose value never changes.
prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
# With PROMETHEUS_MULTIPROC_DIR, which vLLM sets for its own processes, the library keeps values in files of the folder.
values.ValueClass = values.MutexValue

T = TypeVar("T", bound="_Watched")


class Registry(CollectorRegistry):
    """The exporter's own metrics, behind the metrics of its process."""

    def __init__(self) -> None:
        super().__init__()
        self.collectors: list[Collector] = []
        """The registered collectors, in their order."""
        ProcessCollector(registry=self)
        PlatformCollector(registry=self)
        GCCollector(registry=self)

    def register(self, collector: Collector) -> None:
        """Add a collector. Raises ValueError if a registered one has a metric with the same name."""
        super().register(collector)
        self.collectors.append(collector)


class _Watched(MetricWrapperBase):
    """A metric that shows whether it has changed."""

    change: object = ""
    """Another object after each change, set after the new value; None if the value changes without notice."""
    _parent: _Watched | None = None

    @classmethod
    def of(cls: type[T], metric: Metric, registry: Registry, **options: Any) -> T:
        """Return the instrument of a metric, registered."""
        return cls(metric.name, metric.help, metric.labels, registry=registry, **options)

    def labels(self: T, *labelvalues: object, **labelkwargs: object) -> T:
        """Return the series with these labels, which starts at 0."""
        child = super().labels(*labelvalues, **labelkwargs)
        child._parent = self  # noqa: SLF001 - an object of this class
        self.change = object()
        return child

    def remove(self, *labelvalues: object) -> None:
        """Remove a series."""
        super().remove(*labelvalues)
        self.change = object()

    def _changed(self) -> None:
        # Not a number: two threads could then leave the number that a page has read between their changes.
        (self._parent or self).change = object()


class Counter(_Watched, prometheus_client.Counter):
    """A counter. Thread-safe, as the other two."""

    def inc(self, amount: float = 1, exemplar: dict[str, str] | None = None) -> None:
        """Add an amount, which is not negative."""
        super().inc(amount, exemplar)
        self._changed()


class Gauge(_Watched, prometheus_client.Gauge):
    """A gauge that is set, or that calls a function for each page."""

    def set(self, value: float) -> None:
        """Set the value."""
        super().set(value)
        self._changed()

    def set_function(self, f: Callable[[], float]) -> None:
        """Call `f` for each page."""
        super().set_function(f)
        self.change = None


class Histogram(_Watched, prometheus_client.Histogram):
    """A histogram."""

    def observe(self, amount: float, exemplar: dict[str, str] | None = None) -> None:
        """Count an amount."""
        super().observe(amount, exemplar)
        self._changed()


def described(family: prometheus_client.Metric) -> Metric:
    """Return the description of a family that has series."""
    name = f"{family.name}_total" if family.type == "counter" else family.name
    return Metric(name, family.type, family.documentation, tuple(family.samples[0].labels))  # type: ignore[arg-type]


class _Form(NamedTuple):
    metric: Metric
    series: list[tuple[str, dict[str, str]]]
    """The name and the labels of each series."""
    template: bytes
    """The lines with a place for each value."""


class RegistryLines:
    """The lines of a registry's families; a collector is read again only after a change. Not thread-safe."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._forms: dict[str, _Form] = {}
        self._rendered: dict[Collector, tuple[object, list[tuple[Metric, bytes]]]] = {}
        self.error: Exception | None = None
        """Why the last page lacks a collector; the others are not affected."""

    def render(self) -> Iterator[tuple[Metric, bytes]]:
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

    def _family(self, family: prometheus_client.Metric) -> tuple[Metric, bytes]:
        series = [(sample.name, sample.labels) for sample in family.samples]
        form = self._forms.get(family.name)
        if form is None or form.series != series:
            metric = form.metric if form is not None else described(family)
            lines = [f"{name}{label_text(labels.items())}".replace("%", "%%") + "%a\n" for name, labels in series]
            form = self._forms[family.name] = _Form(metric, series, "".join(lines).encode("utf-8", "replace"))
        return form.metric, form.template % tuple([float(sample.value) for sample in family.samples])
