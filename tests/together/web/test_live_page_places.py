"""The live page of exporters that run: hostile names, no driver, many processes, a lost connection, profiles."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from tests.support.builders.builders import MIB
from tests.support.builders.made_up_profiles import training
from tests.support.builders.profile_documents import takes
from tests.support.processes.live_page import OpenPage, browser, open_page, send, serving
from tests.support.servers.running_exporter import running_exporter
from tests.support.waiting import patient, wait_for

__all__ = ["browser", "open_page"]

PROCESSES = 128
LOST = ("ERR_", "Failed to load resource")
REFRESHES = """
window.refreshes = 0;
new PerformanceObserver((list) => { refreshes += list.getEntriesByName('refresh').length; }).observe({type: 'measure'});
"""
WATCH = """(() => {
    window.refreshes = window.moved = window.written = 0;
    new MutationObserver((changes) => {
        for (const {target, removedNodes} of changes) {
            if (target.matches('table, tbody')) moved += removedNodes.length;
            else written += 1;
        }
    }).observe(document.querySelector('#jobs'), {childList: true, subtree: true});
})()"""
PLACE = """({
    scroll: scrollY,
    focus: document.activeElement.href,
    selected: String(getSelection()),
    open: document.querySelectorAll('#jobs .rank').length,
    top: document.activeElement.getBoundingClientRect().top,
})"""


def test_a_node_without_a_driver_has_a_next_step_and_its_jobs(tmp_path: Path, open_page: OpenPage) -> None:
    with serving(
        tmp_path, "--report.expiry", "3600", environment={"PATH": "/usr/bin:/bin"}, ready="/-/healthy"
    ) as exporter:
        send(exporter, 502, MIB, workload="train")
        live = open_page(exporter)
        reason = exporter.get("/api/v1/live")["node"]["driver"]["error"]
        assert reason
        assert reason in live.text("#no-devices")
        assert "nvidia-smi" in live.text("#no-devices")
        assert "train" in live.text("#jobs")
        assert live.page.locator("#findings-list [data-severity=critical]").count() == 1
        assert live.violations_of_access() == []


def test_many_processes_are_shown_and_a_refresh_leaves_the_viewer_where_they_are(
    tmp_path: Path, open_page: OpenPage
) -> None:
    with serving(tmp_path, "--demo", "--demo.processes", str(PROCESSES)) as exporter:
        wait_for(lambda: len(exporter.processes()) >= 0.9 * PROCESSES, "the demo's processes")
        live = open_page(exporter, viewport={"width": 1440, "height": 500}, script=REFRESHES)
        live.until("document.querySelectorAll('#jobs .job').length > 50")
        jobs = exporter.get("/api/v1/live")["jobs"]
        assert sum(job["process_count"] for job in jobs) == pytest.approx(PROCESSES, abs=20)  # some are restarting
        assert live.page.locator("#jobs .job").count() == pytest.approx(len(jobs), abs=20)
        folded = next(job for job in reversed(jobs) if job["process_count"] > 1)
        row = live.page.locator("#jobs tbody", has=live.page.locator(f"a[href='?job={folded['id']}']"))
        row.locator(".fold").click()
        assert row.locator(".rank").count() == folded["process_count"]

        row.locator("a.name").evaluate("(it) => it.focus({focusVisible: true})")
        row.locator(".owner").evaluate("(it) => getSelection().selectAllChildren(it)")
        assert live.page.evaluate("scrollY") > 200
        live.page.evaluate(WATCH)
        before = live.page.evaluate(PLACE)
        live.until("refreshes >= 4")
        assert live.page.evaluate(PLACE) == before
        assert before["selected"]
        assert before["open"] == folded["process_count"]
        assert live.page.evaluate("moved") == 0
        assert live.page.evaluate("written") > 0


def test_names_are_inserted_as_text(tmp_path: Path, open_page: OpenPage) -> None:
    with serving(tmp_path, "--report.expiry", "3600") as exporter:
        send(exporter, 502, MIB, workload="<img src=x onerror=alert(1)>\u202e")
        live = open_page(exporter)
        live.until("document.querySelector('#jobs').textContent.includes('onerror')")
        assert live.page.evaluate("document.querySelectorAll('body img').length") == 0
        assert live.page.evaluate("document.body.textContent.includes('\\u202e')") is False


def test_a_lost_exporter_leaves_its_last_values_with_their_time(tmp_path: Path, open_page: OpenPage) -> None:
    with serving(tmp_path, "--demo") as own:
        live = open_page(own, expects=LOST)
        live.until("document.querySelectorAll('#jobs .job').length >= 10")
        own.stop(signal.SIGKILL)
        live.until("document.body.dataset.mode === 'lost'")
        assert re.search(r"as of \d\d:\d\d:\d\d", live.text("#mode"))
        assert "GiB" in live.text("#jobs")
        assert live.page.evaluate("document.querySelector('#main').hasAttribute('data-stale')")
        assert live.page.locator("#jobs .act:enabled").count() == 0
        assert live.violations_of_access() == []
        own.start()
        live.until("document.body.dataset.mode === 'live'")


def test_a_profile_is_taken_on_the_page_and_compared_with_the_one_before(open_page: OpenPage) -> None:
    with running_exporter() as exporter:
        thread = takes(exporter, training(leaked=300), training(leaked=900))
        live = open_page(exporter, path="?workload=train")
        for choice, words in (("Now", "Take"), ("Record for 30 s", "Take")):
            live.page.get_by_role("button", name="Take a profile").click()
            live.page.get_by_label(choice).check()
            live.page.get_by_role("button", name=f"{words} the profile").click()
            link = live.page.get_by_role("link", name="Open the profile")
            link.wait_for()
            live.page.locator("#dialog-cancel").click()
        thread.join(patient(30))
        assert [kept["recorded_seconds"] for kept in exporter.document("/api/v1/profiles")["profiles"]] == [30, 30]
        assert exporter.document("/api/v1/actions")["actions"][0]["state"] == "done"
        live.until("document.querySelectorAll('.profiles li').length === 2")
        with live.page.context.expect_page() as opened:
            live.page.get_by_role("link", name="what changed").click()
        difference = opened.value
        difference.locator("td", has_text="+600 MiB").first.wait_for()
        # The page cannot use the rights of a viewer of the live page: it has an origin of its own.
        assert difference.evaluate("self.origin") == "null"
        assert difference.locator("g.frame").count() > 0


def test_a_profile_that_was_refused_says_why(open_page: OpenPage) -> None:
    with running_exporter() as exporter:
        takes(exporter)
        live = open_page(exporter, path="?workload=train")
        live.page.get_by_role("button", name="Take a profile").click()
        live.page.get_by_role("button", name="Take the profile").click()
        live.page.get_by_role("button", name="Cancel the profile").click()
        live.page.locator("#dialog-error").wait_for()
        assert live.page.locator(".profiles a").count() == 0
