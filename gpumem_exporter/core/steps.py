"""After which step several ranks can act together, and how long that takes. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Pace", "seconds_to_end", "step_ahead"]

_LEAD_STEPS = 2
"""However long a step takes, this many lie between what a rank has said and where it acts."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How far a rank has come, and how fast it goes."""

    step: int
    """Steps that it has ended, as it said last."""
    step_seconds: float
    """How long a step takes it; over 0."""
    since_seconds: float
    """How long ago it said so."""


def step_ahead(paces: Iterable[Pace], lead_seconds: float) -> int:
    """The first step that no rank, going on as it does, ends within `lead_seconds` from now.

    Raises:
        ValueError: there is no rank.
    """
    return max(
        pace.step + max(math.ceil((pace.since_seconds + lead_seconds) / pace.step_seconds), _LEAD_STEPS)
        for pace in paces
    )


def seconds_to_end(paces: Iterable[Pace], step: int) -> float:
    """In how many seconds the last rank, going on as it does, ends this step.

    Raises:
        ValueError: there is no rank.
    """
    return max((step - pace.step) * pace.step_seconds - pace.since_seconds for pace in paces)
