"""What the project's alerts say of the demo's workloads: of each exactly what is wrong with it, of the healthy nothing.

The rules run over the demo's simulated hours as they are, `for` and all. When a workload or a rule is meant to change,
this table is what changes with it.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from gpumem_exporter.demo.workloads import DEMO_WORKLOADS
from tests.support.alert_history import Alerts, alerts_over, metrics_in_rules
from tests.support.demo_history import demo_history

pytestmark = pytest.mark.tools

WORKLOADS: Mapping[str, set[str]] = {
    # Full devices, steady work: nothing is wrong.
    "demo-llm-pretrain": set(),
    "demo-diffusion-graphs": set(),
    "demo-pipeline-finetune": set(),
    # Bursts, flushes that the program wants, processes that come and go, small things on a device that has room.
    "demo-chat-server": set(),
    "demo-gnn-train": set(),
    "demo-nightly-eval": set(),
    "demo-sweep": set(),
    # No reporter, and models that come and go.
    "": set(),
    "demo-rag-indexer-leak": {"GpuMemLeak", "GpuMemOomSoon", "GpuMemOomHappened"},
    "demo-asr-varlen": {"GpuMemFragmentationHigh", "GpuMemAllocatorRetrying", "GpuMemOomHappened"},
    "demo-notebook": {"GpuMemReclaimableHoarded"},
    "demo-moe-finetune": {"GpuMemAllocatorRetrying", "GpuMemRankImbalance"},
}
DEVICES: Mapping[str, set[str]] = {"5": {"GpuMemDeviceUnderused"}}
"""Alerts on devices as such; on the others there are none."""


@pytest.fixture(scope="module")
def alerts(tmp_path_factory: pytest.TempPathFactory) -> Alerts:
    """Of the whole node, in the time in which the leak begins, ends and begins again."""
    history = demo_history(seconds=6300, interval_seconds=15, names=metrics_in_rules())
    return alerts_over(history, tmp_path_factory.mktemp("node"))


def by_subject(alerts: Alerts) -> dict[str, set[str]]:
    """The alerts' names by workload; those that are about no process, by device; those about neither, by `node`."""
    subjects: dict[str, set[str]] = {}
    for alert in alerts.raised:
        if "workload" in alert or "pid" in alert:
            subject = alert.get("workload", "")
        else:
            subject = f"GPU {alert['gpu']}" if "gpu" in alert else "node"
        subjects.setdefault(subject, set()).add(alert["alertname"])
    return subjects


def test_the_table_names_the_twelve_workloads() -> None:
    assert len(DEMO_WORKLOADS) == 12
    assert set(WORKLOADS) == {workload.name for workload in DEMO_WORKLOADS}


def test_each_workload_raises_the_alerts_that_it_should_and_no_others(alerts: Alerts) -> None:
    assert by_subject(alerts) == {workload: names for workload, names in WORKLOADS.items() if names}


def test_a_device_that_many_small_workloads_hold_is_underused_and_they_are_well(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Four hours are what the alert looks back, so only the processes of the devices that it is about live so long."""
    workloads = [
        workload
        for workload in DEMO_WORKLOADS
        if all(str(device) in DEVICES for devices in workload.placements for device in devices)
    ]
    assert {workload.name for workload in workloads} == {
        "demo-chat-server",
        "demo-gnn-train",
        "demo-nightly-eval",
        "demo-sweep",
    }
    history = demo_history(seconds=16_500, interval_seconds=60, names=metrics_in_rules(), workloads=workloads)
    found = alerts_over(history, tmp_path_factory.mktemp("devices"))
    assert by_subject(found) == {f"GPU {gpu}": names for gpu, names in DEVICES.items()}


def test_the_process_that_is_short_is_on_the_hoarders_device_and_the_fullest_rank(alerts: Alerts) -> None:
    (hoard,) = [alert for alert in alerts.raised if alert["alertname"] == "GpuMemReclaimableHoarded"]
    (retrying,) = [
        alert
        for alert in alerts.raised
        if (alert["alertname"], alert["workload"]) == ("GpuMemAllocatorRetrying", "demo-moe-finetune")
    ]
    assert retrying["uuid"] == hoard["uuid"]
    assert retrying["rank"] == "1"


def test_what_ended_fires_no_more_and_what_goes_on_does(alerts: Alerts) -> None:
    firing = {(alert.get("workload"), alert["alertname"]) for alert in alerts.firing}
    assert "demo-rag-indexer-leak" not in {workload for workload, _ in firing}
    assert {
        ("demo-asr-varlen", "GpuMemFragmentationHigh"),
        ("demo-notebook", "GpuMemReclaimableHoarded"),
        ("demo-moe-finetune", "GpuMemRankImbalance"),
    } <= firing
