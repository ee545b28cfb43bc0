"""Clearing from the live page: the safe mode, cancelling, tokens and refusals."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from playwright.sync_api import Request

from gpumem_client.wire.protocol import MODES
from tests.support.builders.builders import UUIDS, report, sample
from tests.support.processes.live_page import LivePage, OpenPage, browser, open_page, serving
from tests.support.servers.exporter_process import ExporterProcess, token_file

__all__ = ["browser", "open_page"]

TOKEN = "a-token-that-is-long-enough-to-be-one"
RANKS = 4
GIB = 1 << 30


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
    tmp_path: Path, open_page: OpenPage
) -> None:
    with serving(tmp_path, "--report.expiry", "3600") as exporter:
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


def test_a_token_is_requested_and_a_wrong_one_loses_nothing(tmp_path: Path, open_page: OpenPage) -> None:
    with serving(tmp_path, "--report.expiry", "3600", "--action.token-file", token_file(tmp_path, TOKEN)) as exporter:
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
    tmp_path: Path, open_page: OpenPage
) -> None:
    with serving(tmp_path, "--report.expiry", "3600", "--action.allow", "default,release_memory") as exporter:
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
