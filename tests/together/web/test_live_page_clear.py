"""Clearing from the live page: dry run, confirmation, results, and refused callers."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpumem_client.wire.protocol import MODES, REPORTS_PATH, to_wire
from tests.emulation.fixtures import MakeNode, StartTorch
from tests.support.builders import UUIDS, report, sample
from tests.support.exporter_process import ExporterProcess
from tests.support.live_page import LivePage, OpenPage, browser, open_page, send, serving
from tests.support.waiting import eventually

__all__ = ["browser", "open_page"]

GIB = 1 << 30
TOKEN = "a-token-that-is-long-enough-to-be-one"
TORCH_ONE_GIB = (
    "blocks = [torch.empty(256 << 20, dtype=torch.uint8, device='cuda') for _ in range(4)]; del blocks; result = 0"
)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExporterProcess]:
    """An exporter that requires a token for actions."""
    folder = tmp_path_factory.mktemp("guarded")
    token = folder / "token"
    token.touch(0o600)
    token.write_text(TOKEN + "\n")
    token.chmod(0o600)
    with serving(folder, "--report.expiry", "3600", "--action.token-file", str(token)) as exporter:
        send(exporter, 700, GIB)
        yield exporter


def shows(live: LivePage, selector: str, pattern: str) -> None:
    """Wait until the text of an element matches a regular expression."""
    text = f"document.querySelector('{selector}').textContent.replaceAll('\\u00a0', ' ')"
    live.until(f"new RegExp(it).test({text})", pattern)


def focused(live: LivePage, element: str) -> None:
    """Wait until an element has the focus, which the dialog moves with each state."""
    live.until("document.activeElement.id === it", element)


def train(exporter: ExporterProcess, *, ranks: int) -> None:
    """Report ranks of a job that counts steps and ends none of them: 20 GiB reclaimable, 2 GiB of them idle."""
    for rank in range(ranks):
        device = replace(sample(UUIDS[0], GIB, 20 * GIB), idle_cache_bytes=2 * GIB)
        sent = report(
            900 + rank, devices=(device,), workload="llm", rank=str(rank), step=100, step_seconds=1.0, modes=MODES
        )
        assert exporter.request("POST", REPORTS_PATH, to_wire(sent)).status == 200


def sent_clears(live: LivePage) -> list[dict[str, Any]]:
    """Return the list to which the bodies of the page's clears are added, without dry runs."""
    bodies: list[dict[str, Any]] = []

    def take(request: Any) -> None:
        if request.method == "POST" and not (body := request.post_data_json).get("dry_run"):
            bodies.append(body)

    live.page.on("request", take)
    return bodies


def settle_soon(route: Any) -> None:
    """Shorten the settling time of a request for an action."""
    if route.request.method == "POST":
        body = json.loads(route.request.post_data)
        if "settle_seconds" in body:
            route.continue_(post_data=json.dumps({**body, "settle_seconds": 0.5}))
            return
    route.continue_()


def test_a_clear_frees_what_its_dry_run_showed(
    make_node: MakeNode, start_torch: StartTorch, tmp_path: Path, open_page: OpenPage
) -> None:
    node = make_node(devices=2)
    with serving(tmp_path, environment=node.environment()) as exporter:
        process = start_torch(node, GPUMEM_EXPORTER_URL=exporter.url)
        process.call("start_client", workload="hoarder")
        process.exec(TORCH_ONE_GIB)
        live = open_page(exporter, viewport={"width": 1280, "height": 900})
        live.until("document.querySelector('.device .torch_reclaimable').dataset.bytes === it", str(GIB))
        live.until("Number(document.querySelector('.device .non_torch').dataset.bytes) > 0")
        before = live.ledger(0)
        live.page.route("**/api/v1/actions", settle_soon)
        live.page.get_by_role("button", name="Clear GPU 0…").click()
        shows(live, "#dialog-status", r"1\.0 GiB\b")
        assert live.ledger(0)["torch_reclaimable"] == GIB  # only the dry run has run
        live.page.get_by_role("button", name="Clear", exact=True).click()
        shows(live, "#dialog-status", r"^Freed 1\.0 GiB\b.*\b1\b")
        row = live.text("#dialog-results tbody tr")
        assert row.split("\t") == [f"hoarder (pid {process.pid})", "0", "1.0 GiB → 0", "1.0 GiB", "done"]
        shows(live, "#dialog-status", r"^Freed 1\.0 GiB\b.*\b1\.0 GiB of it is still free after 0\.5 s\.$")
        live.page.get_by_role("button", name="Close").click()
        live.until("document.querySelector('.device .torch_reclaimable').dataset.bytes === '0'")
        after = live.ledger(0)
        assert after == {**before, "torch_reclaimable": 0, "free": (before["free"] or 0) + GIB}
        live.page.locator("#events li[data-type=action]").wait_for()
        text = live.text("#events li[data-type=action]")
        assert re.search(r"empty_cache\b.*\b1\b.*\bdone\b.*\b1\.0 GiB", text)


def test_hidden_names_are_shown_to_a_viewer_who_may_act(tmp_path: Path, open_page: OpenPage) -> None:
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text(TOKEN + "\n")
    flags = ("--report.expiry", "3600", "--action.token-file", str(token), "--web.hide-identities")
    with serving(tmp_path, *flags) as exporter:
        send(exporter, 700, GIB, workload="", command="python secret.py")
        live = open_page(exporter, expects=("401",))
        shows(live, "#rows", r"\(unnamed\)")
        live.page.get_by_role("button", name="Clear all…").click()
        live.page.locator("#token").fill(TOKEN)
        live.page.get_by_role("button", name="Use token").click()
        shows(live, "#rows", r"python secret\.py")


def test_a_clear_works_by_keyboard_and_restores_the_focus(demo: ExporterProcess, open_page: OpenPage) -> None:

    def clears() -> list[dict[str, Any]]:
        return [it for it in demo.get("/api/v1/actions?limit=1000")["actions"] if not it["dry_run"]]

    known = {it["id"] for it in clears()}
    live = open_page(demo, viewport={"width": 1280, "height": 900})
    for key in ("Tab", "Tab", "Enter"):  # past the skip link
        live.page.keyboard.press(key)
    focused(live, "dialog-confirm")
    live.page.keyboard.press("Escape")
    assert not live.page.locator("#dialog").is_visible()
    assert live.page.evaluate("document.activeElement.id") == "clear-all"
    assert demo.get("/api/v1/actions?limit=1")["actions"][0]["dry_run"] is True
    live.page.keyboard.press("Enter")
    focused(live, "dialog-confirm")
    live.page.keyboard.press("Enter")
    focused(live, "dialog-cancel")
    results = sum(sum(it["outcomes"].values()) for it in clears() if it["id"] not in known)
    assert live.page.locator("#dialog-results tbody tr").count() == results
    live.page.keyboard.press("Enter")
    assert live.page.evaluate("document.activeElement.id") == "clear-all"


def test_a_dialog_that_is_opened_again_at_once_shows_its_estimate(demo: ExporterProcess, open_page: OpenPage) -> None:
    """The browser sends the event of the end of a dialog later."""
    live = open_page(demo)
    live.page.locator("#clear-all").click()
    focused(live, "dialog-confirm")
    live.page.evaluate("document.querySelector('#dialog').close(), document.querySelector('#clear-all').click()")
    focused(live, "dialog-confirm")


def test_the_figure_of_a_clear_is_what_stays_free(tmp_path: Path, open_page: OpenPage) -> None:
    with serving(tmp_path, "--report.expiry", "3600") as exporter:
        train(exporter, ranks=1)
        live = open_page(exporter)
        live.page.locator("#clear-all").click()
        shows(live, "#dialog-status", r"^Stays free 2\.0 GiB$")
        shows(live, "#dialog-rest", r"^; 18\.0 GiB more would be reserved again in the next step\.$")
        shows(live, "#dialog-when", r"within 30 s: llm rank 0\.$")
        assert live.text("#dialog-results tbody tr").split("\t")[2:] == ["21.0 GiB", "2.0 GiB", "20.0 GiB"]


def test_a_training_job_clears_with_all_ranks_after_the_same_step(demo: ExporterProcess, open_page: OpenPage) -> None:
    ranks = sorted(pid for pid, it in demo.processes().items() if it["workload"] == "demo-llm-pretrain")
    live = open_page(demo)
    sent = sent_clears(live)
    for name in ("demo-llm-pretrain", "demo-notebook"):
        live.page.locator(f"#rows tr:has-text('{name}') button").first.click()
        focused(live, "dialog-confirm")
        live.page.locator("#dialog-confirm").click()
        focused(live, "dialog-cancel")
        live.page.locator("#dialog-cancel").click()
    group, at_once = sent
    assert (group["mode"], group["group"], sorted(group["target"]["pid"])) == ("step", True, ranks)
    assert (at_once["mode"], at_once["group"]) == ("now", False)
    assert at_once["target"] == {"workload": "demo-notebook", "user": "carol"}


def test_one_device_of_a_group_clears_all_of_its_ranks(demo: ExporterProcess, open_page: OpenPage) -> None:
    live = open_page(demo)
    live.page.get_by_role("button", name="Clear GPU 0…").click()
    shows(live, "#dialog-when", r"demo-llm-pretrain \(4 ranks\)")
    assert live.page.locator("#dialog-results tbody tr").count() == 4


def test_a_clear_that_waits_for_a_step_can_be_cancelled_or_run_now(tmp_path: Path, open_page: OpenPage) -> None:
    with serving(tmp_path, "--report.expiry", "3600") as exporter:
        train(exporter, ranks=1)
        live = open_page(exporter)
        sent = sent_clears(live)
        live.page.locator("#clear-all").click()
        live.page.get_by_role("button", name="Clear at the step's end").click()
        shows(live, "#dialog-status", r"^Waiting for the end of a step of llm rank 0, at most 30 s")
        live.page.get_by_role("button", name="Cancel the clear").click()
        focused(live, "dialog-cancel")
        assert "refused: cancelled" in live.text("#dialog-results tbody tr")
        live.page.keyboard.press("Enter")
        live.page.locator("#clear-all").click()
        live.page.get_by_role("button", name="Clear now").click()
        live.until("document.querySelector('#dialog-status').textContent.startsWith('Clearing')")
        eventually(lambda: [(body["mode"], body["target"]) for body in sent[1:]], lambda it: it != [])
        assert [(body["mode"], body["target"]) for body in sent] == [
            ("step", {"pid": "900@1:0"}),
            ("now", {"all": True}),
        ]


def test_the_page_has_the_name_of_the_host(demo: ExporterProcess, open_page: OpenPage) -> None:
    live = open_page(demo)
    assert live.page.title().startswith(f"{socket.gethostname()} ·")
    assert live.text("#node-name").startswith(f"{socket.gethostname()} ·")


def test_a_reason_in_a_dry_run_is_shown(demo: ExporterProcess, open_page: OpenPage) -> None:
    live = open_page(demo)

    def reasoned(route: Any) -> None:
        reply = route.fetch()
        document = reply.json()
        document["results"][0]["reason"] = "an engine starts there"
        route.fulfill(response=reply, json=document)

    live.page.route("**/api/v1/actions", reasoned)
    live.page.locator("#rows tr:has-text('demo-notebook') button").click()
    shows(live, "#dialog-results", "an engine starts there")


def test_a_clear_that_waits_for_an_engine_names_it(tmp_path: Path, open_page: OpenPage) -> None:
    def tell(exporter: ExporterProcess, *, starting: bool) -> None:
        device, actions = sample(UUIDS[0], GIB), ("reset_peak",)
        sent = report(950, devices=(device,), actions=actions, sequence=2 - starting, engine_starting=starting)
        assert exporter.request("POST", REPORTS_PATH, to_wire(sent)).status == 200

    with serving(tmp_path, "--report.expiry", "3600") as exporter:
        train(exporter, ranks=1)
        live = open_page(exporter)
        live.page.locator("#clear-all").click()
        live.page.get_by_role("button", name="Clear at the step's end").click()
        shows(live, "#dialog-status", r"^Waiting for the end of a step")
        live.page.get_by_role("button", name="Cancel the clear").click()
        focused(live, "dialog-cancel")
        tell(exporter, starting=True)
        live.page.keyboard.press("Enter")
        live.page.locator("#clear-all").click()
        live.page.locator("#dialog-confirm").click()
        shows(live, "#dialog-status", r"^Waiting until the engine in pid 950.* has started")
        tell(exporter, starting=False)
        live.page.get_by_role("button", name="Cancel the clear").click()
        focused(live, "dialog-cancel")


def test_the_button_of_a_row_clears_one_job(demo: ExporterProcess, open_page: OpenPage) -> None:
    live = open_page(demo, viewport={"width": 1280, "height": 900})
    live.page.locator("#rows tr:has-text('demo-notebook') button").click()
    shows(live, "#dialog-title", r"demo-notebook \(pid \d+\)")
    focused(live, "dialog-confirm")
    action = demo.get("/api/v1/actions?limit=1")["actions"][0]
    results = demo.get(f"/api/v1/actions/{action['id']}")["results"]
    assert {result["workload"] for result in results} == {"demo-notebook"}


def test_the_token_is_stored_only_in_the_page(guarded: ExporterProcess, open_page: OpenPage) -> None:
    live = open_page(guarded, expects=("status of 401",))
    shows(live, "#access", "token")
    shows(live, "#events-note", r"\w")
    assert live.page.locator("#events li").count() == 0
    live.page.locator("#clear-all").click()
    shows(live, "#dialog-status", "token")
    live.page.keyboard.type("wrong")
    live.page.keyboard.press("Enter")
    shows(live, "#dialog-error", "token")
    refused = live.text("#dialog-error")
    live.page.locator("#token").fill("Schlüssel mit Umlaut")
    live.page.keyboard.press("Enter")
    live.until("document.querySelector('#dialog-error').innerText.replaceAll('\\u00a0', ' ') !== it", refused)
    assert "token" in live.text("#dialog-error")
    live.page.locator("#token").fill(TOKEN)
    live.page.keyboard.press("Enter")
    focused(live, "dialog-confirm")
    live.page.locator("#events li").first.wait_for(state="attached")
    kept = live.page.evaluate(
        "[location.href, document.cookie, ...Object.values(localStorage), ...Object.values(sessionStorage),"
        " document.querySelector('#token').value].join(' ')"
    )
    assert TOKEN not in kept
    assert not any(TOKEN in url for url in live.requested)


def test_a_refused_caller_sees_the_reason(demo: ExporterProcess, open_page: OpenPage) -> None:
    proxied = open_page(demo, expects=("status of 403",), extra_http_headers={"X-Forwarded-For": "10.1.2.3"})
    shows(proxied, "#access", "loopback")
    proxied.page.locator("#clear-all").click()
    shows(proxied, "#dialog-error", "loopback")
    assert not proxied.page.locator("#dialog-confirm").is_visible()


def test_an_unknown_result_of_a_clear_is_not_shown_as_a_number(tmp_path: Path, open_page: OpenPage) -> None:
    with serving(tmp_path, "--report.expiry", "3600") as exporter:
        send(exporter, 701, GIB, reclaimable_known=False)
        live = open_page(exporter)
        live.page.locator("#clear-all").click()
        focused(live, "dialog-confirm")
        shows(live, "#dialog-status", r"not known")
        assert not re.search(r"\d\s[KMG]iB", live.text("#dialog-status") + live.text("#dialog-confirm"))
        live.page.locator("#dialog-cancel").click()
        send(exporter, 702, GIB)
        live.page.locator("#clear-all").click()
        shows(live, "#dialog-status", r"at least 1\.0 MiB\b")


def test_disabled_clears_are_shown_as_disabled(tmp_path: Path, open_page: OpenPage) -> None:
    with serving(tmp_path, "--action.allow", "reset_peak") as exporter:
        send(exporter, 701, GIB)
        live = open_page(exporter)
        shows(live, "#access", r"\w")
        live.page.locator("#clear-all").click()
        shows(live, "#dialog-error", r"\w")
        assert exporter.get("/api/v1/actions")["actions"] == []
        assert "action.allow turns empty_cache off" in exporter.log()


def test_the_page_says_which_processes_a_user_may_clear(demo: ExporterProcess, open_page: OpenPage) -> None:
    caller = {"uid": 1001, "rights": "own", "actions": ["empty_cache"], "processes": 3, "reason": None}
    own = f"""
        const send = window.fetch;
        window.fetch = (path, how) =>
            path === "/api/v1/caller" ? Promise.resolve(Response.json({json.dumps(caller)})) : send(path, how);
    """
    live = open_page(demo, script=own)
    shows(live, "#access", r"^You can clear your own 3 processes \(uid 1001\)\.$")
