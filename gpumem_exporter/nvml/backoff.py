"""Exponential backoff with jitter for retries."""

from __future__ import annotations

import random
from collections.abc import Callable

__all__ = ["Backoff"]


class Backoff:
    """Decides when a failed operation may be retried. It does not wait by itself. Not thread-safe.

    Args:
        first_seconds: the delay after the first failure; each further failure doubles it.
        cap_seconds: the longest delay.
        jitter: returns 0 to 1; a delay is shortened by up to half of itself.
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
        """Return whether an attempt may be made: there was no failure, or the delay has passed."""
        return self._not_before_seconds is None or now_seconds >= self._not_before_seconds

    def failed(self, now_seconds: float) -> None:
        """Record a failure, which starts the next delay."""
        delay_seconds = min(self._cap_seconds, self._first_seconds * 2.0 ** min(self._failures, 30))
        self._failures += 1
        self._not_before_seconds = now_seconds + delay_seconds * (1 - self._jitter() / 2)

    def succeeded(self) -> None:
        """Record a success: the next failure starts with the first delay again."""
        self._failures = 0
        self._not_before_seconds = None
