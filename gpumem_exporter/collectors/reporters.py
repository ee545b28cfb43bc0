"""Samples of the last poll and of the reporters."""

from __future__ import annotations

from collections.abc import Iterator

from gpumem_exporter.collectors import catalog
from gpumem_exporter.collectors.subjects import Collector, Samples, Series, Subject
from gpumem_exporter.collectors.view import View
from gpumem_exporter.core.naming import pid_order
from gpumem_exporter.core.samples import ReportingProcess

__all__ = ["POLL", "REPORTER", "reporter_samples"]

_POLL_FAMILIES = (catalog.NVML_UP, catalog.POLL_DURATION, catalog.POLL_TIMESTAMP)
_REPORTER_FAMILIES = (catalog.REPORTER_UP, catalog.REPORTER_TIMESTAMP, catalog.SAMPLE_TIMESTAMP)


def _polls(view: View) -> Iterator[Subject]:
    """Yield whether the driver answers, and the duration and time of the last poll unless it has expired."""
    last = view.snapshot.node
    times = (last.duration_seconds, last.taken_unix_seconds) if last is not None else (None, None)
    yield "poll", Samples((), _poll_series, (0 if view.node is None else 1, *times))


def _poll_series() -> Iterator[Series]:
    for metric in _POLL_FAMILIES:
        yield metric, ()


def _reporters(view: View) -> Iterator[Subject]:
    """Yield the state of each reporter, the time of its last report, and the time of its sample."""
    rows = {pid: reporter_samples(process, pid) for pid, process in view.names.reporting}
    for pid, silent in view.names.silent:
        labels = (pid, silent.workload, silent.rank)
        rows[pid] = Samples(labels, _reporter_series, (0, silent.last_report_unix_seconds, None))
    for pid in sorted(rows, key=pid_order):
        yield pid, rows[pid]


def reporter_samples(process: ReportingProcess, pid: str) -> Samples:
    """Return the samples of a reporter that has the name `pid` on the page."""
    identity, received = process.report.process, process.received_unix_seconds
    values = (1, received, received - process.report.sample_age_seconds)
    return Samples((pid, identity.workload, identity.rank), _reporter_series, values)


def _reporter_series(*labels: str) -> Iterator[Series]:
    for metric in _REPORTER_FAMILIES:
        yield metric, labels


POLL = Collector("poll", _POLL_FAMILIES, _polls)
REPORTER = Collector("reporter", _REPORTER_FAMILIES, _reporters)
