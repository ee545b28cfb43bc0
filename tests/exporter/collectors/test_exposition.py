"""The two formats of the metrics page, and the page when a part of it fails."""

from __future__ import annotations

import itertools
import logging
import re
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from gpumem_exporter.collectors.exposition import Exposition
from gpumem_exporter.collectors.instruments import Instruments
from tests.support.exposition_builders import SAMPLE, device, exposition, lines, node, process, read, snapshot, text_of


@pytest.mark.parametrize("openmetrics", [True, False])
def test_the_metrics_of_the_exporter_are_at_the_end(openmetrics: bool) -> None:
    instruments = Instruments()
    instruments.count_report("accepted")
    text = b"".join(exposition(instruments).render(snapshot(), openmetrics=openmetrics)).decode()
    assert 'gpumem_reports_total{outcome="accepted"} 1.0\n' in text
    assert text.index("gpumem_reports_total") < text.index("process_open_fds ")
    assert text.count("# EOF") == int(openmetrics)
    assert text.endswith("# EOF\n") == openmetrics


def test_the_process_is_described_as_by_prometheus_client() -> None:
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    page = b"".join(exposition().render(snapshot(), openmetrics=False)).decode()
    own = re.findall(r"^(?:# \w+ )?process_.*\n", page, re.MULTILINE)
    (described, shown), (wanted, expected) = map(
        read, map(text_string_to_metric_families, ("".join(own), generate_latest(registry).decode()))
    )
    assert described == wanted
    assert shown.keys() == expected.keys()
    for (name, _), value in shown.items():
        assert value == pytest.approx(expected[name, frozenset()], rel=0.2), name


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
    whole = text_of(writer, valid).splitlines()
    with caplog.at_level(logging.ERROR):
        partly = text_of(writer, broken).splitlines()
        text_of(writer, broken)
    success = "gpumem_scrape_collector_success{collector="
    remaining = [line for line in whole if "gpumem_process_" not in line and not line.startswith(success)]
    assert [line for line in partly if not line.startswith(success)] == remaining
    assert len(remaining) < len(whole)
    assert 'gpumem_scrape_collector_success{collector="process"} 0' in partly
    assert 'gpumem_scrape_collector_success{collector="torch"} 1' in partly
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert text_of(writer, valid).splitlines() == whole


def test_each_part_of_the_page_has_its_duration() -> None:
    ticks = itertools.count()
    writer = Exposition(Instruments(), version="1", source="nvml", clock=lambda: next(ticks) * 0.25)
    text = text_of(writer, snapshot())
    assert 'gpumem_scrape_collector_duration_seconds{collector="device"} 0.5\n' in text
