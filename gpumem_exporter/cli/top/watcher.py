"""Reads values in a thread, so that a slow answer never delays a key."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from gpumem_client.wire.errors import GpumemError

__all__ = ["Known", "Watcher"]

T = TypeVar("T")

_LATE_SECONDS = 4.0
"""If an answer is later than this, the source counts as lost."""


@dataclass(frozen=True, slots=True)
class Known(Generic[T]):
    """The last answer, and whether it is still valid."""

    reading: T
    answered_seconds: float
    """The time of the answer, in monotonic seconds."""
    failure: str = ""
    """Why the next attempt failed; empty if it did not."""

    def lost(self, now: float, interval_seconds: float) -> str:
        """Return why the reading is no longer valid; empty while it is valid."""
        age = now - self.answered_seconds
        if not self.failure and age > interval_seconds + _LATE_SECONDS:
            return f"it has not answered for {age:.0f} s"
        return self.failure


class Watcher(Generic[T]):
    """A thread that keeps `known` up to date.

    Args:
        read: returns the values, or raises GpumemError. After `start`, only the thread calls it.
        first: the first values.
        interval_seconds: seconds between the starts of two readings.
        notify: called by the thread after each attempt.
    """

    def __init__(self, read: Callable[[], T], first: T, *, interval_seconds: float, notify: Callable[[], None]) -> None:
        self._read = read
        self._interval_seconds = interval_seconds
        self._notify = notify
        self._known = Known(first, time.monotonic())
        self._broken: Exception | None = None
        self._stop = threading.Event()
        # A daemon thread, so that a driver that hangs does not block the exit.
        self._thread = threading.Thread(target=self._run, name="gpumem-top", daemon=True)

    @property
    def known(self) -> Known[T]:
        """The last answer. Thread-safe.

        Raises:
            Exception: an unexpected error ended the thread.
        """
        if self._broken is not None:
            raise self._broken
        return self._known

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout_seconds: float = 0.5) -> bool:
        """Stop the thread. Returns False if a reading hangs; it is abandoned then."""
        self._stop.set()
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        due = time.monotonic() + self._interval_seconds
        while self._broken is None and not self._stop.wait(max(0.0, due - time.monotonic())):
            due = max(due + self._interval_seconds, time.monotonic())
            try:
                self._known = Known(self._read(), time.monotonic())
            except GpumemError as error:
                self._known = replace(self._known, failure=str(error))
            except Exception as error:  # noqa: BLE001 - the next caller of `known` raises it
                self._broken = error
            self._notify()
