"""The live page of exporters that run: hostile names, no driver, a lost connection, profiles, and clears."""

from __future__ import annotations

import os
import re
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Request

from gpumem_client.wire.protocol import MODES
from tests.conftest import StartExporter
from tests.support.builders.builders import MIB, UUIDS, report, sample
from tests.support.builders.profile_documents import takes, training
from tests.support.ports import free_port
from tests.support.processes.live_page import LivePage, OpenPage, browser, open_page
from tests.support.servers.exporter_process import ExporterProcess, token_file
from tests.support.servers.running_exporter import running_exporter
from tests.support.waiting import patient, wait_for

__all__ = ["browser", "open_page"]

TOKEN = "a-token-that-is-long-enough-to-be-one"
RANKS = 4
GIB = 1 << 30
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


def test_a_node_without_a_driver_has_a_next_step_and_its_jobs(
    start_exporter: StartExporter, open_page: OpenPage
) -> None:
    exporter = start_exporter(
        None, "--report.expiry", "3600", environment={"PATH": "/usr/bin:/bin"}, ready="/-/healthy"
    )
    exporter.report(report(502, devices=(sample(UUIDS[0], MIB),), workload="train"))
    live = open_page(exporter)
    reason = exporter.get("/api/v1/live")["node"]["driver"]["error"]
    assert reason
    assert reason in live.text("#no-devices")
    assert "nvidia-smi" in live.text("#no-devices")
    assert "train" in live.text("#jobs")
    assert live.page.locator("#findings-list [data-severity=critical]").count() == 1
    assert live.violations_of_access() == []


def test_many_processes_are_shown_and_a_refresh_leaves_the_viewer_where_they_are(
    start_exporter: StartExporter, open_page: OpenPage
) -> None:
    exporter = start_exporter(None, "--demo", "--demo.processes", str(PROCESSES))
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


def test_names_are_inserted_as_text(start_exporter: StartExporter, open_page: OpenPage) -> None:
    exporter = start_exporter(None, "--report.expiry", "3600")
    exporter.report(report(502, devices=(sample(UUIDS[0], MIB),), workload="<img src=x onerror=alert(1)>\u202e"))
    live = open_page(exporter)
    live.until("document.querySelector('#jobs').textContent.includes('onerror')")
    assert live.page.evaluate("document.querySelectorAll('body img').length") == 0
    assert live.page.evaluate("document.body.textContent.includes('\\u202e')") is False


def test_a_lost_exporter_leaves_its_last_values_with_their_time(
    start_exporter: StartExporter, open_page: OpenPage
) -> None:
    own = start_exporter(None, "--demo", "--web.listen-address", f"127.0.0.1:{free_port()}")
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


# Clears: the safe mode, cancelling, tokens and refusals


def focused(live: LivePage, element: str) -> None:
    """Wait until an element has the focus, which the dialog moves with each state."""
    live.until("document.activeElement.id === it", element)


def open_dialog(live: LivePage, job: str) -> None:
    """Press the button of a job's row."""
    live.page.locator(f"#jobs tbody:has-text('{job}') .act:visible").click()


def sent_actions(live: LivePage) -> list[Any]:
    """Return the list to which the bodies of the page's requests for actions are added."""
    bodies: list[Any] = []

    def take(request: Request) -> None:
        if request.method == "POST":
            bodies.append(request.post_data_json)

    live.page.on("request", take)
    return bodies


def outcomes(live: LivePage) -> list[str]:
    """Return the outcome of each process in the dialog."""
    return [row.split("\t")[-1] for row in live.page.locator("#dialog-results tbody tr").all_inner_texts()]


def train(exporter: ExporterProcess) -> None:
    """Report the ranks of a job that counts steps and ends none of them: 20 GiB reclaimable, 2 GiB of them idle."""
    device = replace(sample(UUIDS[0], GIB, 20 * GIB), idle_cache_bytes=2 * GIB)
    for rank in range(RANKS):
        sent = report(
            900 + rank, devices=(device,), workload="llm", rank=str(rank), step=100, step_seconds=1.0, modes=MODES
        )
        exporter.report(sent)


def test_a_training_job_clears_with_all_ranks_after_the_same_step_unless_it_is_cancelled(
    start_exporter: StartExporter, open_page: OpenPage
) -> None:
    exporter = start_exporter(None, "--report.expiry", "3600")
    train(exporter)
    live = open_page(exporter)
    sent = sent_actions(live)
    open_dialog(live, "llm")
    focused(live, "dialog-confirm")
    assert "8.0 GiB" in live.text("#dialog-status")
    assert outcomes(live) == RANKS * ["would clear"]
    before = live.text("#dialog-status")
    live.page.locator("#dialog-confirm").click()
    cancel = live.page.get_by_role("button", name="Cancel the clear")
    cancel.click()
    focused(live, "dialog-cancel")
    assert not cancel.is_visible()
    assert {outcome.partition(":")[0] for outcome in outcomes(live)} == {"refused"}
    assert "cancelled" in live.text("#dialog-results")
    assert "end of a step" in before
    assert [("mode" in body, body.get("dry_run", False)) for body in sent] == [(False, True), (False, False)]


def test_a_token_is_requested_and_a_wrong_one_loses_nothing(
    tmp_path: Path, start_exporter: StartExporter, open_page: OpenPage
) -> None:
    exporter = start_exporter(None, "--report.expiry", "3600", "--action.token-file", token_file(tmp_path, TOKEN))
    train(exporter)
    live = open_page(exporter, path="?q=llm&sort=-allocated", expects=("status of 401",))
    sent = sent_actions(live)
    open_dialog(live, "llm")
    focused(live, "token")
    title = live.text("#dialog-title")
    assert not live.page.locator("#dialog-error").is_visible()
    live.page.keyboard.type("wrong")
    live.page.keyboard.press("Enter")
    live.page.locator("#dialog-error").wait_for()
    assert "wrong token" in live.text("#dialog-error")
    refused = live.text("#dialog-error")
    live.page.locator("#token").fill("Schlüssel mit Umlaut")
    live.page.keyboard.press("Enter")
    live.until("document.querySelector('#dialog-error').innerText.replaceAll('\\u00a0', ' ') !== it", refused)
    focused(live, "token")
    live.page.locator("#token").fill(TOKEN)
    live.page.keyboard.press("Enter")
    focused(live, "dialog-confirm")
    assert live.text("#dialog-title") == title
    assert set(outcomes(live)) == {"would clear"}
    assert len({str(body) for body in sent}) == 1  # each attempt was for the same clear
    live.page.keyboard.press("Escape")
    assert live.page.url.endswith("?q=llm&sort=-allocated")
    live.until("document.querySelectorAll('#events li time').length > 0")  # the token also shows the events
    kept = live.page.evaluate(
        "[location.href, document.cookie, ...Object.values(localStorage), ...Object.values(sessionStorage),"
        " document.querySelector('#token').value].join(' ')"
    )
    assert TOKEN not in kept
    assert not any(TOKEN in url for url in live.requested)


def test_an_engine_sleeps_and_wakes_from_its_jobs_page_where_that_is_allowed(
    start_exporter: StartExporter, open_page: OpenPage
) -> None:
    exporter = start_exporter(None, "--report.expiry", "3600", "--action.allow", "default,release_memory")
    verbs = ("release_memory", "resume_memory")
    engine = report(os.getpid(), workload="chat", actions=verbs, devices=(sample(UUIDS[0], 8 * GIB, 0),))
    exporter.report(engine)
    live = open_page(exporter, path="?q=chat")
    live.page.locator("#jobs tbody:has-text('chat') a.name").click()
    live.page.get_by_role("button", name="Sleep…").click()
    focused(live, "dialog-confirm")
    assert outcomes(live) == ["would release"]
    live.page.locator("#dialog-cancel").click()
    asleep = replace(engine, sequence=2, devices=(replace(engine.devices[0], unmapped_bytes=GIB),))
    exporter.report(asleep)
    live.page.get_by_role("button", name="Sleep…").wait_for(state="hidden")
    assert not live.page.get_by_role("button", name="Wake…").is_visible()  # resume_memory is not allowed
