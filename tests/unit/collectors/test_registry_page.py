"""The page of the exporter's own metrics equals that of `prometheus_client`, except for `_created`."""

from __future__ import annotations

import math
from contextlib import suppress

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, Summary, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

from gpumem_exporter.collectors.self_metrics import CachedMetric, RegistryPage


def expected(registry: CollectorRegistry, *, openmetrics: bool) -> bytes:
    page = generate_openmetrics(registry) if openmetrics else generate_latest(registry)
    lines = page.removesuffix(b"# EOF\n").splitlines(keepends=True)
    return b"".join(line for line in lines if b"_created" not in line)


@pytest.fixture
def registry() -> CollectorRegistry:
    made = CollectorRegistry()
    counter = Counter("c_total", 'A "counter" \\ of\nthings', ["b", "a"], registry=made)
    counter.labels('x"y', "1\\2\n3").inc(5)
    counter.labels("ä", "").inc(1e21)
    for value, name in ((math.inf, "up"), (-math.inf, "down"), (math.nan, "none"), (1234567.0, "many"), (1e-9, "few")):
        Gauge(f"g_{name}", "A gauge", registry=made).set(value)
    histogram = Histogram("h", "A histogram", ["k"], registry=made, buckets=(0.1, 1, 2_500_000))
    for value in (0.05, 3.0, 1e9):
        histogram.labels("v").observe(value)
    Histogram("e", "With an example", registry=made).observe(1.0, {"trace": "1"})
    Summary("s", "A summary", registry=made).observe(2.0)
    Info("i", "What it is", registry=made).info({"version": "1"})
    Gauge("empty", "Nothing yet", ["k"], registry=made)
    return made


@pytest.mark.parametrize("openmetrics", [False, True])
def test_every_type_is_rendered_as_by_the_library_also_from_the_cache(
    registry: CollectorRegistry, openmetrics: bool
) -> None:
    page = RegistryPage(registry)
    for _ in range(2):
        assert page.write(openmetrics=openmetrics) == expected(registry, openmetrics=openmetrics)


def test_a_cached_metric_is_collected_again_only_after_a_change(registry: CollectorRegistry) -> None:
    counter = Counter("rare_total", "What seldom happens", ["k"], registry=None)
    rare = CachedMetric(counter, registry)
    page = RegistryPage(registry)
    before = page.write(openmetrics=False)
    counter.labels("past the gate").inc()
    assert page.write(openmetrics=False) == before
    with rare.modify() as changed:
        changed.labels("a").inc(3)
    for openmetrics in (False, True):
        written = page.write(openmetrics=openmetrics)
        assert written == expected(registry, openmetrics=openmetrics)
        assert b'rare_total{k="a"} 3.0' in written
    assert registry.get_sample_value("rare_total", {"k": "a"}) == 3


def test_a_partial_change_that_raises_is_rendered(registry: CollectorRegistry) -> None:
    rare = CachedMetric(Counter("rare_total", "What seldom happens", registry=None), registry)
    page = RegistryPage(registry)
    page.write(openmetrics=False)
    with suppress(RuntimeError), rare.modify() as counter:
        counter.inc()
        raise RuntimeError
    assert b"rare_total 1.0" in page.write(openmetrics=False)
