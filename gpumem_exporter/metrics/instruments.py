"""The exporter's own counters, gauges and histograms, and the values of its process.

They are subjects of the page like all others, one for each family: between two scrapes only a few of them change.
"""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

from gpumem_client.wire.procfs import start_time_ticks
from gpumem_client.wire.protocol import OUTCOMES
from gpumem_exporter.actions.declarations import ACTIONS
from gpumem_exporter.actions.model import Action
from gpumem_exporter.core.event import EVENT_TYPES, Event
from gpumem_exporter.features.policy.policy_values import RESULTS
from gpumem_exporter.metrics import catalog
from gpumem_exporter.metrics.subjects import Metric, Samples, Series, Subject, View, one_of_each

REPORT_OUTCOMES = (
    *("accepted", "shortened", "dropped", "busy", "foreign_process", "superseded", "unknown_device"),
    *("invalid", "too_large", "unauthorized"),
)
ALERT_OUTCOMES = ("acted", "repeated", "waiting", "cooling", "refused", "resolved", "ignored", "invalid")

_ACTION_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_BUCKET = catalog.ACTION_DURATION.part("_bucket", "le")
_PAGE_BYTES = resource.getpagesize()
_FILES = Path("/proc/self/fd")
_process_series = one_of_each(catalog.OWN_PROCESS)
_COUNT, _SUM = catalog.ACTION_DURATION.part("_count"), catalog.ACTION_DURATION.part("_sum")


class Instruments:
    """Counts the exporter's work. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[Metric, dict[Series, float]] = {metric: {} for metric in catalog.OWN}
        self._held_requests: Callable[[], int] | None = None

        # These labels are few and known, so their series start at 0. Otherwise rate() would miss the first event.
        self._add(catalog.PROCESSES_DROPPED, amount=0)
        self._add(catalog.EVENTS_DROPPED, amount=0)
        for action in ACTIONS:
            self._add(catalog.ACTION_FREED, action, amount=0)
            self._add_duration(action, seconds=0.0, amount=0)
            for outcome in OUTCOMES:
                self._add(catalog.ACTIONS, action, outcome, amount=0)
        for outcome in REPORT_OUTCOMES:
            self._add(catalog.REPORTS, outcome, amount=0)
        for outcome in ALERT_OUTCOMES:
            self._add(catalog.ALERTS, outcome, amount=0)
        for type_ in EVENT_TYPES:
            self._add(catalog.EVENTS, type_, amount=0)

    def subjects(self, _: View) -> Iterator[Subject]:
        """Yield each family with its current values."""
        with self._lock:
            if self._held_requests is not None:
                self._values[catalog.HELD_REQUESTS][catalog.HELD_REQUESTS, ()] = self._held_requests()
            values = {metric: (tuple(each), tuple(each.values())) for metric, each in self._values.items()}
        for metric, (series, amounts) in values.items():
            yield Subject(metric, Samples, (series, _same, amounts))

    def show_held_requests(self, count: Callable[[], int]) -> None:
        """Export the number of held requests, which `count` returns; it is called in each scrape."""
        self._held_requests = count

    def show_health(self, checks: Mapping[str, bool]) -> None:
        """Export whether each check of /health is ok, until the next call."""
        metric = catalog.HEALTH_CHECK_OK
        with self._lock:
            self._values[metric] = {(metric, (name,)): int(ok) for name, ok in checks.items()}

    def count_report(self, outcome: str) -> None:
        """Count a report; `outcome` is one of `REPORT_OUTCOMES`."""
        self._add(catalog.REPORTS, outcome)

    def count_dropped(self) -> None:
        """Count a report that was rejected because the maximum number of processes report."""
        self._add(catalog.PROCESSES_DROPPED)

    def count_events(self, events: Iterable[Event]) -> None:
        """Count new events, without records that are no events."""
        for event in events:
            if event.type in EVENT_TYPES:
                self._add(catalog.EVENTS, event.type)

    def count_events_dropped(self, count: int) -> None:
        """Count events that could not be stored."""
        self._add(catalog.EVENTS_DROPPED, amount=count)

    def add_policy_rule(self, rule: str) -> None:
        """Start the series of a policy rule at 0."""
        for result in RESULTS:
            self._add(catalog.POLICY_EVALUATIONS, result, rule, amount=0)

    def remove_policy_rule(self, rule: str) -> None:
        """Remove the series of a policy rule."""
        with self._lock:
            for result in RESULTS:
                del self._values[catalog.POLICY_EVALUATIONS][catalog.POLICY_EVALUATIONS, (result, rule)]

    def count_policy(self, rule: str, result: str, count: int) -> None:
        """Count evaluations of a policy rule with one result."""
        self._add(catalog.POLICY_EVALUATIONS, result, rule, amount=count)

    def count_alert(self, outcome: str) -> None:
        """Count an alert; `outcome` is one of `ALERT_OUTCOMES`."""
        self._add(catalog.ALERTS, outcome)

    def observe_action(self, action: Action) -> None:
        """Count a finished action; a dry run is not counted."""
        if action.dry_run:
            return
        # A process on several devices has one result per device, but one outcome.
        for *_, outcome in {(row.pid, row.workload, row.rank, row.outcome) for row in action.results}:
            self._add(catalog.ACTIONS, action.action, outcome)
        # A negative value means that the process allocated memory meanwhile; it must not reduce the sum.
        freed_bytes = sum(max(0, result.freed_bytes or 0) for result in action.results)
        self._add(catalog.ACTION_FREED, action.action, amount=freed_bytes)
        if action.duration_seconds is not None:
            self._add_duration(action.action, action.duration_seconds, amount=1)

    def _add_duration(self, action: str, seconds: float, *, amount: int) -> None:
        for bound in _ACTION_SECONDS:
            self._add(_BUCKET, action, str(bound), amount=amount if seconds <= bound else 0)
        self._add(_BUCKET, action, "+Inf", amount=amount)
        self._add(_COUNT, action, amount=amount)
        self._add(_SUM, action, amount=seconds)

    def _add(self, metric: Metric, *labels: str, amount: float = 1.0) -> None:
        values = self._values[metric.part_of or metric]
        with self._lock:
            values[metric, labels] = values.get((metric, labels), 0.0) + amount


def _same(*series: Series) -> tuple[Series, ...]:
    return series


def own_process() -> Iterator[Subject]:
    """Yield the memory, the CPU time and the open files of this process, in the order of the catalog."""
    virtual, resident, *_ = Path("/proc/self/statm").read_text("ascii").split()
    most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    values = (
        int(virtual) * _PAGE_BYTES,
        int(resident) * _PAGE_BYTES,
        _started_unix_seconds(),
        time.process_time(),
        _FILES.stat().st_size or sum(1 for _ in _FILES.iterdir()),  # before Linux 6.2, the size is 0
        None if most_files == resource.RLIM_INFINITY else most_files,
    )
    yield Subject("process", Samples, ((), _process_series, values))


@cache
def _started_unix_seconds() -> float:
    lines = Path("/proc/stat").read_text("ascii").splitlines()
    booted_unix_seconds = next(float(line.split()[1]) for line in lines if line.startswith("btime "))
    return booted_unix_seconds + start_time_ticks() / os.sysconf("SC_CLK_TCK")
