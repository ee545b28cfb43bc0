"""The metrics page, written directly.

`prometheus_client` takes 8 to 10 µs a series; a node of 64 processes on 8 devices has 20,000. Here the series that
make up nine tenths of the page are written as reports and readings come in, and the rest at the scrape with remembered
labels. `GpumemCollector` offers the same samples, made by the same functions, to any registry.
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
from gpumem_exporter.collectors.own import OwnPage
from gpumem_exporter.collectors.prepared import PreparedReports
from gpumem_exporter.collectors.processes import info_samples, used_samples
from gpumem_exporter.collectors.reporters import build_sample
from gpumem_exporter.collectors.subjects import DEVICE, PROCESS, SUBJECTS, TORCH, Subject, SubjectRunner
from gpumem_exporter.collectors.view import Devices, View, gpu_by_uuid
from gpumem_exporter.core.samples import NodeReading, ReportingProcess, Snapshot

__all__ = ["CONTENT_TYPE_OPENMETRICS", "CONTENT_TYPE_TEXT", "Exposition"]

CONTENT_TYPE_TEXT = "text/plain; version=0.0.4; charset=utf-8"
CONTENT_TYPE_OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"

_EOF = b"# EOF\n"


@dataclass(frozen=True, slots=True)
class _PreparedReading:
    """A reading, its devices in order, and the lines that follow from it alone."""

    node: NodeReading
    on: Devices
    device: Mapping[catalog.Metric, bytes]
    used: Mapping[catalog.Metric, bytes]


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
        self._reading_writer = LineWriter()  # the poller's thread uses it
        self._reading: _PreparedReading | None = None
        self._headers = {
            openmetrics: {metric: header(metric, openmetrics=openmetrics) for metric in catalog.SCRAPED}
            for openmetrics in (False, True)
        }

    def prepare(self, process: ReportingProcess, node: NodeReading | None) -> None:
        """Write a process' lines now that its report is there, so that a scrape has only to join them.

        Leaving it out, or another `node` at the scrape, costs time and nothing else.
        """
        self._prepared.prepare(process, gpu_by_uuid(node))

    def prepare_reading(self, node: NodeReading) -> None:
        """Write what follows from a reading of the driver alone, so that a scrape of it has only to join that.

        Called in the poller's thread, for one reading after the other. Leaving it out costs time and nothing else.
        """
        prepared = None
        with contextlib.suppress(Exception):  # the page writes these lines itself then, and says what is wrong
            on, write = Devices.of(node), self._reading_writer.write
            prepared = _PreparedReading(node, on, write(device_samples(node, on)), write(used_samples(on)))
            self._reading_writer.end_page()
        self._reading = prepared

    def render(self, snapshot: Snapshot, *, openmetrics: bool) -> bytes:
        """The whole page in OpenMetrics 1.0 or in Prometheus' text format 0.0.4. Does not raise."""
        outcomes: list[Sample] = []
        families: dict[catalog.Metric, Iterable[bytes]] = {}
        reading = self._reading  # the poller's thread may put another in its place
        if reading is not None and reading.node is not snapshot.node:
            reading = None
        view = self._runner.run(
            "view", partial(View.of, snapshot, reading.on if reading is not None else None), outcomes
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
