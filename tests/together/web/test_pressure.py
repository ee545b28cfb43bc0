"""One definition of pressure: the live page, the dashboards and the alert agree about the demo's devices."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpumem_exporter.demo.workloads import DEMO_WORKLOADS
from tests.support.alert_history import History, demo_history, evaluated
from tests.support.dashboard_queries import expression, letter_of
from tests.support.exporter_process import ExporterProcess
from tests.support.live_page import OpenPage, browser, open_page, serving, state_of

__all__ = ["browser", "open_page"]

pytestmark = pytest.mark.tools

SECONDS, INTERVAL_SECONDS = 5460, 15
MOMENTS = (600, *range(5100, SECONDS + 1, INTERVAL_SECONDS))
"""At first no device is nearly full; at the end the leak fills one."""
LEVELS = ("ok", "warning", "critical")
"""The levels of the page: above 90 % a device is nearly full, above 95 % it is full."""


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


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ExporterProcess]:
    """Serve until the pages that a test opens after it are closed."""
    with serving(tmp_path) as exporter_and_url:
        yield exporter_and_url


def level(pressure: float) -> str:
    return LEVELS[(pressure > 0.9) + (pressure > 0.95)]


def test_page_dashboards_and_alert_agree_which_devices_are_full(
    history: History, served: ExporterProcess, open_page: OpenPage, tmp_path: Path
) -> None:
    columns = [
        expression(name, title, letter_of(name, title, "Pressure"), node="demo:9844")
        for name, title in (("fleet", "Devices by pressure"), ("node", "Devices"))
    ]
    alert = 'ALERTS{alertname="GpuMemDeviceFull"}'
    found = evaluated(history, tmp_path, [(query, second) for second in MOMENTS for query in (*columns, alert)])
    shown: dict[str, dict[str, str]] = {}
    page = state_of(served)["state"]["page"]
    for second, fleet, node, alerts in zip(MOMENTS, found[::3], found[1::3], found[2::3], strict=True):
        of_dashboards = {labels["gpu"]: level(pressure) for labels, pressure in fleet}
        assert of_dashboards == {labels["gpu"]: level(pressure) for labels, pressure in node}
        full = {gpu for gpu, one in of_dashboards.items() if one == "critical"}
        assert {labels["gpu"] for labels, _ in alerts} == full
        if of_dashboards["4"] in shown:
            continue
        document = history.live[second]
        document["state"]["page"] = page
        live = open_page(served, answer=lambda document=document: document)
        cards = live.page.locator(".device").evaluate_all(
            "(all) => all.map((card) => [card.querySelector('h3').textContent.split(' ')[1], card.dataset.level])"
        )
        shown[of_dashboards["4"]] = dict(cards)
        assert dict(cards) == of_dashboards
    assert shown.keys() == set(LEVELS)
