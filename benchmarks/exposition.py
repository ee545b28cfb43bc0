"""The exporter's own writer of `/metrics` compared with `prometheus_client` on the same series, without a server.

    python -m benchmarks.exposition [--quick] [--json]

Each scrape has new reports of every process and a new reading of the driver. It is compared, in turns, with
`prometheus_client.generate_latest` on the same samples, with the first page of an exporter, and with one copy of the
finished body, the minimum cost of any page.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from benchmarks.claims import Options, Progress, Row, compared, show
from benchmarks.snapshots import node, reporting
from gpumem_exporter.collectors.exposition import Exposition, view_of
from gpumem_exporter.collectors.instruments import Instruments
from gpumem_exporter.collectors.subjects import Metric
from gpumem_exporter.core.samples import Snapshot

PROCESSES = 64
CLIENT_RATIO = 0.25
"""A scrape, compared with the same page by prometheus_client."""


def main() -> int:
    options = Options(__doc__, real_gpu=False)
    options.amount("--rounds", 30, 5, "pages of each kind")
    given = options.read()
    progress = Progress("exposition", 2)
    rows = [row for devices in (1, 8) for row in measure(progress, devices, given.rounds)]
    return show("exposition", rows, as_json=given.json)


def measure(progress: Progress, devices: int, rounds: int) -> list[Row]:
    """Pages of one node."""
    progress.part(f"{PROCESSES} processes × {devices} devices")
    instruments = Instruments()
    instruments.count_report("accepted")
    exposition = Exposition(instruments, version="0", source="nvml")
    names = ("scrape", "OpenMetrics", "first page", "copy", "prometheus_client")
    seconds: dict[str, list[float]] = {name: [] for name in names}
    body = b""

    def page(of: Exposition, *, openmetrics: bool = False) -> bytes:
        return b"".join(of.render(snapshot, openmetrics=openmetrics))

    for turn in progress.turns(rounds):
        tick = turn + 1
        reading = node(PROCESSES, devices, tick)
        reports = tuple(reporting(pid, devices, tick) for pid in range(PROCESSES))
        snapshot = Snapshot(float(tick), reading, reports)
        spent, body = timed(page, exposition)
        seconds["scrape"].append(spent)
        seconds["OpenMetrics"].append(timed(page, exposition, openmetrics=True)[0])
        cold = Exposition(instruments, version="0", source="nvml")
        seconds["first page"].append(timed(page, cold)[0])
        seconds["copy"].append(timed(bytearray, body)[0])
        if turn < max(3, rounds // 10):  # by far the slowest of them
            embedded = CollectorRegistry()
            embedded.register(ByPrometheusClient(exposition, snapshot))
            seconds["prometheus_client"].append(timed(generate_latest, embedded)[0])
    series = sum(not line.startswith(b"#") for line in body.splitlines())
    size = f"{PROCESSES} × {devices}, {series} series, {len(body) / 1e6:.2f} MB"
    ms = {name: 1e3 * statistics.median(values) for name, values in seconds.items()}
    scrape = ms["scrape"]
    return [
        compared(f"{size}: scrape", scrape, "ms", "prometheus_client", ms["prometheus_client"], CLIENT_RATIO),
        compared(f"{size}: the same", scrape, "ms", "one copy of the body", ms["copy"]),
        compared(f"{size}: in OpenMetrics", ms["OpenMetrics"], "ms", "scrape", scrape),
        compared(f"{size}: the first page", ms["first page"], "ms", "scrape", scrape),
    ]


def timed(work: Callable[..., Any], *arguments: object, **options: object) -> tuple[float, Any]:
    """Return the CPU seconds of a call in this thread, and its result."""
    started = time.thread_time()
    result = work(*arguments, **options)
    return time.thread_time() - started, result


class ByPrometheusClient(Collector):
    """The samples of a snapshot for `prometheus_client`."""

    def __init__(self, exposition: Exposition, snapshot: Snapshot) -> None:
        self._collectors = exposition.collectors
        self._snapshot = snapshot

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        families: dict[Metric, GaugeMetricFamily | CounterMetricFamily] = {}
        view = view_of(self._snapshot)
        for collector in self._collectors:
            for _, samples_of, source in collector.subjects(view):
                samples = samples_of(*source)
                for (metric, labels), value in zip(samples.series(*samples.labels), samples.values, strict=True):
                    if value is None:
                        continue
                    if metric not in families:
                        cls = CounterMetricFamily if metric.type == "counter" else GaugeMetricFamily
                        families[metric] = cls(metric.family, metric.help, labels=metric.labels)
                    families[metric].add_metric(labels, value)
        yield from families.values()


if __name__ == "__main__":
    sys.exit(main())
