"""What ran out of memory and why: the exporter's document of an error, and the page that shows it."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from gpumem_client.wire.protocol import PROFILES_PATH, OutOfMemory
from gpumem_exporter.core.samples import ProcessMemory
from tests.support.builders.builders import MIB, UUIDS, report, sample
from tests.support.builders.profile_documents import body, profile
from tests.support.processes.live_page import OpenPage, browser, open_page
from tests.support.servers.running_exporter import RunningExporter, ScriptedProvider, running_exporter
from tests.support.waiting import eventually

__all__ = ["browser", "open_page"]

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
