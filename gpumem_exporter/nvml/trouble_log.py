"""One log line when a trouble begins and one when it is over, however often it is met in between."""

from __future__ import annotations

import logging
from collections.abc import Callable

__all__ = ["TroubleLog"]


class TroubleLog:
    """Knows which troubles last. One thread uses it.

    Args:
        logger: where the lines go.
        clock: monotonic seconds.
        quiet_seconds: a trouble that comes and goes is told at most once in this time.
    """

    def __init__(self, logger: logging.Logger, clock: Callable[[], float], *, quiet_seconds: float = 60.0) -> None:
        self._logger = logger
        self._clock = clock
        self._quiet_seconds = quiet_seconds
        self._lasting: dict[str, tuple[str, bool]] = {}
        self._told_seconds: dict[str, float] = {}

    def begin(self, subject: str, text: str, *, exc_info: bool = False) -> None:
        """The subject is in trouble; told if this trouble is new."""
        lasting = self._lasting.get(subject)
        if lasting is not None and lasting[0] == text:
            return
        now = self._clock()
        told = now - self._told_seconds.get(subject, float("-inf")) >= self._quiet_seconds
        if told:
            self._told_seconds[subject] = now
            self._logger.warning("%s: %s", subject, text, exc_info=exc_info)
        self._lasting[subject] = (text, told)

    def end(self, subject: str) -> None:
        """The subject is in no trouble (any more); told if the trouble was."""
        lasting = self._lasting.pop(subject, None)
        if lasting is not None and lasting[1]:
            self._logger.info("%s: in order again", subject)

    def retain(self, subjects: set[str]) -> None:
        """Forget every subject that is not among these: it is gone, in whatever state."""
        for subject in self._lasting.keys() - subjects:
            del self._lasting[subject]
        now = self._clock()
        for subject, told in list(self._told_seconds.items()):
            if subject not in subjects and now - told >= self._quiet_seconds:
                del self._told_seconds[subject]
