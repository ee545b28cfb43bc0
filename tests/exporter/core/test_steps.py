from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumem_exporter.actions.group import StepRate, first_common_step, seconds_until_step_ends

RATES = st.lists(
    st.builds(StepRate, st.integers(0, 10**9), st.floats(1e-4, 1e3), st.floats(0.0, 60.0)), min_size=1, max_size=8
)


@given(RATES, st.floats(0.0, 60.0))
def test_no_rank_completes_the_step_within_the_lead_at_its_current_rate(rates: list[StepRate], lead: float) -> None:
    step = first_common_step(rates, lead)
    for rate in rates:
        ends = (step - rate.step) * rate.step_seconds - rate.since_seconds
        assert ends >= lead - 1e-6
        assert step >= rate.step + 2


@given(RATES, st.floats(0.0, 60.0))
def test_the_step_is_the_first_one_after_the_lead(rates: list[StepRate], lead: float) -> None:
    step = first_common_step(rates, lead) - 1
    soon = [
        rate
        for rate in rates
        if step < rate.step + 2 or (step - rate.step) * rate.step_seconds - rate.since_seconds < lead + 1e-6
    ]
    assert soon


def test_the_slowest_rank_determines_when_the_step_ends() -> None:
    rates = (StepRate(50, 0.1, 1.0), StepRate(48, 0.5, 0.25))
    assert first_common_step(rates, 4.0) == 100
    assert seconds_until_step_ends(rates, 100) == pytest.approx(52 * 0.5 - 0.25)
