"""The two formats of the metrics page, the series that are left out, and the page when a part of it fails."""

from __future__ import annotations

import logging
import re
import weakref
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from gpumem_client.wire.protocol import DeviceSample
from gpumem_exporter.collectors.instruments import Instruments
from gpumem_exporter.core.samples import NodeReading, ReportingProcess, Snapshot
from tests.support.builders import UUIDS, device, node, reporting
from tests.support.exposition_builders import exposition, read, text_of, whole_text_of

EMPTY = Snapshot(10.0, None)
SAMPLE = DeviceSample(UUIDS[0], allocated_bytes=60, reserved_bytes=100, reclaimable_bytes=30, ooms=2)


def lines(snapshot: Snapshot, *starts: str) -> list[str]:
    """Return the lines that start so."""
    return [line for line in text_of(exposition(), snapshot).splitlines() if line.startswith(starts)]


def known(*processes: ReportingProcess, on: NodeReading | None = None) -> Snapshot:
    return Snapshot(10.0, on, processes)


@pytest.mark.parametrize("openmetrics", [True, False])
def test_the_metrics_of_the_exporter_are_at_the_end(openmetrics: bool) -> None:
    instruments = Instruments()
    instruments.count_report("accepted")
    text = whole_text_of(exposition(instruments), EMPTY, openmetrics=openmetrics)
    assert 'gpumem_reports_total{outcome="accepted"} 1.0\n' in text
    assert text.index("gpumem_reports_total") < text.index("process_open_fds ")
    assert text.count("# EOF") == int(openmetrics)
    assert text.endswith("# EOF\n") == openmetrics


def test_the_process_is_described_as_by_prometheus_client() -> None:
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    own = re.findall(r"^(?:# \w+ )?process_.*\n", whole_text_of(exposition(), EMPTY), re.MULTILINE)
    (described, shown), (wanted, expected) = map(
        read, map(text_string_to_metric_families, ("".join(own), generate_latest(registry).decode()))
    )
    assert described == wanted
    assert shown.keys() == expected.keys()
    for (name, _), value in shown.items():
        assert value == pytest.approx(expected[name, frozenset()], rel=0.2), name


@pytest.mark.parametrize("reserved", [0, None])
def test_ratios_are_absent_while_nothing_is_reserved(reserved: int | None) -> None:
    sample = DeviceSample(UUIDS[0], allocated_bytes=0, reserved_bytes=reserved, reclaimable_bytes=0)
    snapshot = known(reporting(7, devices=(sample,)))
    assert lines(snapshot, "gpumem_torch_slack_ratio", "gpumem_torch_fragmentation_ratio") == []


def test_a_phase_and_a_component_may_have_the_same_name() -> None:
    writer = exposition()
    for peak in (1, 3):
        sample = DeviceSample(UUIDS[0], phase_peak_bytes={"other": peak}, component_bytes={"other": 2})
        shown = text_of(writer, known(reporting(7, devices=(sample,))))
        assert 'component="other"} 2\n' in shown
        assert f'phase="other"}} {peak}\n' in shown


def test_non_torch_is_absent_if_the_driver_or_the_report_lacks_the_value() -> None:
    unknown = known(
        reporting(70, devices=(SAMPLE,)),
        reporting(80, devices=(replace(SAMPLE, reserved_bytes=None),)),
        reporting(90, devices=(SAMPLE,)),
        reporting(10, devices=(SAMPLE,), host_pid=None),
        on=node(device(processes={70: None, 80: 60, 10: 999})),
    )
    assert lines(unknown, "gpumem_torch_non_torch_bytes{") == []


@pytest.mark.parametrize("reading", [None, node(device(processes={70: 50}), up=False)])
def test_without_the_driver_only_torch_series_stay_without_an_index(reading: NodeReading | None) -> None:
    snapshot = known(reporting(70, devices=(SAMPLE,), command="python own.py"), on=reading)
    assert lines(snapshot, "gpumem_torch_ooms_total{") == [
        f'gpumem_torch_ooms_total{{gpu="",uuid="{UUIDS[0]}",pid="70",workload="train",rank=""}} 2'
    ]
    assert lines(snapshot, "gpumem_nvml_up") == ["gpumem_nvml_up 0"]
    (info,) = lines(snapshot, "gpumem_process_info{")
    assert 'pid="70",workload="train",rank="",command="python own.py"' in info, "the values of the report are known"
    absent = ("gpumem_device_", "gpumem_ledger_", "gpumem_process_memory_", "gpumem_torch_non_torch_")
    assert lines(snapshot, *absent) == []


class Label(str):
    """A label value whose lifetime can be watched."""


def test_a_process_that_is_no_longer_on_the_page_is_forgotten() -> None:
    writer, label = exposition(), Label("w")
    text_of(writer, known(reporting(7, devices=(SAMPLE,), workload=label)))
    forgotten = weakref.ref(label)
    del label
    text_of(writer, EMPTY)
    assert forgotten() is None


def test_bytes_that_are_not_utf8_are_replaced() -> None:
    workload = b"w\xff".decode("utf-8", "surrogateescape")
    (line,) = lines(known(reporting(7, devices=(SAMPLE,), workload=workload)), "gpumem_torch_ooms_total{")
    assert 'workload="w?"' in line


class _Broken:
    """Facts of a process whose attributes raise."""

    start_time_ticks = 1000

    def __getattr__(self, name: str) -> str:
        raise RuntimeError("broken")


def test_a_failing_subject_is_left_out_and_logged_and_the_others_stay(caplog: pytest.LogCaptureFixture) -> None:
    writer = exposition()
    valid = known(reporting(70, devices=(SAMPLE,)), on=node(device(processes={70: 50})))
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
