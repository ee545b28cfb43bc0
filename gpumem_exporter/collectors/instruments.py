"""The exporter's own counters, gauges and histograms."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

from gpumem_exporter.actions.model import Action
from gpumem_exporter.actions.policy.model import RESULTS
from gpumem_exporter.actions.request import ACTIONS
from gpumem_exporter.collectors import catalog
from gpumem_exporter.events.model import EVENT_TYPES, Event
from gpumem_exporter.wire.protocol import OUTCOMES

__all__ = ["ALERT_OUTCOMES", "Instruments", "process_registry"]

ALERT_OUTCOMES = ("acted", "repeated", "cooling", "refused", "resolved", "ignored", "invalid")

_ACTION_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


def process_registry() -> CollectorRegistry:
    """Create a registry with the `process_` metrics of this process: memory, CPU time and open files."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    return registry


class Instruments:
    """Counts the exporter's work. Thread-safe.

    Args:
        registry: the registry for the metrics, which can be registered once.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._reports = _counter(catalog.REPORTS, registry)
        self._dropped = _counter(catalog.PROCESSES_DROPPED, registry)
        self._actions = _counter(catalog.ACTIONS, registry)
        self._freed = _counter(catalog.ACTION_FREED, registry)
        self._events = _counter(catalog.EVENTS, registry)
        self._events_dropped = _counter(catalog.EVENTS_DROPPED, registry)
        self._policy = _counter(catalog.POLICY_EVALUATIONS, registry)
        self._alerts = _counter(catalog.ALERTS, registry)
        metric = catalog.ACTION_DURATION
        self._duration = Histogram(metric.name, metric.help, metric.labels, registry=registry, buckets=_ACTION_SECONDS)

        # These labels are few and known, so their series start at 0. Otherwise rate() would miss the first event.
        for action in ACTIONS:
            self._freed.labels(action)
            self._duration.labels(action)
            for outcome in OUTCOMES:
                self._actions.labels(action, outcome)
        for outcome in ALERT_OUTCOMES:
            self._alerts.labels(outcome)
        for type_ in EVENT_TYPES:
            self._events.labels(type_)

    def show_held_requests(self, count: Callable[[], int]) -> None:
        """Export the number of held requests, which `count` returns; it is called in each scrape."""
        metric = catalog.HELD_REQUESTS
        Gauge(metric.name, metric.help, registry=self._registry).set_function(count)

    def count_report(self, outcome: str) -> None:
        """Count a report; `outcome` becomes a label, so it must have few values."""
        self._reports.labels(outcome).inc()

    def count_dropped(self) -> None:
        """Count a report that was rejected because the maximum number of processes report."""
        self._dropped.inc()

    def count_events(self, events: Iterable[Event]) -> None:
        """Count new events."""
        for event in events:
            self._events.labels(event.type).inc()

    def count_events_dropped(self, count: int) -> None:
        """Count events that could not be stored."""
        self._events_dropped.inc(count)

    def add_policy_rule(self, rule: str) -> None:
        """Start the series of a policy rule at 0."""
        for result in RESULTS:
            self._policy.labels(rule, result)

    def remove_policy_rule(self, rule: str) -> None:
        """Remove the series of a policy rule."""
        for result in RESULTS:
            self._policy.remove(rule, result)

    def count_policy(self, rule: str, result: str, count: int) -> None:
        """Count evaluations of a policy rule with one result."""
        self._policy.labels(rule, result).inc(count)

    def count_alert(self, outcome: str) -> None:
        """Count an alert; `outcome` is one of `ALERT_OUTCOMES`."""
        self._alerts.labels(outcome).inc()

    def observe_action(self, action: Action) -> None:
        """Count a finished action; a dry run is not counted."""
        if action.dry_run:
            return
        # A process on several devices has one result per device, but one outcome.
        for *_, outcome in {(row.pid, row.workload, row.rank, row.outcome) for row in action.results}:
            self._actions.labels(action.action, outcome).inc()
        # A negative value means that the process allocated memory meanwhile; it must not reduce the sum.
        self._freed.labels(action.action).inc(sum(max(0, result.freed_bytes or 0) for result in action.results))
        if action.duration_seconds is not None:
            self._duration.labels(action.action).observe(action.duration_seconds)


def _counter(metric: catalog.Metric, registry: CollectorRegistry) -> Counter:
    return Counter(metric.name, metric.help, metric.labels, registry=registry)
