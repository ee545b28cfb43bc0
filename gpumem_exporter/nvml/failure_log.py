"""Log a repeated failure once when it starts and once when it ends."""

from __future__ import annotations

import logging
from collections.abc import Callable

__all__ = ["FailureLog"]


class FailureLog:
    """Tracks ongoing failures by subject. Not thread-safe.

    Args:
        logger: receives the log lines.
        clock: monotonic seconds.
        quiet_seconds: the minimum time between two log lines about a failure that comes and goes.
    """

    def __init__(self, logger: logging.Logger, clock: Callable[[], float], *, quiet_seconds: float = 60.0) -> None:
        self._logger = logger
        self._clock = clock
        self._quiet_seconds = quiet_seconds
        self._ongoing: dict[str, tuple[str, bool]] = {}
        self._logged_seconds: dict[str, float] = {}

    def failed(self, subject: str, text: str, *, exc_info: bool = False) -> None:
        """Record a failure of the subject; logs it if it is new."""
        ongoing = self._ongoing.get(subject)
        if ongoing is not None and ongoing[0] == text:
            return
        now = self._clock()
        logged = now - self._logged_seconds.get(subject, float("-inf")) >= self._quiet_seconds
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
        now = self._clock()
        for subject, logged in list(self._logged_seconds.items()):
            if subject not in subjects and now - logged >= self._quiet_seconds:
                del self._logged_seconds[subject]
