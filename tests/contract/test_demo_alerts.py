"""The project's alerts over the demo: each workload raises exactly the alerts of its problem, healthy ones raise none.

The rules run unchanged, with their `for`, over simulated hours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from gpumem_exporter.demo.workloads import DEMO_WORKLOADS
from tests.support.truth.alert_history import Labels, demo_history, evaluated
from tests.support.truth.panel_queries import expression, letter_of

pytestmark = pytest.mark.tools

ALERTS = {
    "demo-rag-indexer-leak": {"GpuMemLeak", "GpuMemOomSoon", "GpuMemOomEndedProcess"},
    "demo-asr-varlen": {"GpuMemFragmentationHigh", "GpuMemAllocatorRetrying"},
    "demo-notebook": {"GpuMemReclaimableHoarded"},
    "demo-moe-finetune": {"GpuMemAllocatorRetrying", "GpuMemRankImbalance"},
    # It shares the device that the leak fills.
    "demo-pipeline-finetune": {"GpuMemNeighborFillsDevice"},
}
"""The alerts of each workload with a problem; all other workloads and the node have none."""

FULL = 'ALERTS{alertname="GpuMemDeviceFull"}'
FIRING = 'ALERTS{alertstate="firing"}'
SECONDS = 4200
LEAK_SECONDS = 2650.0
"""How long the leak has run when the history starts: it fails in the last minutes."""
PRESSURE_SECONDS = (600, *range(3570, 3991, 30))
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
    leak = next(i for i, workload in enumerate(workloads) if workload.name.endswith("-leak"))
    workloads[leak] = replace(workloads[leak], age_seconds=LEAK_SECONDS)
    history = demo_history(SECONDS, workloads, live_at=PRESSURE_SECONDS)
    pressures = [
        expression(name, title, letter_of(name, title, "Pressure"), node="demo:9844")
        for name, title in (("fleet", "Devices by pressure"), ("node", "Devices"))
    ]
    questions = [
        (f"count_over_time({FIRING}[{SECONDS + 1}s])", SECONDS),
        (FIRING, SECONDS),
        *((query, second) for second in PRESSURE_SECONDS for query in (*pressures, FULL)),
    ]
    raised, firing, *of_pressure = evaluated(history, tmp_path_factory.mktemp("node"), questions)
    return Node([labels for labels, _ in raised], [labels for labels, _ in firing], of_pressure, history.live)


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


def test_each_workload_raises_the_alerts_that_it_should_and_no_others(node: Node) -> None:
    assert by_subject(node.raised) == ALERTS


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


def test_alerts_of_an_ended_process_stop_and_other_alerts_continue(node: Node) -> None:
    firing = {(alert.get("workload"), alert["alertname"]) for alert in node.firing}
    assert "demo-rag-indexer-leak" not in {workload for workload, _ in firing}
    assert {
        ("demo-asr-varlen", "GpuMemFragmentationHigh"),
        ("demo-notebook", "GpuMemReclaimableHoarded"),
        ("demo-moe-finetune", "GpuMemRankImbalance"),
    } <= firing
