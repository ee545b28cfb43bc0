"""Renders the metrics page without `prometheus_client`.

`prometheus_client` takes 8 to 10 µs per series, and a node with 64 processes on 8 devices has 20,000 series. This
module renders nine tenths of the page when reports and readings arrive, and the rest in the scrape with cached label
texts. `GpumemCollector` provides the same samples to any registry.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from prometheus_client import CollectorRegistry

from gpumem_exporter.collectors import catalog
from gpumem_exporter.collectors.devices import device_samples
from gpumem_exporter.collectors.lines import Column, LineWriter, Sample, header
from gpumem_exporter.collectors.prepared import PreparedReports
from gpumem_exporter.collectors.processes import info_samples, used_samples
from gpumem_exporter.collectors.reporters import build_sample
from gpumem_exporter.collectors.self_metrics import RegistryPage
from gpumem_exporter.collectors.subjects import DEVICE, PROCESS, SUBJECTS, TORCH, Subject, SubjectRunner
from gpumem_exporter.collectors.view import OrderedDevices, View, gpu_by_uuid
from gpumem_exporter.core.samples import NodeReading, ReportingProcess, Snapshot

__all__ = ["CONTENT_TYPE_OPENMETRICS", "CONTENT_TYPE_TEXT", "Exposition"]

CONTENT_TYPE_TEXT = "text/plain; version=0.0.4; charset=utf-8"
CONTENT_TYPE_OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"

_EOF = b"# EOF\n"


@dataclass(frozen=True, slots=True)
class _PreparedReading:
    """A reading, its devices in order, and the lines that depend on the reading only."""

    node: NodeReading
    ordered: OrderedDevices
    device: Mapping[catalog.Metric, bytes]
    used: Mapping[catalog.Metric, bytes]


class Exposition:
    """Renders the page. Only the event loop uses it, except `prepare_reading`.

    Args:
        own: the registry of the exporter's own metrics, which are at the end of the page.
        version: the version of the exporter.
        source: "nvml" or "demo".
        max_prepared_processes: the most processes whose lines are cached; 5 to 12 KB for each process and device.
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
        self._own = RegistryPage(own)
        self._build = build_sample(version, source)
        self._prepared = PreparedReports(max_processes=max_prepared_processes)
        self._writer = LineWriter()
        self._runner = SubjectRunner(clock)
        self._reading_writer = LineWriter()  # the poller's thread uses it
        self._reading: _PreparedReading | None = None
        self._headers = {
            openmetrics: {metric: header(metric, openmetrics=openmetrics) for metric in catalog.SCRAPED}
            for openmetrics in (False, True)
        }

    def prepare(self, process: ReportingProcess, node: NodeReading | None) -> None:
        """Render a process' lines when its report arrives, so that a scrape only joins them.

        The call is optional: the page is the same without it, or with another `node` at the scrape, but takes longer.
        """
        self._prepared.prepare(process, gpu_by_uuid(node))

    def prepare_reading(self, node: NodeReading) -> None:
        """Render the lines that depend on a reading only, so that a scrape only joins them.

        The poller's thread calls it. The call is optional: the page is the same without it, but takes longer.
        """
        prepared = None
        with contextlib.suppress(Exception):  # `render` then renders these lines and logs the error
            ordered, write = OrderedDevices.of(node), self._reading_writer.write
            prepared = _PreparedReading(
                node, ordered, write(device_samples(node, ordered)), write(used_samples(ordered))
            )
            self._reading_writer.end_page()
        self._reading = prepared

    def render(self, snapshot: Snapshot, *, openmetrics: bool) -> bytes:
        """Return the page in OpenMetrics 1.0 or in Prometheus' text format 0.0.4. Never raises."""
        outcomes: list[Sample] = []
        families: dict[catalog.Metric, Iterable[bytes]] = {}
        reading = self._reading  # the poller's thread may replace it
        if reading is not None and reading.node is not snapshot.node:
            reading = None
        view = self._runner.run(
            "view", partial(View.of, snapshot, reading.ordered if reading is not None else None), outcomes
        )
        if view is not None:
            for name, subject in SUBJECTS:
                make = partial(self._lines, name, subject, view, reading)
                families.update(self._runner.run(name, make, outcomes) or {})
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

    def _lines(
        self, name: str, subject: Subject, view: View, reading: _PreparedReading | None
    ) -> dict[catalog.Metric, Iterable[bytes]]:
        if name == TORCH:
            return self._prepared.families(view)
        if name == DEVICE and reading is not None:
            return _pieces(reading.device)
        if name == PROCESS and reading is not None:
            return {**_pieces(reading.used), **self._write(info_samples(view))}
        return self._write(subject(view))

    def _write(self, samples: Iterable[Sample | Column]) -> dict[catalog.Metric, Iterable[bytes]]:
        return _pieces(self._writer.write(samples))


def _pieces(lines: Mapping[catalog.Metric, bytes]) -> dict[catalog.Metric, Iterable[bytes]]:
    return {metric: (text,) for metric, text in lines.items()}
