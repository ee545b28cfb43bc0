"""The project's alerts over the demo: each workload raises exactly the alerts of its problem, healthy ones raise none.

The rules run unchanged, with their `for`, over simulated hours. The table below changes with a workload or a rule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from gpumem_exporter.demo.workloads import DEMO_WORKLOADS
from tests.support.alert_history import Labels, demo_history, evaluated, metrics_in_rules
from tests.support.dashboard_queries import expression, letter_of

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


FULL = 'ALERTS{alertname="GpuMemDeviceFull"}'
FIRING = 'ALERTS{alertstate="firing"}'
SECONDS = 6000
PRESSURE_SECONDS = (600, *range(5100, 5461, 30))
"""At first no device is nearly full; at the end the leak fills one."""
PRESSURES = ("ok", "warning", "critical")
"""Above 90 % a device is nearly full, above 95 % it is full."""


@dataclass(frozen=True)
class Node:
    """The whole node while the leak starts, ends and starts again."""

    raised: Sequence[Labels]
    """The labels of the alerts that fired at any time."""
    firing: Sequence[Labels]
    """The labels of the alerts that fire at the end."""
    pressures: Sequence[Sequence[tuple[Labels, float]]]
    """For each of PRESSURE_SECONDS the pressure of the dashboards fleet and node, and the alert about full devices."""
    live: Mapping[int, Any]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Node:
    # Two ranks show what four equal ranks show.
    workloads = [replace(workload, placements=workload.placements[:2]) for workload in DEMO_WORKLOADS]
    history = demo_history(seconds=SECONDS, names=metrics_in_rules(), workloads=workloads, live_at=PRESSURE_SECONDS)
    pressures = [
        expression(name, title, letter_of(name, title, "Pressure"), node="demo:9844")
        for name, title in (("fleet", "Devices by pressure"), ("node", "Devices"))
    ]
    questions = [
        (raised_within(SECONDS), SECONDS),
        (FIRING, SECONDS),
        *((query, second) for second in PRESSURE_SECONDS for query in (*pressures, FULL)),
    ]
    raised, firing, *of_pressure = evaluated(history, tmp_path_factory.mktemp("node"), questions)
    return Node([labels for labels, _ in raised], [labels for labels, _ in firing], of_pressure, history.live)


def raised_within(seconds: int) -> str:
    """Return the query for the alerts that fired in the last seconds."""
    return f"count_over_time({FIRING}[{seconds + 1}s])"


def by_subject(alerts: Sequence[Labels]) -> dict[str, set[str]]:
    """Return the names of alerts by workload, else by device, else for `node`."""
    subjects: dict[str, set[str]] = {}
    for alert in alerts:
        if "workload" in alert or "pid" in alert:
            subject = alert.get("workload", "")
        else:
            subject = f"GPU {alert['gpu']}" if "gpu" in alert else "node"
        subjects.setdefault(subject, set()).add(alert["alertname"])
    return subjects


def pressure(ratio: float) -> str:
    return PRESSURES[(ratio > 0.9) + (ratio > 0.95)]


def test_the_table_names_every_workload() -> None:
    assert set(WORKLOADS) == {workload.name for workload in DEMO_WORKLOADS}


def test_each_workload_raises_the_alerts_that_it_should_and_no_others(node: Node) -> None:
    assert by_subject(node.raised) == {workload: names for workload, names in WORKLOADS.items() if names}


def test_a_device_with_small_workloads_is_underused(tmp_path: Path) -> None:
    """The alert looks back four hours: this runs a quarter of all durations, and only the small workloads."""
    small = ("demo-chat-server", "demo-nightly-eval", "demo-sleeping-engine")
    workloads = [workload for workload in DEMO_WORKLOADS if workload.name in small]
    history = demo_history(seconds=4140, names=metrics_in_rules(), workloads=workloads)
    (raised,) = evaluated(history, tmp_path, [(raised_within(4140), 4140)], times=4)
    assert by_subject([labels for labels, _ in raised]) == {f"GPU {gpu}": names for gpu, names in DEVICES.items()}


def test_document_dashboards_and_alert_agree_which_devices_are_full(node: Node) -> None:
    seen = set()
    of_fleet, of_node, of_alerts = (node.pressures[n::3] for n in range(3))
    for second, fleet, device, alerts in zip(PRESSURE_SECONDS, of_fleet, of_node, of_alerts, strict=True):
        of_dashboards = {labels["gpu"]: pressure(ratio) for labels, ratio in fleet}
        assert of_dashboards == {labels["gpu"]: pressure(ratio) for labels, ratio in device}
        full = {gpu for gpu, shown in of_dashboards.items() if shown == "critical"}
        assert {labels["gpu"] for labels, _ in alerts} == full
        devices = node.live[second]["devices"]
        assert {device["gpu"]: pressure(device["pressure_ratio"]) for device in devices} == of_dashboards
        seen.add(of_dashboards["4"])
    assert seen == set(PRESSURES)


def test_the_process_with_retries_is_the_fullest_rank_on_the_device_of_the_idle_cache(node: Node) -> None:
    (hoard,) = [alert for alert in node.raised if alert["alertname"] == "GpuMemReclaimableHoarded"]
    (retrying,) = [
        alert
        for alert in node.raised
        if (alert["alertname"], alert["workload"]) == ("GpuMemAllocatorRetrying", "demo-moe-finetune")
    ]
    assert retrying["uuid"] == hoard["uuid"]
    assert retrying["rank"] == "1"


def test_alerts_of_an_ended_process_stop_and_other_alerts_continue(node: Node) -> None:
    firing = {(alert.get("workload"), alert["alertname"]) for alert in node.firing}
    assert "demo-rag-indexer-leak" not in {workload for workload, _ in firing}
    assert {
        ("demo-asr-varlen", "GpuMemFragmentationHigh"),
        ("demo-notebook", "GpuMemReclaimableHoarded"),
        ("demo-moe-finetune", "GpuMemRankImbalance"),
    } <= firing
