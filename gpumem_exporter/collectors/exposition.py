"""Renders the metrics page.

`prometheus_client` takes 8 to 10 µs per series, and a node with 64 processes on 8 devices has 20,000 series. Here each
subject (a device, a process, the allocator of a process) keeps its lines until it changes, and a page joins the lines
of all subjects family by family.
`prometheus_client` renders only what a registry adds: the metrics of the exporter's process.
"""

from __future__ import annotations

import logging
import platform
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

from gpumem_exporter.collectors import catalog
from gpumem_exporter.collectors.allocators import torch_collector
from gpumem_exporter.collectors.devices import DEVICE, LEDGER, POLL
from gpumem_exporter.collectors.instruments import Instruments
from gpumem_exporter.collectors.processes import OOM, PROCESS, REPORTER
from gpumem_exporter.collectors.subjects import Collector, Samples, Series, Subject, SubjectLines, View
from gpumem_exporter.core.samples import Snapshot

CONTENT_TYPE_TEXT = "text/plain; version=0.0.4; charset=utf-8"
CONTENT_TYPE_OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"

_EOF = b"# EOF\n"
_FURTHER: dict[bool, Callable[[CollectorRegistry], bytes]] = {True: generate_openmetrics, False: generate_latest}
"""Render a registry, in OpenMetrics or not."""

_log = logging.getLogger(__name__)


class Exposition:
    """Renders the page. Thread-safe.

    `registry` has further metrics for the end of the page. With `hide_identities`, the labels with a user, a command or
    a pod are empty.
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
        self._registry = registry
        self._build = (version, source, platform.python_version())
        self._hide_identities = hide_identities
        self._clock = clock
        self.collectors = (POLL, DEVICE, LEDGER, PROCESS, OOM, REPORTER, torch_collector())
        self._collectors = (*self.collectors, Collector("own", catalog.OWN, instruments.subjects))
        self._lines = {collector.name: SubjectLines(collector.families) for collector in self._collectors}
        self._scrape_lines = SubjectLines((catalog.BUILD_INFO, catalog.COLLECTOR_SUCCESS, catalog.COLLECTOR_DURATION))
        self._failing: set[str] = set()
        self._lock = threading.Lock()

    def render(self, snapshot: Snapshot, *, openmetrics: bool) -> bytes:
        """Return the page in OpenMetrics 1.0 or in Prometheus' text format 0.0.4.

        A collector that fails is left out and does not affect the others. Its first failure is logged.
        """
        with self._lock:
            view = View.of(snapshot, hide_identities=self._hide_identities)
            seconds: dict[str, float] = {}
            subjects: dict[str, list[Subject]] = {}
            families: dict[catalog.Metric, tuple[bytes, ...]] = {}
            failed: set[str] = set()
            for name, _, collect in self._collectors:
                started = self._clock()
                try:
                    subjects[name] = list(collect(view))
                except Exception:  # noqa: BLE001 - logged there
                    self._fail(name, failed)
                seconds[name] = self._clock() - started
            for name, collected in subjects.items():
                started = self._clock()
                try:
                    families.update(self._lines[name].page(collected))
                except Exception:  # noqa: BLE001 - logged there
                    self._fail(name, failed)
                seconds[name] += self._clock() - started
            further = b""
            try:
                further = _FURTHER[openmetrics](self._registry).removesuffix(_EOF)
            except Exception:  # noqa: BLE001 - logged there
                self._fail("own", failed)
            self._failing &= failed
            outcomes = [value for name in seconds for value in (int(name not in failed), seconds[name])]
            scrape = Samples((self._build, *seconds), _scrape_series, (1, *outcomes))
            families.update(self._scrape_lines.page([("scrape", scrape)]))
            return _joined(families, further, openmetrics=openmetrics)

    def _fail(self, name: str, failed: set[str]) -> None:
        failed.add(name)
        if name not in self._failing:
            self._failing.add(name)
            _log.exception("collector %r failed; its metrics are left out until it succeeds", name)


def _scrape_series(build: tuple[str, str, str], *names: str) -> Iterator[Series]:
    yield catalog.BUILD_INFO, build
    for name in names:
        yield catalog.COLLECTOR_SUCCESS, (name,)
        yield catalog.COLLECTOR_DURATION, (name,)


def _joined(families: Mapping[catalog.Metric, tuple[bytes, ...]], further: bytes, *, openmetrics: bool) -> bytes:
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
