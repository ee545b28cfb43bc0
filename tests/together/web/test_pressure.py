"""One definition of pressure: the document of the page, the dashboards and the alert agree about the demo."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpumem_exporter.demo.workloads import DEMO_WORKLOADS
from tests.support.alert_history import History, demo_history, evaluated
from tests.support.dashboard_queries import expression, letter_of

pytestmark = pytest.mark.tools

SECONDS, INTERVAL_SECONDS = 5460, 15
MOMENTS = (600, *range(5100, SECONDS + 1, INTERVAL_SECONDS))
"""At first no device is nearly full; at the end the leak fills one."""
LEVELS = ("ok", "warning", "critical")
"""Above 90 % a device is nearly full, above 95 % it is full."""


@pytest.fixture(scope="module")
def history() -> History:
    """Return the processes of the device that the leak fills."""
    workloads = [workload for workload in DEMO_WORKLOADS if any(4 in devices for devices in workload.placements)]
    return demo_history(
        seconds=SECONDS,
        interval_seconds=INTERVAL_SECONDS,
        names={"gpumem_ledger_bytes"},
        workloads=workloads,
        live_at=MOMENTS,
    )


def level(pressure: float) -> str:
    return LEVELS[(pressure > 0.9) + (pressure > 0.95)]


def test_document_dashboards_and_alert_agree_which_devices_are_full(history: History, tmp_path: Path) -> None:
    columns = [
        expression(name, title, letter_of(name, title, "Pressure"), node="demo:9844")
        for name, title in (("fleet", "Devices by pressure"), ("node", "Devices"))
    ]
    alert = 'ALERTS{alertname="GpuMemDeviceFull"}'
    found = evaluated(history, tmp_path, [(query, second) for second in MOMENTS for query in (*columns, alert)])
    seen = set()
    for second, fleet, node, alerts in zip(MOMENTS, found[::3], found[1::3], found[2::3], strict=True):
        of_dashboards = {labels["gpu"]: level(pressure) for labels, pressure in fleet}
        assert of_dashboards == {labels["gpu"]: level(pressure) for labels, pressure in node}
        full = {gpu for gpu, one in of_dashboards.items() if one == "critical"}
        assert {labels["gpu"] for labels, _ in alerts} == full
        devices = history.live[second]["devices"]
        assert {device["gpu"]: level(device["pressure_ratio"]) for device in devices} == of_dashboards
        seen.add(of_dashboards["4"])
    assert seen == set(LEVELS)
