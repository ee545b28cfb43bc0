from __future__ import annotations

from typing import Any

import pytest

from gpumem_exporter.actions.lifecycle import (
    ActionState,
    IllegalTransitionError,
    PartState,
    advanced,
)


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
