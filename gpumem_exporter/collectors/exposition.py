"""Renders the metrics page.

`prometheus_client` takes 8 to 10 µs per series, and a node with 64 processes on 8 devices has 20,000 series. Here each
subject (a device, a process, the allocator of a process) keeps its lines until it changes, and a page joins the lines
of all subjects family by family. The lines of a report are rendered when it arrives shortly before a scrape, so that
the scrape only joins them.
`prometheus_client` renders only what a registry adds: the metrics of the exporter's process.
"""

from __future__ import annotations

import logging
import math
import platform
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import TypeVar

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

from gpumem_exporter.collectors import catalog
from gpumem_exporter.collectors.allocators import TORCH, AllocatorSource
from gpumem_exporter.collectors.devices import DEVICE, LEDGER
from gpumem_exporter.collectors.instruments import Instruments
from gpumem_exporter.collectors.ooms import OOM
from gpumem_exporter.collectors.processes import PROCESS
from gpumem_exporter.collectors.reporters import POLL, REPORTER, reporter_samples
from gpumem_exporter.collectors.subjects import Collector, Samples, Series, SubjectLines
from gpumem_exporter.collectors.view import View
from gpumem_exporter.core.samples import ReportingProcess, Snapshot

__all__ = ["COLLECTORS", "CONTENT_TYPE_OPENMETRICS", "CONTENT_TYPE_TEXT", "Exposition"]

CONTENT_TYPE_TEXT = "text/plain; version=0.0.4; charset=utf-8"
CONTENT_TYPE_OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"

COLLECTORS = (POLL, DEVICE, LEDGER, PROCESS, TORCH, OOM, REPORTER)

REFRESH_SECONDS = 2.5
"""The lines of a report are rendered if a page is due this long before or after it. Without this limit, each process
would be rendered with every report, about fifteen times for one scrape."""

_EOF = b"# EOF\n"

_log = logging.getLogger(__name__)

T = TypeVar("T")


class Exposition:
    """Renders the page. Thread-safe.

    Args:
        instruments: the exporter's own metrics.
        registry: further metrics, which are at the end of the page.
        version: the version of the exporter.
        source: "nvml" or "demo".
        hide_identities: the labels with a user, a command or a pod are empty.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        instruments: Instruments,
        registry: CollectorRegistry,
        *,
        version: str,
        source: str,
        hide_identities: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._instruments = instruments
        self._registry = registry
        self._build = (version, source, platform.python_version())
        self._hide_identities = hide_identities
        self._clock = clock
        self._lines = {collector.name: SubjectLines(collector.families) for collector in COLLECTORS}
        self._own_lines = SubjectLines(catalog.OWN)
        self._scrape_lines = SubjectLines((catalog.BUILD_INFO, catalog.COLLECTOR_SUCCESS, catalog.COLLECTOR_DURATION))
        self._failing: set[str] = set()
        self._lock = threading.Lock()
        self._last_page_seconds = -math.inf
        self._next_page_seconds = math.inf
        """The expected time of the next page: as long after the last page as that one after the page before it."""

    def cached_subjects(self) -> int:
        """Return the number of subjects whose lines are kept."""
        return sum(len(lines) for lines in self._lines.values())

    def refresh(self, process: ReportingProcess) -> None:
        """Render the lines of a process' new report, so that the next scrape only joins them.

        The call is optional and does not change the page. It does nothing unless the next scrape is due, for a process
        that was not on the last page, and, to never wait, while a page is rendered.
        """
        if abs(self._clock() - self._next_page_seconds) > REFRESH_SECONDS or not self._lock.acquire(blocking=False):
            return
        try:
            self._refresh(process)
        finally:
            self._lock.release()

    def _refresh(self, process: ReportingProcess) -> None:
        allocators = self._lines[TORCH.name]
        last = allocators.source(process.key)
        if isinstance(last, AllocatorSource):
            pid = last.process[0]
            allocators.refresh(process.key, AllocatorSource.of(process, pid, last.gpu_by_uuid))
            self._lines[REPORTER.name].refresh(pid, reporter_samples(process, pid))

    def render(self, snapshot: Snapshot, *, openmetrics: bool) -> bytes:
        """Return the page in OpenMetrics 1.0 or in Prometheus' text format 0.0.4. Never raises."""
        with self._lock:
            now = self._clock()
            self._next_page_seconds, self._last_page_seconds = 2 * now - self._last_page_seconds, now
            return self._page(snapshot, openmetrics=openmetrics)

    def _page(self, snapshot: Snapshot, *, openmetrics: bool) -> bytes:
        outcomes: dict[str, tuple[int, float]] = {}
        families: dict[catalog.Metric, tuple[bytes, ...]] = {}
        view = self._run("view", partial(View.of, snapshot, hide_identities=self._hide_identities), outcomes)
        if view is not None:
            for collector in COLLECTORS:
                families.update(self._run(collector.name, partial(self._collect, collector, view), outcomes) or {})
        own, further = self._run("own", partial(self._own, openmetrics=openmetrics), outcomes) or ({}, b"")
        families.update(own)
        families.update(self._scrape_lines.page([("scrape", self._scrape_samples(outcomes))]))
        return _join(families, further, openmetrics=openmetrics)

    def _collect(self, collector: Collector, view: View) -> dict[catalog.Metric, tuple[bytes, ...]]:
        return self._lines[collector.name].page(collector.subjects(view))

    def _own(self, *, openmetrics: bool) -> tuple[dict[catalog.Metric, tuple[bytes, ...]], bytes]:
        """Return the lines of the instruments, and the page of the registry without `# EOF`."""
        lines = self._own_lines.page(self._instruments.subjects())
        if openmetrics:
            page: bytes = generate_openmetrics(self._registry)  # type: ignore[no-untyped-call]
            return lines, page.removesuffix(_EOF)
        return lines, generate_latest(self._registry)

    def _scrape_samples(self, outcomes: Mapping[str, tuple[int, float]]) -> Samples:
        values = [value for outcome in outcomes.values() for value in outcome]
        return Samples((self._build, *outcomes), _scrape_series, (1, *values))

    def _run(self, name: str, make: Callable[[], T], outcomes: dict[str, tuple[int, float]]) -> T | None:
        """Return the result of `make`, or None if it raises; adds its success and duration to `outcomes`.

        The first failure is logged. A failing part does not affect the others.
        """
        started = self._clock()
        made: T | None = None
        success = 0
        try:
            made = make()
        except Exception:  # noqa: BLE001 - one failing part must not lose the page
            if name not in self._failing:
                self._failing.add(name)
                _log.exception("collector %r failed; its metrics are left out until it succeeds", name)
        else:
            success = 1
            self._failing.discard(name)
        outcomes[name] = success, self._clock() - started
        return made


def _scrape_series(build: tuple[str, str, str], *names: str) -> Iterator[Series]:
    yield catalog.BUILD_INFO, build
    for name in names:
        yield catalog.COLLECTOR_SUCCESS, (name,)
        yield catalog.COLLECTOR_DURATION, (name,)


def _join(families: Mapping[catalog.Metric, tuple[bytes, ...]], further: bytes, *, openmetrics: bool) -> bytes:
    """Join the lines of each family below its header, in the order of the catalog, and further metrics."""
    page: list[bytes] = []
    for metric in catalog.METRICS:
        pieces = families.get(metric, ())
        if any(pieces):
            page.append(_header(metric, openmetrics=openmetrics))
            page.extend(pieces)
    page.append(further)
    if openmetrics:
        page.append(_EOF)
    return b"".join(page)


@cache
def _header(metric: catalog.Metric, *, openmetrics: bool) -> bytes:
    """Return the HELP and TYPE lines of a family."""
    name = metric.family if openmetrics else metric.name
    return f"# HELP {name} {metric.help}\n# TYPE {name} {metric.type}\n".encode()
