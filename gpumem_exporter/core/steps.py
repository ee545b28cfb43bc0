"""The step at which several ranks can act together, and the time until that step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

_LEAD_STEPS = 2
"""The minimum number of steps between the last report of a rank and the step at which it acts."""


@dataclass(frozen=True, slots=True)
class StepRate:
    """The progress of a rank and the duration of its steps."""

    step: int
    """The number of completed steps in the last report."""
    step_seconds: float
    """The duration of a step; greater than 0."""
    since_seconds: float
    """The age of the last report."""


def first_common_step(rates: Iterable[StepRate], lead_seconds: float) -> int:
    """Return the first step that no rank completes within `lead_seconds` at its current rate."""
    return max(
        rate.step + max(math.ceil((rate.since_seconds + lead_seconds) / rate.step_seconds), _LEAD_STEPS)
        for rate in rates
    )


def seconds_until_step_ends(rates: Iterable[StepRate], step: int) -> float:
    """Return the seconds until the slowest rank completes a step at its current rate."""
    return max((step - rate.step) * rate.step_seconds - rate.since_seconds for rate in rates)
