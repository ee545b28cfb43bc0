"""The samples of a snapshot as a `prometheus_client` collector, for use in another registry."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from gpumem_exporter.collectors import catalog
from gpumem_exporter.collectors.lines import Sample, printable, single_samples
from gpumem_exporter.collectors.reporters import build_sample
from gpumem_exporter.collectors.subjects import SUBJECTS, Subject, SubjectRunner
from gpumem_exporter.collectors.view import View
from gpumem_exporter.core.samples import Snapshot

__all__ = ["GpumemCollector"]


class GpumemCollector(Collector):
    """Collects the metrics of a snapshot. Thread-safe; collecting never raises.

    The exporter's own counters are not included. `Instruments` registers them separately.

    Args:
        snapshot: returns the current snapshot; called once per scrape, in the scraping thread.
        version: the version of the exporter.
        source: "nvml" or "demo".
        clock: monotonic seconds.
    """

    def __init__(
        self,
        snapshot: Callable[[], Snapshot],
        *,
        version: str,
        source: str,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._snapshot = snapshot
        self._build = build_sample(version, source)
        self._runner = SubjectRunner(clock)

    def describe(self) -> Iterable[GaugeMetricFamily | CounterMetricFamily]:
        """Return all families without samples, so that a registry can reject duplicate names."""
        return [_family(metric) for metric in catalog.SCRAPED]

    def collect(self) -> Iterable[GaugeMetricFamily | CounterMetricFamily]:
        """Return the families that have samples, in the order of the catalog."""
        outcomes: list[Sample] = []
        samples: list[Sample] = [self._build]
        view = self._runner.run("view", lambda: View.of(self._snapshot()), outcomes)
        if view is not None:
            for name, subject in SUBJECTS:
                samples += self._runner.run(name, partial(_listed, subject, view), outcomes) or ()
        families: dict[catalog.Metric, GaugeMetricFamily | CounterMetricFamily] = {}
        for metric, labels, value in (*samples, *outcomes):
            family = families.get(metric)
            if family is None:
                family = families[metric] = _family(metric)
            family.add_metric([printable(label) for label in labels], value)
        return [families[metric] for metric in catalog.SCRAPED if metric in families]


def _listed(subject: Subject, view: View) -> list[Sample]:
    return list(single_samples(subject(view)))


def _family(metric: catalog.Metric) -> GaugeMetricFamily | CounterMetricFamily:
    cls = CounterMetricFamily if metric.type == "counter" else GaugeMetricFamily
    return cls(metric.family, metric.help, labels=metric.labels)
