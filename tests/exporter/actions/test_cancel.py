"""Cancelling an action, and the requested step of a group."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpumem_client.wire.protocol import CommandResult
from gpumem_client.wire.reason_codes import ReasonCode
from gpumem_exporter.actions.caller import Caller
from gpumem_exporter.actions.model import Action
from gpumem_exporter.core.samples import ReportingProcess
from gpumem_exporter.errors import GroupIncompleteError
from tests.support.dispatching import Ranks


@pytest.fixture
def ranks() -> Ranks:
    return Ranks()


def refuse(ranks: Ranks, process: ReportingProcess, action: Action, code: ReasonCode) -> None:
    result = CommandResult(action.id, "refused", f"because of {code}", code)
    ranks.dispatcher.take_results(replace(process, report=replace(process.report, results=(result,))))


def test_a_command_that_was_not_fetched_is_cancelled_at_once_and_names_the_caller(ranks: Ranks) -> None:
    action = ranks.ask(mode="step")
    cancelled = ranks.dispatcher.cancel(action.id, requested_by=Caller.policy("alice"))
    assert cancelled is not None
    assert cancelled.state == "cancelled"
    assert {(row.outcome, row.reason) for row in cancelled.results} == {("refused", "cancelled by policy:alice")}
    assert ranks.finished == [cancelled]
    assert ranks.dispatcher.commands(ranks.first) == ()


async def test_a_waiting_command_is_recalled_and_its_result_names_the_caller(ranks: Ranks) -> None:
    action = ranks.ask_group()
    for process in (ranks.first, ranks.second):
        ranks.dispatcher.commands(process)
    waiting = [ranks.says(process, action.id) for process in (ranks.first, ranks.second)]
    ranks.woken.clear()
    under_way = ranks.dispatcher.cancel(action.id, requested_by=Caller.policy("alice"))
    assert under_way is not None
    assert not under_way.finished
    assert ranks.woken == [ranks.first.key, ranks.second.key]
    for process in waiting:
        assert ranks.dispatcher.cancelled(process) == (action.id,)
        refuse(ranks, process, action, ReasonCode.CANCELLED)
    (finished,) = ranks.finished
    assert {(row.rank, row.outcome, row.reason) for row in finished.results} == {
        ("0", "refused", "cancelled by policy:alice"),
        ("1", "refused", "cancelled by policy:alice"),
    }


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


def test_cancelling_again_or_after_the_end_changes_nothing(ranks: Ranks) -> None:
    action = ranks.ask(dry_run=True)
    assert ranks.dispatcher.cancel(action.id, requested_by=Caller.policy("alice")) == action
    again = ranks.ask(mode="step")
    first = ranks.dispatcher.cancel(again.id, requested_by=Caller.policy("alice"))
    assert ranks.dispatcher.cancel(again.id, requested_by=Caller.policy("bob")) == first
    assert ranks.dispatcher.cancel("unknown", requested_by=Caller.policy("alice")) is None


def test_a_requested_step_is_used(ranks: Ranks) -> None:
    action = ranks.ask_group(at_step=123)
    assert action.at_step == 123
    (command,) = ranks.dispatcher.commands(ranks.first)
    assert command.at_step == 123


@pytest.mark.parametrize(
    ("changes", "group", "message"),
    [
        ({}, {"at_step": 50}, r"pid 1 \(rank 0\).*\b50\b.*\b50\b"),
        ({}, {"at_step": 10_000}, r"\b10000\b.*\b995\.2 s.*\b30 s"),
        ({"modes": ("now",)}, {"at_step": 123}, r"pid 2 \(rank 1\).*\bnow\b"),
        ({"step": None}, {"at_step": 123}, r"pid 2 \(rank 1\).*\bsteps"),
    ],
)
def test_a_requested_step_is_refused_if_a_rank_cannot_act_after_it(
    ranks: Ranks, changes: dict[str, Any], group: dict[str, Any], message: str
) -> None:
    ranks.rank(2, "1", **{"step": 48, **changes})
    with pytest.raises(GroupIncompleteError, match=message):
        ranks.ask_group(**group)
    assert ranks.dispatcher.recent() == ()
