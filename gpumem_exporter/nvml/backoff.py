"""When to try again what failed: soon at first, then ever more rarely, never at the same moments as everybody else."""

from __future__ import annotations

import random
from collections.abc import Callable

__all__ = ["Backoff"]


class Backoff:
    """Exponential backoff with jitter. Does no waiting itself; one thread uses it.

    Args:
        first_seconds: the delay after the first failure; each further one doubles it.
        cap_seconds: the longest delay.
        jitter: answers with 0 to 1; a delay is cut by up to half of itself.
    """

    def __init__(
        self, first_seconds: float, cap_seconds: float, *, jitter: Callable[[], float] = random.random
    ) -> None:
        self._first_seconds = first_seconds
        self._cap_seconds = cap_seconds
        self._jitter = jitter
        self._failures = 0
        self._not_before_seconds: float | None = None

    def due(self, now_seconds: float) -> bool:
        """Nothing failed yet, or the delay has passed."""
        return self._not_before_seconds is None or now_seconds >= self._not_before_seconds

    def failed(self, now_seconds: float) -> None:
        """It failed (again): hold off."""
        delay_seconds = min(self._cap_seconds, self._first_seconds * 2.0 ** min(self._failures, 30))
        self._failures += 1
        self._not_before_seconds = now_seconds + delay_seconds * (1 - self._jitter() / 2)

    def succeeded(self) -> None:
        """Start over with the first delay at the next failure."""
        self._failures = 0
        self._not_before_seconds = None
