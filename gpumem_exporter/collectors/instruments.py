"""The exporter's own counters and histograms: what happens between scrapes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

from gpumem_exporter.actions.model import ACTIONS, Action
from gpumem_exporter.actions.policy.model import RESULTS
from gpumem_exporter.collectors import catalog
from gpumem_exporter.collectors.own import Unchanging
from gpumem_exporter.events.model import EVENT_TYPES, Event
from gpumem_exporter.wire.protocol import OUTCOMES

__all__ = ["ALERT_OUTCOMES", "Instruments", "process_registry"]

ALERT_OUTCOMES = ("acted", "repeated", "cooling", "refused", "resolved", "ignored", "invalid")

_ACTION_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


def process_registry() -> CollectorRegistry:
    """A registry that has the `process_` metrics of this process already: its memory, CPU time and open files."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    return registry


class Instruments:
    """Counts what the exporter does. Any thread may call it.

    Args:
        registry: where the metrics are registered, once.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._reports = _counter(catalog.REPORTS, registry)
        actions = _counter(catalog.ACTIONS)
        freed = _counter(catalog.ACTION_FREED)
        events = _counter(catalog.EVENTS)
        alerts = _counter(catalog.ALERTS)
        metric = catalog.ACTION_DURATION
        duration = Histogram(metric.name, metric.help, metric.labels, registry=None, buckets=_ACTION_SECONDS)

        # A counter that starts with its first event hides that event from rate(); these are few and known beforehand.
        for action in ACTIONS:
            freed.labels(action)
            duration.labels(action)
            for outcome in OUTCOMES:
                actions.labels(action, outcome)
        for outcome in ALERT_OUTCOMES:
            alerts.labels(outcome)
        for type_ in EVENT_TYPES:
            events.labels(type_)

        self._dropped = Unchanging(_counter(catalog.PROCESSES_DROPPED), registry)
        self._actions = Unchanging(actions, registry)
        self._freed = Unchanging(freed, registry)
        self._events = Unchanging(events, registry)
        self._events_dropped = Unchanging(_counter(catalog.EVENTS_DROPPED), registry)
        self._policy = Unchanging(_counter(catalog.POLICY_EVALUATIONS), registry)
        self._alerts = Unchanging(alerts, registry)
        self._duration = Unchanging(duration, registry)

    def show_held_requests(self, count: Callable[[], int]) -> None:
        """Show how many requests are held open; `count` is called at each scrape, by whoever renders the page."""
        metric = catalog.HELD_REQUESTS
        Gauge(metric.name, metric.help, registry=self._registry).set_function(count)

    def count_report(self, outcome: str) -> None:
        """A report came; `outcome` is one of a few words: it becomes a label."""
        self._reports.labels(outcome).inc()

    def count_dropped(self) -> None:
        """A report was turned away because too many processes report."""
        with self._dropped.changing() as counter:
            counter.inc()

    def count_events(self, events: Iterable[Event]) -> None:
        """These happened: each is given once, and news."""
        for event in events:
            with self._events.changing() as counter:
                counter.labels(event.type).inc()

    def count_events_dropped(self, count: int) -> None:
        """So many events could not be kept."""
        with self._events_dropped.changing() as counter:
            counter.inc(count)

    def know_policy(self, rule: str) -> None:
        """A rule is in force: it has done nothing yet, which is known."""
        with self._policy.changing() as counter:
            for result in RESULTS:
                counter.labels(rule, result)

    def forget_policy(self, rule: str) -> None:
        """A rule is no longer there, and takes its series with it."""
        with self._policy.changing() as counter:
            for result in RESULTS:
                counter.remove(rule, result)

    def count_policy(self, rule: str, result: str, count: int) -> None:
        """A rule was evaluated so often with this result."""
        with self._policy.changing() as counter:
            counter.labels(rule, result).inc(count)

    def count_alert(self, outcome: str) -> None:
        """An alert came; `outcome` is one of `ALERT_OUTCOMES`."""
        with self._alerts.changing() as counter:
            counter.labels(outcome).inc()

    def observe_action(self, action: Action) -> None:
        """An action is finished. A dry run did nothing and is not counted."""
        if action.dry_run:
            return
        # A process on several devices has a result for each of them, and one outcome.
        with self._actions.changing() as actions:
            for *_, outcome in {(row.pid, row.workload, row.rank, row.outcome) for row in action.results}:
                actions.labels(action.action, outcome).inc()
        # A process may have taken memory meanwhile; what one took is not taken off what another gave back.
        with self._freed.changing() as freed:
            freed.labels(action.action).inc(sum(max(0, result.freed_bytes or 0) for result in action.results))
        if action.duration_seconds is not None:
            with self._duration.changing() as duration:
                duration.labels(action.action).observe(action.duration_seconds)


def _counter(metric: catalog.Metric, registry: CollectorRegistry | None = None) -> Counter:
    return Counter(metric.name, metric.help, metric.labels, registry=registry)
