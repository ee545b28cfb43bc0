"""The series on the metrics page, and those that are left out because their value is unknown."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpumem_client.wire.protocol import DeviceSample
from gpumem_exporter.core.samples import NodeReading
from tests.support.exposition_builders import (
    SAMPLE,
    UUID,
    device,
    exposition,
    lines,
    node,
    page,
    process,
    snapshot,
    text_of,
)


@pytest.mark.parametrize("reserved", [0, None])
def test_ratios_are_absent_while_nothing_is_reserved(reserved: int | None) -> None:
    sample = DeviceSample(UUID, allocated_bytes=0, reserved_bytes=reserved, reclaimable_bytes=0)
    assert lines(snapshot(process(7, sample)), "gpumem_torch_slack_ratio", "gpumem_torch_fragmentation_ratio") == []


def test_a_phase_and_a_component_may_have_the_same_name() -> None:
    sample = DeviceSample(UUID, phase_peak_bytes={"other": 1}, component_bytes={"other": 2})
    writer = exposition()
    for reporter in (process(7, sample), process(7, replace(sample, phase_peak_bytes={"other": 3}))):
        shown = text_of(writer, snapshot(reporter))
        assert 'rank="0",component="other"} 2\n' in shown
        assert f'rank="0",phase="other"}} {reporter.report.devices[0].phase_peak_bytes["other"]}\n' in shown


def test_non_torch_is_absent_if_the_driver_or_the_report_lacks_the_value() -> None:
    unknown = snapshot(
        process(7, SAMPLE, host_pid=70),
        process(8, replace(SAMPLE, reserved_bytes=None), host_pid=80),
        process(9, SAMPLE, host_pid=90),
        process(10, SAMPLE, host_pid=None),
        on=node(device(processes={70: None, 80: 60, 10: 999})),
    )
    assert lines(unknown, "gpumem_torch_non_torch_bytes") == []


@pytest.mark.parametrize("reading", [None, node(device(processes={70: 50}), up=False)])
def test_without_the_driver_only_torch_series_stay_without_an_index(reading: NodeReading | None) -> None:
    known = snapshot(process(7, SAMPLE), on=reading)
    assert lines(known, "gpumem_torch_ooms_total") == [
        'gpumem_torch_ooms_total{gpu="",uuid="GPU-0",pid="70",workload="w",rank="0"} 2'
    ]
    assert "gpumem_nvml_up 0" in page(known)
    (info,) = lines(known, "gpumem_process_info")
    assert 'pid="70",workload="w",rank="0",command="python own.py"' in info, "the values of the report are still known"
    absent = ("gpumem_device_", "gpumem_ledger_", "gpumem_process_memory_", "gpumem_torch_non_torch_")
    assert [line for line in page(known) if line.startswith(absent)] == []
