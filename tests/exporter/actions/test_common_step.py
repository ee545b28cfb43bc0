from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpumem_exporter.actions.timing import StepRate, first_common_step, seconds_until_step_ends

RATES = st.lists(
    st.builds(StepRate, st.integers(0, 10**9), st.floats(1e-4, 1e3), st.floats(0.0, 60.0)), min_size=1, max_size=8
)


@given(RATES, st.floats(0.0, 60.0))
@settings(max_examples=30)
def test_the_step_of_a_group_is_the_first_that_no_rank_completes_within_the_lead(
    rates: list[StepRate], lead: float
) -> None:
    def is_late_enough(step: int, margin: float) -> bool:
        ends = [(step - rate.step) * rate.step_seconds - rate.since_seconds for rate in rates]
        return min(ends) >= lead + margin and step >= max(rate.step for rate in rates) + 2

    step = first_common_step(rates, lead)
    assert is_late_enough(step, -1e-6)
    assert not is_late_enough(step - 1, 1e-6)


def test_the_slowest_rank_determines_when_the_step_ends() -> None:
    rates = (StepRate(50, 0.1, 1.0), StepRate(48, 0.5, 0.25))
    assert seconds_until_step_ends(rates, 100) == pytest.approx(52 * 0.5 - 0.25)
