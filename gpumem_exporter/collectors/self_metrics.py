"""The exporter's own metrics, which `prometheus_client` renders again only after a change.

They have a few hundred series. At 8 µs each they would take as long as the rest of the page, and most of them change a
few times a day.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.registry import Collector

__all__ = ["CachedMetric", "RegistryPage"]

M = TypeVar("M", bound=MetricWrapperBase)

_EOF = b"# EOF\n"


class CachedMetric(Collector, Generic[M]):
    """A metric that rarely changes: between changes, `collect` returns the same objects. Thread-safe.

    Args:
        metric: the metric, which is not registered itself; all changes must use `modify`.
        registry: the registry for this object, in place of the metric.
    """

    def __init__(self, metric: M, registry: CollectorRegistry) -> None:
        self._metric = metric
        self._state = object()  # replaced after each change; unlike a counter, it cannot lose an update in a race
        self._collected: tuple[object, list[Metric]] | None = None
        registry.register(self)

    @contextmanager
    def modify(self) -> Iterator[M]:
        """Return the metric for a change."""
        try:
            yield self._metric
        finally:
            self._state = object()

    def describe(self) -> Iterable[Metric]:
        """Return name and type for the registry."""
        return self._metric.describe()

    def collect(self) -> Iterable[Metric]:
        """Return the families of the metric, which the caller must not change."""
        state, collected = self._state, self._collected
        if collected is None or collected[0] is not state:
            collected = self._collected = state, list(self._metric.collect())
        return collected[1]


class RegistryPage:
    """Renders the metrics of a registry, without the `_created` series of counters. Not thread-safe.

    Args:
        registry: the registry. Families that are the same object as on the last page are not rendered again.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._families: dict[tuple[str, bool], tuple[Metric, bytes]] = {}

    def write(self, *, openmetrics: bool) -> bytes:
        """Return the lines of all families, without `# EOF`."""
        texts: list[bytes] = []
        for metric in self._registry.collect():
            key = metric.name, openmetrics
            written, text = self._families.get(key, (None, b""))
            if written is not metric:
                text = _render(metric, openmetrics=openmetrics)
                self._families[key] = metric, text
            texts.append(text)
        return b"".join(texts)


class _SingleMetric(Collector):
    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterable[Metric]:
        return (self._metric,)


def _render(metric: Metric, *, openmetrics: bool) -> bytes:
    created = f"{metric.name}_created"
    family = copy(metric)
    family.samples = [sample for sample in metric.samples if sample.name != created]
    if openmetrics:
        page: bytes = generate_openmetrics(_SingleMetric(family))  # type: ignore[no-untyped-call]
        return page.removesuffix(_EOF)
    return generate_latest(_SingleMetric(family))
