"""The project's alerts over the demo: each workload raises exactly the alerts of its problem, healthy ones raise none.

The rules run unchanged, with their `for`, over simulated hours. The table below changes with a workload or a rule.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from gpumem_exporter.demo.workloads import DEMO_WORKLOADS
from tests.support.alert_history import Alerts, alerts_over, demo_history, metrics_in_rules

pytestmark = pytest.mark.tools

WORKLOADS: Mapping[str, set[str]] = {
    # Full devices and steady work, without a problem.
    "demo-llm-pretrain": set(),
    "demo-diffusion-graphs": set(),
    "demo-pipeline-finetune": set(),
    # Bursts and short processes on a device with free memory.
    "demo-chat-server": set(),
    "demo-nightly-eval": set(),
    "demo-sleeping-engine": set(),
    "demo-llm-server": set(),
    # No reporter.
    "": set(),
    "demo-rag-indexer-leak": {"GpuMemLeak", "GpuMemOomSoon", "GpuMemOomEndedProcess"},
    "demo-asr-varlen": {"GpuMemFragmentationHigh", "GpuMemAllocatorRetrying"},
    "demo-notebook": {"GpuMemReclaimableHoarded"},
    "demo-moe-finetune": {"GpuMemAllocatorRetrying", "GpuMemRankImbalance"},
}
DEVICES: Mapping[str, set[str]] = {"5": {"GpuMemDeviceUnderused"}}
"""Alerts about devices; the other devices raise none."""


@pytest.fixture(scope="module")
def alerts(tmp_path_factory: pytest.TempPathFactory) -> Alerts:
    """Return the alerts of the whole node while the leak starts, ends and starts again."""
    history = demo_history(seconds=6300, interval_seconds=15, names=metrics_in_rules())
    return alerts_over(history, tmp_path_factory.mktemp("node"))


def by_subject(alerts: Alerts) -> dict[str, set[str]]:
    """Return the names of alerts by workload, else by device, else for `node`."""
    subjects: dict[str, set[str]] = {}
    for alert in alerts.raised:
        if "workload" in alert or "pid" in alert:
            subject = alert.get("workload", "")
        else:
            subject = f"GPU {alert['gpu']}" if "gpu" in alert else "node"
        subjects.setdefault(subject, set()).add(alert["alertname"])
    return subjects


def test_the_table_names_every_workload() -> None:
    assert set(WORKLOADS) == {workload.name for workload in DEMO_WORKLOADS}


def test_each_workload_raises_the_alerts_that_it_should_and_no_others(alerts: Alerts) -> None:
    assert by_subject(alerts) == {workload: names for workload, names in WORKLOADS.items() if names}


def test_a_device_with_small_workloads_is_underused(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The alert looks back four hours, so only the small workloads of the affected device run."""
    small = ("demo-chat-server", "demo-nightly-eval", "demo-sleeping-engine")
    workloads = [workload for workload in DEMO_WORKLOADS if workload.name in small]
    history = demo_history(seconds=16_500, interval_seconds=60, names=metrics_in_rules(), workloads=workloads)
    found = alerts_over(history, tmp_path_factory.mktemp("devices"))
    assert by_subject(found) == {f"GPU {gpu}": names for gpu, names in DEVICES.items()}


def test_the_process_with_retries_is_the_fullest_rank_on_the_device_of_the_idle_cache(alerts: Alerts) -> None:
    (hoard,) = [alert for alert in alerts.raised if alert["alertname"] == "GpuMemReclaimableHoarded"]
    (retrying,) = [
        alert
        for alert in alerts.raised
        if (alert["alertname"], alert["workload"]) == ("GpuMemAllocatorRetrying", "demo-moe-finetune")
    ]
    assert retrying["uuid"] == hoard["uuid"]
    assert retrying["rank"] == "1"


def test_alerts_of_an_ended_process_stop_and_other_alerts_continue(alerts: Alerts) -> None:
    firing = {(alert.get("workload"), alert["alertname"]) for alert in alerts.firing}
    assert "demo-rag-indexer-leak" not in {workload for workload, _ in firing}
    assert {
        ("demo-asr-varlen", "GpuMemFragmentationHigh"),
        ("demo-notebook", "GpuMemReclaimableHoarded"),
        ("demo-moe-finetune", "GpuMemRankImbalance"),
    } <= firing
