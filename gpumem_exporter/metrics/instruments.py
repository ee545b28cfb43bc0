"""The exporter's own counters, gauges and histograms, of prometheus_client.

A feature declares its own metrics, and counts them in the `Registry` that it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import prometheus_client
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, values
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

from gpumem_client.wire.protocol import OUTCOMES
from gpumem_exporter.actions.action import Action
from gpumem_exporter.actions.action_options import ACTIONS
from gpumem_exporter.metrics import catalog
from gpumem_exporter.metrics.collector_types import Metric

# For each counter, one more series whose value never changes.
prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
# With PROMETHEUS_MULTIPROC_DIR, which vLLM sets for its own processes, the library keeps values in files of the folder.
values.ValueClass = values.MutexValue

REPORT_OUTCOMES = (
    *("accepted", "shortened", "dropped", "busy", "foreign_process", "superseded", "unknown_device"),
    *("invalid", "too_large", "unauthorized"),
)
_ACTION_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
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


class Instruments:
    """Counts the exporter's work. Thread-safe."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        reports = Counter.of(catalog.REPORTS, registry)
        self._dropped = Counter.of(catalog.PROCESSES_DROPPED, registry)
        self._actions = Counter.of(catalog.ACTIONS, registry)
        self._freed = Counter.of(catalog.ACTION_FREED, registry)
        self._health = Gauge.of(catalog.HEALTH_CHECK_OK, registry)
        self._duration = Histogram.of(catalog.ACTION_DURATION, registry, buckets=_ACTION_SECONDS)
        self._shown_health: dict[str, bool] = {}

        # These labels are few and known, so their series start at 0. Otherwise rate() would miss the first event. The
        # histogram has 18 series for each action, so they start with its first result.
        self._reports = {outcome: reports.labels(outcome) for outcome in REPORT_OUTCOMES}
        for action in ACTIONS:
            self._freed.labels(action)
            for outcome in OUTCOMES:
                self._actions.labels(action, outcome)

    def show_held_requests(self, count: Callable[[], int]) -> None:
        """Export the number of held requests, which `count` returns; it is called in each scrape."""
        Gauge.of(catalog.HELD_REQUESTS, self._registry).set_function(count)

    def show_health(self, checks: Mapping[str, bool]) -> None:
        """Export whether each check of /health is ok, until the next call."""
        if checks == self._shown_health:
            return
        for name in self._shown_health.keys() - checks.keys():
            self._health.remove(name)
        for name, ok in checks.items():
            self._health.labels(name).set(ok)
        self._shown_health = dict(checks)

    def count_report(self, outcome: str) -> None:
        """Count a report; `outcome` is one of `REPORT_OUTCOMES`."""
        self._reports[outcome].inc()

    def count_dropped(self) -> None:
        """Count a report that was rejected because the maximum number of processes report."""
        self._dropped.inc()

    def observe_action(self, action: Action) -> None:
        """Count a finished action; a dry run is not counted."""
        if action.request.dry_run:
            return
        # A process on several devices has one result per device, but one outcome.
        for *_, outcome in {(row.pid, row.workload, row.rank, row.outcome) for row in action.results}:
            self._actions.labels(action.request.action, outcome).inc()
        # A negative value means that the process allocated memory meanwhile; it must not reduce the sum.
        self._freed.labels(action.request.action).inc(sum(max(0, result.freed_bytes or 0) for result in action.results))
        if action.duration_seconds is not None:
            self._duration.labels(action.request.action).observe(action.duration_seconds)
