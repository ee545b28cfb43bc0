"""The two formats of the metrics page, and the page when a part of it fails."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry, Gauge, Metric
from prometheus_client.registry import Collector

from gpumem_exporter.collectors.exposition import Exposition
from gpumem_exporter.collectors.instruments import Instruments
from tests.support.exposition_builders import SAMPLE, device, exposition, lines, node, process, snapshot


@pytest.mark.parametrize("openmetrics", [True, False])
def test_the_own_metrics_and_those_of_the_registry_are_at_the_end(openmetrics: bool) -> None:
    instruments = Instruments()
    instruments.count_report("accepted")
    registry = CollectorRegistry()
    Gauge("open_files", "Files.", registry=registry).set(3)
    text = exposition(instruments, registry).render(snapshot(), openmetrics=openmetrics).decode()
    assert 'gpumem_reports_total{outcome="accepted"} 1.0\n' in text
    assert text.index("gpumem_reports_total") < text.index("open_files 3.0\n")
    assert text.count("# EOF") == int(openmetrics)
    assert text.endswith("# EOF\n") == openmetrics


def test_label_values_are_escaped() -> None:
    shown = lines(snapshot(process(7, SAMPLE, workload='a\\b"c\nd')), "gpumem_reporter_up")
    assert shown == [r'gpumem_reporter_up{pid="70",workload="a\\b\"c\nd",rank="0"} 1']


def test_bytes_that_are_not_utf8_are_replaced() -> None:
    known = snapshot(process(7, SAMPLE, workload=b"w\xff".decode("utf-8", "surrogateescape")))
    (line,) = lines(known, "gpumem_torch_ooms_total")
    assert 'workload="w?"' in line


class _Broken:
    """Facts of a process whose attributes raise."""

    start_time_ticks = 3

    def __getattr__(self, name: str) -> str:
        raise RuntimeError("broken")


def test_a_failing_subject_is_left_out_and_logged_and_the_others_stay(caplog: pytest.LogCaptureFixture) -> None:
    writer = exposition()
    valid = snapshot(process(7, SAMPLE), on=node(device(processes={70: 50})))
    broken = replace(valid, node=replace(valid.node, facts={70: _Broken()}))  # type: ignore[type-var, dict-item]
    whole = writer.render(valid, openmetrics=False).decode().splitlines()
    with caplog.at_level(logging.ERROR):
        partly = writer.render(broken, openmetrics=False).decode().splitlines()
        writer.render(broken, openmetrics=False)
    success = "gpumem_scrape_collector_success{collector="
    remaining = [line for line in whole if "gpumem_process_" not in line and not line.startswith(success)]
    assert [line for line in partly if not line.startswith(success)] == remaining
    assert len(remaining) < len(whole)
    assert 'gpumem_scrape_collector_success{collector="process"} 0' in partly
    assert 'gpumem_scrape_collector_success{collector="torch"} 1' in partly
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert writer.render(valid, openmetrics=False).decode().splitlines() == whole


class _Raising(Collector):
    def collect(self) -> Iterable[Metric]:
        raise RuntimeError("broken")


@pytest.mark.parametrize("openmetrics", [True, False])
def test_a_failing_registry_affects_only_the_own_series(openmetrics: bool) -> None:
    registry = CollectorRegistry()
    registry.register(_Raising())
    text = exposition(registry=registry).render(snapshot(process(7, SAMPLE)), openmetrics=openmetrics).decode()
    assert 'gpumem_scrape_collector_success{collector="own"} 0\n' in text
    assert 'gpumem_reporter_up{pid="70",workload="w",rank="0"} 1\n' in text
    assert text.endswith("# EOF\n") == openmetrics


def test_each_part_of_the_page_has_its_duration() -> None:
    ticks = itertools.count()
    writer = Exposition(
        Instruments(), CollectorRegistry(), version="1", source="nvml", clock=lambda: next(ticks) * 0.25
    )
    text = writer.render(snapshot(), openmetrics=False).decode()
    assert 'gpumem_scrape_collector_duration_seconds{collector="device"} 0.5\n' in text
