"""Failures that repeat: when to try again, and what to log."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable

_QUIET_SECONDS = 60.0


class Backoff:
    """Decides when a failed operation may be tried again. It does not wait by itself. Not thread-safe.

    The delay after the first failure is `first_seconds`; each further failure doubles it, up to `cap_seconds`. A delay
    is shortened by up to half of itself: `jitter` returns 0 to 1.
    """

    def __init__(
        self, first_seconds: float, cap_seconds: float, *, jitter: Callable[[], float] = random.random
    ) -> None:
        self._first_seconds = first_seconds
        self._cap_seconds = cap_seconds
        self._jitter = jitter
        self._failures = 0
        self._not_before_seconds = -float("inf")

    def due(self, now_seconds: float) -> bool:
        """Return whether an attempt may be made: there was no failure, or the delay has passed."""
        return now_seconds >= self._not_before_seconds

    def failed(self, now_seconds: float) -> None:
        """Record a failure, which starts the next delay."""
        delay_seconds = min(self._cap_seconds, self._first_seconds * 2.0 ** min(self._failures, 30))
        self._failures += 1
        self._not_before_seconds = now_seconds + delay_seconds * (1 - self._jitter() / 2)

    def succeeded(self) -> None:
        """Record a success: the next failure starts with the first delay again."""
        self._failures = 0
        self._not_before_seconds = -float("inf")


class FailureLog:
    """Logs a failure of a subject once when it starts and once when it ends. Each subject belongs to one thread."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float]) -> None:
        self._logger = logger
        self._clock = clock
        # The text of each failure by subject, and whether it was logged.
        self._ongoing: dict[str, tuple[str, bool]] = {}
        self._logged_seconds: dict[str, float] = {}

    def failed(self, subject: str, text: str, *, exc_info: bool = False) -> None:
        """Record a failure of the subject; logs it if it is new."""
        if self._ongoing.get(subject) == (text, True):
            return
        now = self._clock()
        # A failure that comes and goes is logged at most once a minute; one that stays, after that minute.
        logged = now - self._logged_seconds.get(subject, float("-inf")) >= _QUIET_SECONDS
        if logged:
            self._logged_seconds[subject] = now
            self._logger.warning("%s: %s", subject, text, exc_info=exc_info)
        self._ongoing[subject] = (text, logged)

    def recovered(self, subject: str) -> None:
        """Record that the subject works; logs it if a failure was logged before."""
        ongoing = self._ongoing.pop(subject, None)
        if ongoing is not None and ongoing[1]:
            self._logger.info("%s: recovered", subject)

    def retain(self, subjects: set[str]) -> None:
        """Forget all subjects except these; the others were removed."""
        for subject in self._ongoing.keys() - subjects:
            del self._ongoing[subject]
        # Within the minute the time stays: a device that disappears and returns must not flood the log.
        now = self._clock()
        for subject, logged in list(self._logged_seconds.items()):
            if subject not in subjects and now - logged >= _QUIET_SECONDS:
                del self._logged_seconds[subject]
