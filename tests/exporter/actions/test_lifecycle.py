from __future__ import annotations

from typing import Any

import pytest

from gpumem_exporter.actions.caller import Caller
from gpumem_exporter.actions.lifecycle import (
    ActionState,
    IllegalTransitionError,
    PartState,
    RunningAction,
    advanced,
)
from gpumem_exporter.actions.model import Action, ActionResult
from gpumem_exporter.actions.request import ActionRequest, Target


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
