from __future__ import annotations

import itertools
from collections.abc import Callable
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
    TerminationPart,
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
    PartState.BLOCKED: {PartState.WAITING, PartState.TERMINATING, PartState.ENDED},
    PartState.WAITING: {PartState.DELIVERED, PartState.KEPT, PartState.ENDED},
    PartState.DELIVERED: {PartState.KEPT, PartState.RECALLED, PartState.ENDED},
    PartState.KEPT: {PartState.RECALLED_KEPT, PartState.ENDED},
    PartState.RECALLED: {PartState.RECALLED_KEPT, PartState.ENDED},
    PartState.RECALLED_KEPT: {PartState.ENDED},
    PartState.TERMINATING: {PartState.ENDED},
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


def command_part(state: PartState = PartState.WAITING) -> CommandPart:
    return CommandPart(COMMAND, SelectedProcess(1, reporting(1), ()), deadline_seconds=30.0, state=state)


def recalled(part: CommandPart) -> None:
    part.recall(CommandResult("a", "refused"))


def test_a_command_may_be_delivered_and_kept_twice() -> None:
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


@pytest.mark.parametrize("step", [CommandPart.deliver, CommandPart.keep, recalled, CommandPart.end])
def test_an_ended_part_has_no_further_transition(step: Callable[[CommandPart], None]) -> None:
    part = command_part()
    part.end()
    with pytest.raises(IllegalTransitionError):
        step(part)


def test_a_command_that_was_not_delivered_cannot_be_recalled() -> None:
    with pytest.raises(IllegalTransitionError):
        recalled(command_part())


def test_a_blocked_command_waits_after_its_engine_has_started() -> None:
    part = command_part(PartState.BLOCKED)
    assert not part.on_the_way
    for step in (part.deliver, part.keep, partial(recalled, part)):
        with pytest.raises(IllegalTransitionError):
            step()
    part.unblock(COMMAND)
    assert part.state is PartState.WAITING
    with pytest.raises(IllegalTransitionError):
        part.unblock(COMMAND)


def test_a_termination_ends_once() -> None:
    part = TerminationPart("a", target=None, deadline_seconds=30.0, state=PartState.BLOCKED)  # type: ignore[arg-type]
    part.unblock()
    assert part.state is PartState.TERMINATING
    part.end()
    with pytest.raises(IllegalTransitionError):
        part.end()


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
