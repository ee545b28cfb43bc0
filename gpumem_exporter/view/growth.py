"""Whether the memory of a job grows: from the smallest allocated bytes of each step of its history. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

SPAN_SECONDS = 3600.0
"""The time of which the minima count."""
MIN_SECONDS = 300.0
"""A shorter rise is a start: a model loads, and its optimizer creates its state."""
_MIN_BYTES = 64 << 20
# A rise of a smaller share of the allocated bytes is noise: batches of different sizes, caches of libraries.
_MIN_SHARE = 0.02
_PARTS = 3
# The share of the whole rise that each part of the time must add. After a start the last part adds nothing.
_MIN_STEADINESS = 0.25


class Growth(NamedTuple):
    """A rise of the allocated memory that lasts."""

    bytes_per_hour: int
    since_seconds: float
    """The start of the rise."""


def growth(minima: Sequence[tuple[float, int]]) -> Growth | None:
    """Return the growth of a job; None if it does not grow, or is not known for long enough.

    `minima` are times in seconds and the smallest allocated bytes until then since the time before: memory that is free
    at any time has not leaked.
    """
    if not minima:
        return None
    # The time before the last minimum of all does not count, so a job that was restarted counts from its restart.
    lowest = min(value for _, value in minima)
    start = max(index for index, (_, value) in enumerate(minima) if value == lowest)
    rising = minima[start:]
    seconds = rising[-1][0] - rising[0][0]
    size = len(rising) // _PARTS
    if seconds < MIN_SECONDS or size < 2:
        return None
    first, middle, last = (min(value for _, value in rising[part * size : (part + 1) * size]) for part in range(_PARTS))
    rise = last - first
    if rise < max(_MIN_BYTES, _MIN_SHARE * first) or min(middle - first, last - middle) < _MIN_STEADINESS * rise:
        return None
    return Growth(round(rise / (seconds * (_PARTS - 1) / _PARTS) * 3600), rising[0][0])
