from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest

from gpumem_client.wire.protocol import Command, CommandResult
from gpumem_exporter.actions.caller import Caller
from gpumem_exporter.actions.lifecycle import (
    ActionState,
    CommandPart,
    IllegalTransitionError,
    PartState,
    RunningAction,
    advanced,
)
from gpumem_exporter.actions.model import Action, ActionResult
from gpumem_exporter.actions.request import ActionRequest, Target
from gpumem_exporter.actions.selection import SelectedProcess
from tests.support.builders import reporting

LEGAL: dict[Any, set[Any]] = {
    ActionState.QUEUED: {
        ActionState.RUNNING,
        ActionState.DONE,
        ActionState.FAILED,
        ActionState.EXPIRED,
        ActionState.CANCELLED,
    },
    ActionState.RUNNING: {ActionState.DONE, ActionState.FAILED, ActionState.EXPIRED, ActionState.CANCELLED},
    PartState.BLOCKED: {PartState.WAITING, PartState.ACTING, PartState.ENDED},
    PartState.WAITING: {PartState.DELIVERED, PartState.KEPT, PartState.ENDED},
    PartState.DELIVERED: {PartState.KEPT, PartState.RECALLED, PartState.ENDED},
    PartState.KEPT: {PartState.RECALLED_KEPT, PartState.ENDED},
    PartState.RECALLED: {PartState.RECALLED_KEPT, PartState.ENDED},
    PartState.RECALLED_KEPT: {PartState.ENDED},
    PartState.ACTING: {PartState.ENDED},
}


def test_a_state_is_followed_only_by_the_states_of_the_table() -> None:
    pairs: list[tuple[Any, Any]] = [
        *itertools.product(ActionState, ActionState),
        *itertools.product(PartState, PartState),
    ]
    for state, to in pairs:
        if to in LEGAL.get(state, set()):
            assert advanced(state, to) is to
        else:
            with pytest.raises(IllegalTransitionError, match=f"{to.name}.*{state.name}"):
                advanced(state, to)


COMMAND = Command(id="a", action="empty_cache", deadline_seconds=30.0)


def command_part() -> CommandPart:
    return CommandPart(COMMAND, SelectedProcess(1, reporting(1), ()), deadline_seconds=30.0)


def recalled(part: CommandPart) -> None:
    part.recall(CommandResult("a", "refused"))


def test_a_command_may_be_delivered_and_kept_twice_and_each_new_state_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("DEBUG")
    part = command_part()
    recall = partial(recalled, part)
    for step, state in (
        (part.deliver, PartState.DELIVERED),
        (part.deliver, PartState.DELIVERED),
        (part.keep, PartState.KEPT),
        (part.keep, PartState.KEPT),
        (recall, PartState.RECALLED_KEPT),
        (part.keep, PartState.RECALLED_KEPT),
        (part.end, PartState.ENDED),
    ):
        step()
        assert part.state is state
    assert [record.args[1] for record in caplog.records] == ["delivered", "kept", "recalled and kept", "ended"]  # type: ignore[index]


@pytest.mark.parametrize(
    ("outcomes", "state"),
    [
        ([], "done"),
        (["done", "done"], "done"),
        (["done", "expired"], "expired"),
        (["expired", "refused"], "failed"),
        (["gone"], "failed"),
    ],
)
def test_an_action_ends_in_the_state_of_its_results(outcomes: list[str], state: str) -> None:
    everybody = Target(all=True)
    running = RunningAction(
        Action("a", "empty_cache", "queued", "test", 0.0, everybody),
        started_seconds=10.0,
        request=ActionRequest("empty_cache", everybody),
        caller=Caller.policy("test"),
        share="test",
    )
    running.start()
    running.add(ActionResult(1, "", "", "0", "GPU-0", outcome) for outcome in outcomes)
    action = running.finish(12.5)
    assert (action.state, action.duration_seconds, action.finished) == (state, 2.5, True)
    with pytest.raises(IllegalTransitionError):
        running.finish(13.0)
