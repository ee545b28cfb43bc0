from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

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
from gpumem_exporter.actions.request import Target
from gpumem_exporter.actions.targets import SelectedProcess
from gpumem_exporter.wire.protocol import Command
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
    PartState.WAITING: {PartState.DELIVERED, PartState.HELD, PartState.ENDED},
    PartState.DELIVERED: {PartState.HELD, PartState.RECALLED, PartState.ENDED},
    PartState.HELD: {PartState.RECALLED_HELD, PartState.ENDED},
    PartState.RECALLED: {PartState.RECALLED_HELD, PartState.ENDED},
    PartState.RECALLED_HELD: {PartState.ENDED},
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


def command_part() -> CommandPart:
    command = Command(id="a", action="empty_cache", deadline_seconds=30.0)
    return CommandPart(command, SelectedProcess(1, reporting(1), ()), deadline_seconds=30.0)


def test_a_command_may_be_delivered_and_held_twice() -> None:
    part = command_part()
    for step, state in (
        (part.deliver, PartState.DELIVERED),
        (part.deliver, PartState.DELIVERED),
        (part.hold, PartState.HELD),
        (part.hold, PartState.HELD),
        (part.recall, PartState.RECALLED_HELD),
        (part.hold, PartState.RECALLED_HELD),
        (part.end, PartState.ENDED),
    ):
        step()
        assert part.state is state


@pytest.mark.parametrize("step", [CommandPart.deliver, CommandPart.hold, CommandPart.recall, CommandPart.end])
def test_an_ended_part_has_no_further_transition(step: Callable[[CommandPart], None]) -> None:
    part = command_part()
    part.end()
    with pytest.raises(IllegalTransitionError):
        step(part)


def test_a_command_that_was_not_delivered_cannot_be_recalled() -> None:
    with pytest.raises(IllegalTransitionError):
        command_part().recall()


def test_a_termination_ends_once() -> None:
    part = TerminationPart(target=None)  # type: ignore[arg-type]
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
    running = RunningAction(Action("a", "empty_cache", "queued", "test", 0.0, Target(all=True)), started_seconds=10.0)
    running.start()
    running.add(ActionResult(1, "", "", "0", "GPU-0", outcome) for outcome in outcomes)
    action = running.finish(12.5)
    assert (action.state, action.duration_seconds, running.finished.is_set()) == (state, 2.5, True)
    with pytest.raises(IllegalTransitionError):
        running.finish(13.0)
