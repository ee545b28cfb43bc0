"""Samples of the exporter's version, the last poll, and the reporters."""

from __future__ import annotations

import platform
from collections.abc import Iterator

from gpumem_exporter.collectors import catalog
from gpumem_exporter.collectors.lines import Column, Sample
from gpumem_exporter.collectors.view import View, pid_order

__all__ = ["build_sample", "poll_samples", "reporter_samples"]


def build_sample(version: str, source: str) -> Sample:
    """Return the sample that describes the exporter, which is the same in every scrape."""
    return catalog.BUILD_INFO, (version, source, platform.python_version()), 1


def poll_samples(view: View) -> Iterator[Sample]:
    """Yield whether the driver answers, and the duration and time of the last poll unless it has expired."""
    yield catalog.NVML_UP, (), 0 if view.node is None else 1
    last = view.snapshot.node
    if last is not None:
        yield catalog.POLL_DURATION, (), last.duration_seconds
        yield catalog.POLL_TIMESTAMP, (), last.taken_unix_seconds


def reporter_samples(view: View) -> Iterator[Column]:
    """Yield the state of each reporter, the time of its last report, and the time of its sample."""
    rows: dict[str, tuple[str, str, int, float, float | None]] = {}
    for pid, process in view.reporting:
        identity, received = process.report.process, process.received_unix_seconds
        rows[pid] = (identity.workload, identity.rank, 1, received, received - process.report.sample_age_seconds)
    for pid, reporter in view.silent:
        rows[pid] = (reporter.workload, reporter.rank, 0, reporter.last_report_unix_seconds, None)
    pids = sorted(rows, key=pid_order) if view.silent else list(rows)  # reporting processes are already in order
    tails = tuple([(pid, *rows[pid][:2]) for pid in pids])
    yield Column(catalog.REPORTER_UP, (), tails, [rows[pid][2] for pid in pids])
    yield Column(catalog.REPORTER_TIMESTAMP, (), tails, [rows[pid][3] for pid in pids])
    yield Column(catalog.SAMPLE_TIMESTAMP, (), tails, [rows[pid][4] for pid in pids])
