"""The metrics page, written directly.

`prometheus_client` takes 8 to 10 µs a series; a node of 64 processes on 8 devices has 20,000. Here the series that
make up nine tenths of the page are written as the reports come in (`prepared`), and the rest at the scrape with
remembered labels. `GpumemCollector` offers the same samples, made by the same functions, to any registry.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial

from prometheus_client import CollectorRegistry

from gpumem_exporter.collectors import catalog
from gpumem_exporter.collectors.lines import Column, LineWriter, Sample, header
from gpumem_exporter.collectors.own import OwnPage
from gpumem_exporter.collectors.prepared import PreparedReports
from gpumem_exporter.collectors.reporters import build_sample
from gpumem_exporter.collectors.subjects import SUBJECTS, TORCH, Subject, SubjectRunner
from gpumem_exporter.collectors.view import View, gpu_by_uuid
from gpumem_exporter.core.samples import NodeReading, ReportingProcess, Snapshot

__all__ = ["CONTENT_TYPE_OPENMETRICS", "CONTENT_TYPE_TEXT", "Exposition"]

CONTENT_TYPE_TEXT = "text/plain; version=0.0.4; charset=utf-8"
CONTENT_TYPE_OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"

_EOF = b"# EOF\n"


class Exposition:
    """Writes the page. One thread at a time: the event loop's.

    Args:
        own: the exporter's own counters and histograms; they follow at the end of the page.
        version: the exporter's.
        source: "nvml" or "demo".
        max_prepared_processes: of how many processes the lines are kept ready; 5 to 12 KB for each process and device.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        own: CollectorRegistry,
        *,
        version: str,
        source: str,
        max_prepared_processes: int = 1024,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._own = OwnPage(own)
        self._build = build_sample(version, source)
        self._prepared = PreparedReports(max_processes=max_prepared_processes)
        self._writer = LineWriter()
        self._runner = SubjectRunner(clock)
        self._headers = {
            openmetrics: {metric: header(metric, openmetrics=openmetrics) for metric in catalog.SCRAPED}
            for openmetrics in (False, True)
        }

    def prepare(self, process: ReportingProcess, node: NodeReading | None) -> None:
        """Write a process' lines now that its report is there, so that a scrape has only to join them.

        Leaving it out, or another `node` at the scrape, costs time and nothing else.
        """
        self._prepared.prepare(process, gpu_by_uuid(node))

    def render(self, snapshot: Snapshot, *, openmetrics: bool) -> bytes:
        """The whole page in OpenMetrics 1.0 or in Prometheus' text format 0.0.4. Does not raise."""
        outcomes: list[Sample] = []
        families: dict[catalog.Metric, Iterable[bytes]] = {}
        view = self._runner.run("view", partial(View.of, snapshot), outcomes)
        if view is not None:
            for name, subject in SUBJECTS:
                families.update(self._runner.run(name, partial(self._lines, name, subject, view), outcomes) or {})
        own = self._runner.run("own", partial(self._own.write, openmetrics=openmetrics), outcomes)
        families.update(self._write([self._build, *outcomes]))
        self._writer.end_page()

        page: list[bytes] = []
        headers = self._headers[openmetrics]
        for metric in catalog.SCRAPED:
            pieces = families.get(metric, ())
            if any(pieces):
                page.append(headers[metric])
                page.extend(pieces)
        page.append(own or b"")
        if openmetrics:
            page.append(_EOF)
        return b"".join(page)

    def _lines(self, name: str, subject: Subject, view: View) -> dict[catalog.Metric, Iterable[bytes]]:
        if name == TORCH:
            return self._prepared.families(view)
        return self._write(subject(view))

    def _write(self, samples: Iterable[Sample | Column]) -> dict[catalog.Metric, Iterable[bytes]]:
        return {metric: (lines,) for metric, lines in self._writer.write(samples).items()}
