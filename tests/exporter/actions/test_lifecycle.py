from __future__ import annotations

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
    )
    running.start()
    running.add(ActionResult(1, "", "", "0", "GPU-0", outcome) for outcome in outcomes)
    action = running.finish(12.5)
    assert (action.state, action.duration_seconds, action.finished) == (state, 2.5, True)
    with pytest.raises(IllegalTransitionError):
        running.finish(13.0)


@pytest.mark.parametrize(
    ("state", "to"),
    [
        (ActionState.QUEUED, ActionState.QUEUED),
        (ActionState.RUNNING, ActionState.QUEUED),
        *((end, ActionState.RUNNING) for end in ActionState if end.value not in ("queued", "running")),
        (PartState.BLOCKED, PartState.DELIVERED),
        (PartState.WAITING, PartState.RECALLED),
        (PartState.KEPT, PartState.DELIVERED),
        (PartState.RECALLED_KEPT, PartState.WAITING),
        (PartState.ACTING, PartState.RECALLED),
        *((PartState.ENDED, to) for to in PartState),
    ],
)
def test_a_state_that_cannot_follow_is_a_defect(state: Any, to: Any) -> None:
    with pytest.raises(IllegalTransitionError, match=f"{to.name}.*{state.name}"):
        advanced(state, to)
