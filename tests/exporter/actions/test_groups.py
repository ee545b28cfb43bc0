"""Actions on all ranks of a workload at the same step, commands that a rank keeps, and commands that are cancelled."""

from __future__ import annotations

import asyncio
import itertools
import re
from dataclasses import replace
from typing import Any

import pytest

from gpumem_client.wire.protocol import MODES, CommandResult
from gpumem_client.wire.reason_codes import ReasonCode
from gpumem_exporter.actions.action import Action
from gpumem_exporter.actions.dispatcher import GROUP_ANSWER_SECONDS
from gpumem_exporter.actions.timing import GROUP_LEAD_SECONDS
from gpumem_exporter.core.caller import Caller
from gpumem_exporter.core.samples import ReportingProcess
from tests.support.builders.dispatching import EVERYBODY, Ranks, build_dispatcher


@pytest.fixture
def ranks() -> Ranks:
    return Ranks()


async def test_a_group_is_every_rank_of_the_workload_at_a_step_that_no_rank_has_ended(ranks: Ranks) -> None:
    ranks.now += 1.0  # the last samples are a second old: rank 0 may be at step 60 by now
    action = ranks.ask_group()
    assert action.at_step == 50 + 10 + round(GROUP_LEAD_SECONDS / 0.1)
    for process in (ranks.first, ranks.second):
        (command,) = ranks.dispatcher.commands(process)
        assert (command.mode, command.at_step) == ("step", action.at_step)
    assert ranks.ask_group(at_step=123).at_step == 123


def test_the_pending_ranks_have_the_step_that_they_are_sent(ranks: Ranks) -> None:
    times = itertools.count(ranks.now, 0.06)  # a step ends while the request is checked
    ranks.dispatcher = build_dispatcher(ranks.store, lambda: next(times))
    action = ranks.ask_group()
    for process in (ranks.first, ranks.second):
        (command,) = ranks.dispatcher.commands(process)
        assert {command.at_step, *(part.at_step for part in action.pending)} == {action.at_step}


def test_a_group_step_is_two_steps_ahead_and_before_the_deadline(ranks: Ranks) -> None:
    ranks.rank(1, "0", 50, step_seconds=10.0)
    # Rank 1 makes fifty steps within the lead, for which rank 0 takes minutes.
    assert refused(ranks.ask_group(deadline_seconds=30), r"\b98\b.*\b480\.0 s.*\b30 s")
    ranks.rank(2, "1", 48, step_seconds=10.0)
    assert refused(ranks.ask_group(deadline_seconds=30), r"\b52\b.*\b40\.0 s")
    assert ranks.ask_group(deadline_seconds=60).at_step == 52
    action = ranks.ask_group()
    assert (action.at_step, action.deadline_seconds) == (52, 45.0)
    assert refused(ranks.ask_group(deadline_seconds=5), r"\b52\b.*\b40\.0 s.*\b5 s")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"at_step": 50}, r"pid 1 \(rank 0\).*\b50\b.*\b50\b"),
        ({"at_step": 10_000}, r"\b10000\b.*\b995\.2 s.*\b30 s"),
        ({"modes": ("now",)}, r"pid 2 \(rank 1\).*\bnow\b"),
        ({"actions": ("reset_peak",)}, r"pid 2 \(rank 1\).*\breset_peak\b"),
        ({"step": None}, r"pid 2 \(rank 1\).*\bsteps"),
        ({"step_seconds": None}, r"pid 2 \(rank 1\).*\bsteps"),
    ],
)
def test_a_group_with_a_rank_that_cannot_take_part_does_not_start(
    ranks: Ranks, changes: dict[str, Any], message: str
) -> None:
    group = {"at_step": changes.pop("at_step")} if "at_step" in changes else {}
    ranks.rank(2, **{"rank": "1", "step": 48, **changes})
    for dry_run in (True, False):
        assert refused(ranks.ask_group(target=EVERYBODY, dry_run=dry_run, **group), message)
    assert ranks.dispatcher.commands(ranks.first) == ()


def refused(action: Action, message: str) -> bool:
    """Whether no process acts, each for this reason or because its own reporter does not support the action."""
    others = [row for row in action.results if row.outcome != "unsupported"]
    return action.finished and all(
        (row.outcome, row.reason_code) == ("refused", "group_incomplete") and re.search(message, row.reason)
        for row in others
    )


async def test_the_ranks_of_each_job_act_together_and_all_else_by_itself_in_one_action(ranks: Ranks) -> None:
    ranks.rank(3, "0", 500, workload="other")
    ranks.rank(4, "1", 490, workload="other")
    ranks.put(5, workload="notebook", modes=MODES)
    action = ranks.ask()
    assert {(part.pid, part.mode) for part in action.pending} == {
        *((pid, "step") for pid in (1, 2, 3, 4)),
        (5, "now"),
    }
    steps = {part.pid: part.at_step for part in action.pending}
    assert steps[1] == steps[2] != steps[3] == steps[4]
    assert (action.group, action.at_step, action.request.mode) == (True, None, "auto")
    ranks.answer(ranks.first, action, "refused")
    ended = {row.pid: row.outcome for row in ranks.current(action).results}
    assert ended == {1: "refused", 2: "refused"}, "the other job is not withdrawn"
    expected = {row.pid: (row.mode, row.at_step) for row in ranks.ask(dry_run=True).results}
    assert expected == {part.pid: (part.mode, part.at_step) for part in action.pending}


async def test_a_slow_disk_is_not_blamed_on_a_rank(ranks: Ranks) -> None:
    disk = asyncio.Event()

    async def record(_: object) -> None:
        await disk.wait()

    ranks.dispatcher = ranks.build(record=record)
    action = ranks.ask_group(deadline_seconds=60)
    ranks.now += GROUP_ANSWER_SECONDS + 1.0
    ranks.dispatcher.expire()
    disk.set()
    ranks.rank(1, "0", 80)
    second = ranks.rank(2, "1", 78)
    while not (commands := ranks.dispatcher.commands(second)):
        await asyncio.sleep(0)
    ranks.dispatcher.expire()
    assert ranks.current(action).results == ()
    assert commands[0].at_step == 80 + round(GROUP_LEAD_SECONDS / 0.1), "the first step would have come too soon"
    disk.clear()
    ranks.ask_group(at_step=81, deadline_seconds=60)
    ranks.rank(1, "0", 81)
    disk.set()
    for _ in range(9):
        await asyncio.sleep(0)
    (late,) = ranks.finished
    assert refused(late, "step 81 has passed")


async def test_a_group_is_withdrawn_if_a_rank_does_not_answer_and_the_result_names_it(
    ranks: Ranks, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    ranks.rank(3, "2", 48)
    action = ranks.ask_group()
    ranks.dispatcher.commands(ranks.first)
    held = ranks.says(ranks.first, action.id, "of an exporter before its restart")
    assert ranks.dispatcher.commands(held) == (), "a command that a process keeps is not sent again"
    assert ranks.dispatcher.cancelled(held) == ("of an exporter before its restart",)
    ranks.woken.clear()
    ranks.now += GROUP_ANSWER_SECONDS
    ranks.dispatcher.expire()
    assert ranks.woken == [ranks.first.key]
    held = ranks.says(ranks.first, action.id)
    assert ranks.dispatcher.cancelled(held) == (action.id,)
    ranks.answer(held, action, "refused")
    (finished,) = ranks.finished
    states = ["delivered", "kept", "withdrawn", "ended"]
    assert [state for state in states if f"pid 1 (rank 0) is {state}" not in caplog.text] == []
    outcomes = [(row.rank, row.outcome) for row in finished.results]
    assert outcomes == [("1", "expired"), ("2", "refused"), ("0", "refused")]
    assert finished.results[0].reason_code == ReasonCode.GROUP_RANK_LATE


def refuse(ranks: Ranks, process: ReportingProcess, action: Action, code: ReasonCode) -> None:
    result = CommandResult(action.id, "refused", f"because of {code}", code)
    ranks.dispatcher.take_results(replace(process, report=replace(process.report, results=(result,))))


async def test_a_waiting_command_is_recalled_and_its_result_names_the_caller(ranks: Ranks) -> None:
    action = ranks.ask_group()
    for process in (ranks.first, ranks.second):
        ranks.dispatcher.commands(process)
    waiting = [ranks.says(process, action.id) for process in (ranks.first, ranks.second)]
    ranks.woken.clear()
    under_way = ranks.dispatcher.cancel(action.id, requested_by=Caller.policy("alice"))
    assert under_way is not None
    assert not under_way.finished
    assert ranks.dispatcher.cancel(action.id, requested_by=Caller.policy("bob")) == under_way
    assert ranks.woken == [ranks.first.key, ranks.second.key]
    for process in waiting:
        assert ranks.dispatcher.cancelled(process) == (action.id,)
        refuse(ranks, process, action, ReasonCode.CANCELLED)
    (finished,) = ranks.finished
    assert {(row.rank, row.outcome, row.reason) for row in finished.results} == {
        ("0", "refused", "cancelled by policy:alice"),
        ("1", "refused", "cancelled by policy:alice"),
    }
    assert ranks.dispatcher.cancel(action.id, requested_by=Caller.policy("bob")) == finished
    assert ranks.dispatcher.cancel("unknown", requested_by=Caller.policy("bob")) is None


async def test_a_result_from_before_the_cancellation_is_kept(ranks: Ranks) -> None:
    action = ranks.ask(mode="step")
    for process in (ranks.first, ranks.second):
        ranks.dispatcher.commands(process)
    ranks.dispatcher.cancel(action.id, requested_by=Caller.policy("alice"))
    refuse(ranks, ranks.first, action, ReasonCode.CUDA_GRAPH_CAPTURE)
    ranks.answer(ranks.second, action, "done", freed=7)
    (finished,) = ranks.finished
    assert {(row.outcome, row.reason) for row in finished.results} == {
        ("refused", "because of cuda_graph_capture"),
        ("done", ""),
    }
    assert (finished.state, finished.freed_bytes) == ("cancelled", 7)
