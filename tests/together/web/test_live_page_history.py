"""The timeline of the live page: a whole day, zoom, and values under the pointer."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.sync_api import Response

from gpumem_exporter.core.samples import Snapshot
from gpumem_exporter.demo import DemoNode
from gpumem_exporter.features.history.history import History
from gpumem_exporter.features.history.history_file import HistoryFile
from tests.support.builders.builders import Clock, device, node
from tests.support.processes.live_page import LivePage, OpenPage, browser, open_page
from tests.support.servers.still_demo import StillDemo, still_demo

__all__ = ["browser", "open_page"]

DAY = 86400
STEP_SECONDS = 10
GIB = 1 << 30
PEAK_AT = DAY // 2
"""When the device was used most, for ten seconds: seconds after the start of the day."""


def store_day(folder: Path, uuid: str, end_unix_seconds: float) -> None:
    """Store a day of a device as an exporter does: 20 GiB in use, and once 70 GiB and then 10 GiB in one minute."""
    clock = Clock()
    history = History(retention_seconds=DAY, clock=clock, wall_clock=lambda: end_unix_seconds - DAY + clock.now)
    for second in range(0, DAY, STEP_SECONDS):
        clock.now = second + 0.5
        used = {PEAK_AT: 70, PEAK_AT + STEP_SECONDS: 10}.get(second, 20)
        reading = node(device(uuid, total=80 * GIB, used=used * GIB), taken=clock.now)
        history.add(Snapshot(clock.now, reading, ()))
    HistoryFile(history, folder).save()


@pytest.fixture(scope="module")
def day(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StillDemo]:
    """A demo that has run for a day, as its storage shows."""
    folder = tmp_path_factory.mktemp("storage")
    until_unix_seconds = (time.time() - 200) // 60 * 60
    store_day(folder, DemoNode().devices[0].identity.uuid, until_unix_seconds)
    with still_demo(storage_path=str(folder)) as demo:
        yield demo


@contextlib.contextmanager
def next_history(live: LivePage, seconds: float) -> Iterator[dict[str, Any]]:
    """Yield a document that the page's next history of this length fills at the end of the block."""

    def matches(reply: Response) -> bool:
        query = parse_qs(urlsplit(reply.url).query)
        if not urlsplit(reply.url).path.endswith("/history"):
            return False
        return float(query["to"][0]) - float(query["from"][0]) == pytest.approx(seconds, rel=0.02)

    document: dict[str, Any] = {}
    with live.page.expect_response(matches) as reply:
        yield document
    document.update(reply.value.json())


def shown_range(live: LivePage) -> tuple[float, float] | None:
    """Return the range in the URL."""
    query = parse_qs(urlsplit(live.page.url).query)
    return (float(query["from"][0]), float(query["to"][0])) if "from" in query else None


def test_a_day_is_shown_and_zoomed(day: StillDemo, open_page: OpenPage) -> None:
    live = open_page(day, viewport={"width": 1440, "height": 900})
    live.page.locator("#devices a").first.click()
    live.until("document.querySelector('.plot canvas')")
    with next_history(live, DAY) as whole:
        live.page.locator("[data-range='24h']").click()
    assert whole["to_unix_seconds"] - whole["from_unix_seconds"] == pytest.approx(DAY, abs=10)
    used = whole["series"][0]["used"]
    assert sum(value is not None for value in used["max"]) > 0.98 * len(used["max"])
    assert 70 * GIB in used["max"]

    plot = live.page.locator(".u-over").bounding_box()
    assert plot is not None
    mouse, middle = live.page.mouse, plot["y"] + plot["height"] / 2

    def move(share: float) -> None:
        mouse.move(plot["x"] + share * plot["width"], middle, steps=4)

    with next_history(live, 0.1 * DAY) as part:
        move(0.45)
        mouse.down()
        move(0.55)
        mouse.up()
    zoomed = shown_range(live)
    assert zoomed is not None
    assert zoomed[1] - zoomed[0] == pytest.approx(0.1 * DAY, rel=0.02)
    assert (part["from_unix_seconds"], part["to_unix_seconds"]) == zoomed
    assert part["step_seconds"] < whole["step_seconds"]

    used = part["series"][0]["used"]
    peak = part["unix_seconds"][used["max"].index(70 * GIB)]
    move((peak - zoomed[0]) / (zoomed[1] - zoomed[0]))
    live.until("/10.0.GiB.*70.0.GiB/.test(document.querySelector('[data-series=used]').textContent)")
    move((peak - zoomed[0] + 600) / (zoomed[1] - zoomed[0]))
    live.until("/ 20.0.GiB$/.test(document.querySelector('[data-series=used]').textContent)")

    with next_history(live, DAY) as again:
        mouse.dblclick(plot["x"] + 9, middle)
    assert shown_range(live) is None
    assert again["step_seconds"] == whole["step_seconds"]
    assert live.page.locator("[data-range='24h']").get_attribute("aria-pressed") == "true"
    live.page.go_back()
    assert shown_range(live) == zoomed
