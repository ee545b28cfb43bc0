"""The details of the live page: the timeline, its zoom and its values, and what ran out of memory and why."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.sync_api import Response

from gpumem_client.wire.protocol import PROFILES_PATH, OutOfMemory
from gpumem_exporter.core.readings import ProcessMemory
from gpumem_exporter.core.samples import Snapshot
from gpumem_exporter.demo import DemoNode
from gpumem_exporter.features.history.history import History
from gpumem_exporter.features.history.history_file import HistoryFile
from tests.support.builders.builders import MIB, UUIDS, Clock, device, node, report, sample
from tests.support.builders.profile_documents import body, profile
from tests.support.processes.live_page import LivePage, OpenPage, browser, open_page
from tests.support.servers.running_exporter import RunningExporter, ScriptedProvider, running_exporter
from tests.support.servers.still_demo import StillDemo, still_demo
from tests.support.waiting import eventually

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


# What ran out of memory


EVENTS = "/api/v1/events"
OWN, OTHER = 502, 501
NUMBERS = itertools.count(1)


def fail(exporter: RunningExporter) -> Any:
    """Report an error of the job `train`, beside the idle cache of the job `notebook`; return its event's document."""
    number = next(NUMBERS)
    then = sample(UUIDS[0], 70 * MIB, fragmented=10 * MIB)
    values = {"requested_bytes": 200 * MIB, "device_free_bytes": 100 * MIB, "limit_bytes": 1000 * MIB}
    error = OutOfMemory(UUIDS[0], number, phase="forward", step=7, sample=then, **values)
    answer = exporter.report(
        report(OWN, devices=(then,), workload="train", session="train", sequence=number + 1, ooms=(error,))
    )
    assert answer.status == 200, answer
    events = exporter.document(f"{EVENTS}?type=oom&limit=1000")["events"]
    (event,) = [each for each in events if each["detail"]["number"] == number]
    return exporter.document(f"{EVENTS}/{event['id']}")


@pytest.fixture(scope="module")
def exporter() -> Iterator[RunningExporter]:
    """An exporter with two jobs on one device."""
    provider = ScriptedProvider()
    provider.processes[UUIDS[0]] = (ProcessMemory(OWN, 90 * MIB), ProcessMemory(OTHER, 300 * MIB))
    idle = dataclasses.replace(sample(UUIDS[0], 10 * MIB, 250 * MIB), idle_cache_bytes=250 * MIB)
    with running_exporter(provider=provider, report_expiry=3600.0) as running:
        with_idle = report(OTHER, devices=(idle,), workload="notebook", session="nb", actions=("empty_cache",))
        assert running.report(with_idle).status == 200
        assert running.report(report(OWN, workload="train", session="train")).status == 200
        eventually(
            lambda: running.runtime.view.device_at_error(UUIDS[0], str(OWN)),
            lambda device: device is not None and [job["used_bytes"] for job in device["jobs"]] == [300 * MIB],
        )
        fail(running)
        yield running


@pytest.mark.parametrize(("width", "scheme"), [(1440, "light"), (390, "dark")])
def test_a_finding_and_an_event_lead_to_the_address_of_the_explanation(
    exporter: RunningExporter, open_page: OpenPage, width: int, scheme: str
) -> None:
    fail(exporter)
    live = open_page(exporter, viewport={"width": width, "height": 844}, color_scheme=scheme)
    live.page.locator("#findings .why:visible").first.click()
    live.until("document.querySelector('.oom .verdict')?.textContent.includes('notebook')")
    live.until("document.querySelector('.plot canvas')")
    # The memory at that moment, with a link to the other job, and its clear.
    assert "300 MiB" in live.text(".oom .parts div:has(a[href*='notebook'])")
    assert live.page.locator(".oom .act:visible").count() == 1
    assert live.page.locator(".oom .events li").count() >= 2
    assert live.violations_of_access() == []
    assert live.page.evaluate("document.documentElement.scrollWidth") <= width
    # The address shows it again.
    live.page.reload()
    live.until("document.querySelector('.oom .verdict')?.textContent.includes('notebook')")
    live.page.locator(".oom").get_by_role("button", name="Close").click()
    live.until("document.querySelector('.oom').hidden")
    # An event leads to its own error.
    live.page.locator("#detail > section:last-child a[href*='event=']").last.click()
    live.until("document.querySelector('.oom .verdict')")
    assert re.search(r"event=\d+", live.page.url)
    live.page.go_back()
    live.until("document.querySelector('.oom').hidden")


def test_an_error_leads_to_the_memory_profile_of_its_moment(exporter: RunningExporter, open_page: OpenPage) -> None:
    found = fail(exporter)["event"]
    assert found["detail"]["profile"] is None
    number = found["detail"]["number"]
    sender = report(OWN, workload="train", session="train").process
    sent = body(sender, profile(f"{number:016x}", "out_of_memory", oom_number=number))
    answer = exporter.request("POST", PROFILES_PATH, body=sent, Content_Encoding="gzip")  # type: ignore[arg-type]
    assert answer.status == 201, answer.body
    live = open_page(exporter)
    live.page.goto(f"{exporter.url}/?gpu=0&event={found['id']}")
    with live.page.expect_popup() as opened:
        live.page.get_by_role("link", name="Memory profile of this moment").click()
    opened.value.wait_for_load_state()
    assert f"/api/v1/profiles/{json.loads(answer.body)['id']}?format=html" in opened.value.url
    assert "train.py:41" in opened.value.locator("body").inner_text()
    # The page of a profile has no rights at the exporter: its texts come from a job.
    assert opened.value.evaluate("self.origin") == "null"


def test_an_event_that_was_deleted_leaves_the_page_usable(exporter: RunningExporter, open_page: OpenPage) -> None:
    live = open_page(exporter, expects=("404",))
    live.page.goto(f"{exporter.url}/?gpu=0&event=1")
    live.until("document.querySelector('.oom')?.textContent.includes('does not have this event')")
    live.until("document.querySelector('.jobs-of-device li')")
    # A finding of a job that has ended leads to the last error of the device.
    live.page.goto(f"{exporter.url}/?gpu=0&event=oom@{UUIDS[0]}")
    live.until("document.querySelector('.oom .verdict')")
