"""Actions on all ranks of a workload at the same step, and commands that a rank keeps."""

from __future__ import annotations

from typing import Any

import pytest

from gpumem_client.wire.reason_codes import ReasonCode
from gpumem_exporter.actions.dispatcher import GROUP_ANSWER_SECONDS
from gpumem_exporter.actions.group import GROUP_LEAD_SECONDS
from gpumem_exporter.errors import GroupIncompleteError
from tests.support.dispatching import EVERYBODY, Ranks


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


def test_a_group_step_is_two_steps_ahead_and_before_the_deadline(ranks: Ranks) -> None:
    ranks.rank(1, "0", 50, step_seconds=10.0)
    with pytest.raises(GroupIncompleteError, match=r"\b98\b.*\b480\.0 s.*\b30 s"):
        ranks.ask_group()  # rank 1 makes fifty steps within the lead, for which rank 0 takes minutes
    ranks.rank(2, "1", 48, step_seconds=10.0)
    with pytest.raises(GroupIncompleteError, match=r"\b52\b.*\b40\.0 s"):
        ranks.ask_group()
    assert ranks.ask_group(deadline_seconds=60).at_step == 52
    with pytest.raises(GroupIncompleteError, match=r"\b52\b.*\b40\.0 s.*\b5 s"):
        ranks.ask_group(deadline_seconds=5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"modes": ("now",)}, r"pid 2 \(rank 1\).*\bnow\b"),
        ({"actions": ("reset_peak",)}, r"pid 2 \(rank 1\).*\breset_peak\b"),
        ({"step": None}, r"pid 2 \(rank 1\).*\bsteps"),
        ({"step_seconds": None}, r"pid 2 \(rank 1\).*\bsteps"),
        ({"workload": "another"}, r"\banother, train\b"),
    ],
)
def test_a_group_with_a_rank_that_cannot_take_part_does_not_start(
    ranks: Ranks, changes: dict[str, Any], message: str
) -> None:
    ranks.rank(2, "1", **{"step": 48, **changes})
    with pytest.raises(GroupIncompleteError, match=message):
        ranks.ask_group(target=EVERYBODY)
    assert ranks.dispatcher.recent() == ()


async def test_a_command_that_a_process_keeps_is_not_sent_again(ranks: Ranks) -> None:
    action = ranks.ask(mode="step")
    assert len(ranks.dispatcher.commands(ranks.first)) == 1
    reported = ranks.says(ranks.first, action.id)
    assert ranks.dispatcher.commands(reported) == ()
    assert ranks.dispatcher.cancelled(reported) == ()


async def test_a_group_is_withdrawn_if_a_rank_does_not_answer_and_the_result_names_it(ranks: Ranks) -> None:
    action = ranks.ask_group()
    ranks.dispatcher.commands(ranks.first)
    held = ranks.says(ranks.first, action.id)
    ranks.woken.clear()
    ranks.now += GROUP_ANSWER_SECONDS
    ranks.dispatcher.expire()
    assert ranks.woken == [ranks.first.key]
    assert ranks.dispatcher.cancelled(held) == (action.id,)
    ranks.answer(held, action, "refused")
    (finished,) = ranks.finished
    assert {row.rank: row.outcome for row in finished.results} == {"0": "refused", "1": "expired"}
    (silent,) = (row for row in finished.results if row.rank == "1")
    assert silent.reason_code == ReasonCode.GROUP_RANK_LATE


async def test_a_group_is_withdrawn_if_a_rank_exits_or_refuses(ranks: Ranks) -> None:
    for end in ("gone", "refused"):
        action = ranks.ask_group()
        for process in (ranks.first, ranks.second):
            ranks.dispatcher.commands(process)
            ranks.says(process, action.id)
        if end == "gone":
            ranks.dispatcher.process_gone(ranks.second.key, "it has ended")
        else:
            ranks.answer(ranks.second, action, "refused")
        assert ranks.dispatcher.cancelled(ranks.says(ranks.first, action.id)) == (action.id,)
        ranks.answer(ranks.first, action, "refused")
        assert ranks.finished[-1].id == action.id


def test_a_command_of_an_exporter_that_has_been_restarted_is_cancelled(ranks: Ranks) -> None:
    assert ranks.dispatcher.cancelled(ranks.says(ranks.first, "before")) == ("before",)


async def test_each_late_rank_of_a_group_has_one_result(ranks: Ranks) -> None:
    third = ranks.rank(3, "2", 48)
    action = ranks.ask_group()
    ranks.dispatcher.commands(third)
    held = ranks.says(third, action.id)
    ranks.now += GROUP_ANSWER_SECONDS
    ranks.dispatcher.expire()
    ranks.answer(held, action, "refused")
    (finished,) = ranks.finished
    assert sorted(row.rank for row in finished.results) == ["0", "1", "2"]
