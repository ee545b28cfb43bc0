"""The states of actions, what one user's actions and results take of the memory, and actions before a restart."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpumem_client.wire.protocol import CommandResult, DeviceResult, SnapshotFile
from gpumem_exporter.actions import lifecycle
from gpumem_exporter.actions.action import Action, ActionResult
from gpumem_exporter.actions.action_options import ActionRequest, Target
from gpumem_exporter.actions.audit import Audit
from gpumem_exporter.actions.lifecycle import (
    MAX_BYTES,
    ActionRegistry,
    ActionState,
    IllegalTransitionError,
    PartState,
    advanced,
)
from gpumem_exporter.core.caller import Caller, CallerKind, Rights
from gpumem_exporter.core.event import Event, Query
from gpumem_exporter.errors import TooManyActionsError
from gpumem_exporter.reports.report_schema import shortened
from tests.support.builders.builders import UUIDS, report, sample
from tests.support.builders.dispatching import Bench
from tests.support.servers.running_exporter import ACTIONS, problem, running_exporter

SNAPSHOT = SnapshotFile("/tmp/s.pickle", 10, 1, 1, has_frames=True)


def test_a_result_has_the_devices_of_its_process_and_the_snapshot_once() -> None:
    bench = Bench()
    action = bench.ask("snapshot", Target(pid=1))
    claimed = tuple(DeviceResult(uuid) for uuid in (*UUIDS[:2], *(f"GPU-{number}" for number in range(60)), *UUIDS[:2]))
    result = CommandResult(action.id, "done", devices=claimed, snapshot=SNAPSHOT)
    sent = dataclasses.replace(bench.first.report, results=(result,))
    bench.dispatcher.take_results(dataclasses.replace(bench.first, report=sent))
    (done,) = bench.finished
    assert [(row.uuid, row.snapshot is not None) for row in done.results] == [(UUIDS[0], True), (UUIDS[1], False)]


def test_the_texts_of_a_result_are_cut_on_arrival() -> None:
    result = CommandResult("a", "failed", "x" * 2000)
    sent = report(1, devices=(sample(),), results=(result, CommandResult("b", "done")))
    first, second = shortened(sent).results
    assert len(first.reason) == 500
    assert second == sent.results[1]


@pytest.mark.parametrize("dry_run", [False, True])
def test_finished_actions_have_a_limit_in_bytes_and_the_largest_caller_loses_first(dry_run: bool) -> None:
    registry = ActionRegistry(1000)
    row = ActionResult(1, "w", "", "0", UUIDS[0], "failed", "x" * 500)

    def finish(number: int, caller: str, results: int) -> None:
        request = ActionRequest("reset_peak", Target(all=True), dry_run=dry_run)
        action = Action(f"{caller}-{number}", request, "failed", caller, float(number), caller=caller)
        registry.finish(dataclasses.replace(action, results=(row,) * results))

    for number in range(20):
        finish(number, "uid:1", 1)
    for number in range(20, 120):
        finish(number, "uid:2", 500)
    kept = registry.recent()
    assert [action.id for action in kept if action.caller == "uid:1"] == [f"uid:1-{n}" for n in reversed(range(20))]
    assert kept[0].id == "uid:2-119"
    assert sum(action.kept_bytes for action in kept) <= MAX_BYTES
    assert sum(len(action.results) * 1000 for action in kept) <= MAX_BYTES


def test_a_caller_has_a_limited_number_of_processes_in_running_actions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "MAX_UNDER_WAY", 10)
    bench = Bench()
    eve, ada = (Caller(CallerKind.UNIX, Rights.ALL, uid=uid) for uid in (1001, 1002))
    for _ in range(5):
        bench.ask(caller=eve, deadline_seconds=3600.0)
    with pytest.raises(TooManyActionsError):
        bench.ask(caller=eve)
    assert bench.ask(caller=ada).state == "queued"


@pytest.mark.parametrize(
    ("state", "to"),
    [
        (ActionState.QUEUED, ActionState.QUEUED),
        (ActionState.RUNNING, ActionState.QUEUED),
        *((end, ActionState.RUNNING) for end in ActionState if end.value not in ("queued", "running")),
        (PartState.KEPT, PartState.DELIVERED),
        (PartState.DELIVERED, PartState.WAITING),
        *((PartState.ENDED, to) for to in PartState),
    ],
)
def test_a_state_that_cannot_follow_is_a_defect(state: Any, to: Any) -> None:
    with pytest.raises(IllegalTransitionError, match=f"{to.name}.*{state.name}"):
        advanced(state, to)


async def test_unreadable_earlier_actions_are_logged_and_delay_no_request(caplog: pytest.LogCaptureFixture) -> None:
    async def pages(_: Query, last: int) -> list[Event]:
        raise ValueError("no JSON")

    journal: Any = SimpleNamespace(pages=pages)
    audit = Audit(journal, durable=True, wall_clock=lambda: 1e9, count=lambda _: None, poll_soon=lambda: None)
    await audit.restore(Bench().dispatcher)
    waiting = asyncio.ensure_future(audit.wait_until_restored())
    await asyncio.sleep(0)
    assert waiting.done()
    assert "no JSON" in caplog.text


@pytest.mark.parametrize(("mode", "code"), [("now", "exporter_restarted"), ("idle", "unknown_mode")])
def test_after_a_restart_an_action_without_an_end_has_failed_and_every_request_is_known(
    tmp_path: Path, mode: str, code: str
) -> None:
    """The process does not support the mode `idle`, so that this action has ended before the restart."""
    request = {"action": "empty_cache", "target": {"pid": 7}, "wait_seconds": 0, "reason": "room"}
    request.update(mode=mode, deadline_seconds=120)
    answers: list[dict[str, Any]] = []
    for _ in range(2):
        with running_exporter(storage_path=str(tmp_path / "state")) as exporter:
            exporter.report(report(7, devices=(sample(UUIDS[0]),)))
            answers.append(json.loads(exporter.request("POST", ACTIONS, request, Idempotency_Key="k").body))
            other = exporter.request("POST", ACTIONS, {**request, "target": {"pid": 8}}, Idempotency_Key="k")
            assert "'k'" in problem(other, 409)["detail"]
    first, again = answers
    assert again["state"] == "failed"
    assert all(again[name] == first[name] for name in ("id", "reason", "mode", "deadline_seconds"))
    assert [(row["pid"], row["reason_code"]) for row in again["results"]] == [(7, code)]
