"""The metrics of events."""

from __future__ import annotations

from collections.abc import Iterable

from gpumem_exporter.core.event import EVENT_TYPES, Event
from gpumem_exporter.metrics.collector_types import Metric
from gpumem_exporter.metrics.instruments import Counter, Registry

EVENTS = Metric(
    "gpumem_events_total",
    "counter",
    "Events on the node since the exporter started, by type. An event counts once it is stored and available at"
    " /api/v1/events; gpumem_events_dropped_total counts the others.",
    ("type",),
)
DROPPED = Metric(
    "gpumem_events_dropped_total",
    "counter",
    "Events that were not stored: the disk failed and the queue was full, which /health shows, or a process had more "
    "than 60 out-of-memory errors in a minute.",
)
METRICS = (EVENTS, DROPPED)


class EventMetrics:
    """Counts events. Thread-safe."""

    def __init__(self, registry: Registry) -> None:
        self._events = Counter.of(EVENTS, registry)
        self._dropped = Counter.of(DROPPED, registry)
        for type_ in EVENT_TYPES:  # the series start at 0
            self._events.labels(type_)

    def count_events(self, events: Iterable[Event]) -> None:
        """Count new events, without records that are no events."""
        for event in events:
            if event.type in EVENT_TYPES:
                self._events.labels(event.type).inc()

    def count_dropped(self, count: int) -> None:
        """Count events that could not be stored."""
        self._dropped.inc(count)
