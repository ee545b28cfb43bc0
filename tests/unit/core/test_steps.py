from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumem_exporter.core.steps import Pace, seconds_to_end, step_ahead

PACES = st.lists(
    st.builds(Pace, st.integers(0, 10**9), st.floats(1e-4, 1e3), st.floats(0.0, 60.0)), min_size=1, max_size=8
)


@given(PACES, st.floats(0.0, 60.0))
def test_no_rank_that_goes_on_as_it_does_ends_the_step_within_the_lead(paces: list[Pace], lead: float) -> None:
    step = step_ahead(paces, lead)
    for pace in paces:
        ends = (step - pace.step) * pace.step_seconds - pace.since_seconds
        assert ends >= lead - 1e-6
        assert step >= pace.step + 2


@given(PACES, st.floats(0.0, 60.0))
def test_the_step_is_the_first_such_one(paces: list[Pace], lead: float) -> None:
    step = step_ahead(paces, lead) - 1
    soon = [
        pace
        for pace in paces
        if step < pace.step + 2 or (step - pace.step) * pace.step_seconds - pace.since_seconds < lead + 1e-6
    ]
    assert soon


def test_the_slowest_rank_says_when_the_step_has_ended_everywhere() -> None:
    paces = (Pace(50, 0.1, 1.0), Pace(48, 0.5, 0.25))
    assert step_ahead(paces, 4.0) == 100
    assert seconds_to_end(paces, 100) == pytest.approx(52 * 0.5 - 0.25)


def test_nobody_has_no_step() -> None:
    with pytest.raises(ValueError, match="empty"):
        step_ahead((), 4.0)
