"""Reads the source in a thread, so that a slow answer never delays a key."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from gpumem_exporter.cli.top.source import Reading, Source
from gpumem_exporter.errors import GpumemError

__all__ = ["Known", "Watcher"]

_LATE_SECONDS = 4.0
"""How much later than expected an answer may be before what was known counts as lost."""


@dataclass(frozen=True, slots=True)
class Known:
    """The last answer, and whether it is still valid."""

    reading: Reading
    answered_seconds: float
    """Monotonic, when it came."""
    failure: str = ""
    """Why the attempt after it failed; empty where none did."""

    def lost(self, now: float, interval_seconds: float) -> str:
        """Why the reading is no longer valid; empty while it is."""
        age = now - self.answered_seconds
        if not self.failure and age > interval_seconds + _LATE_SECONDS:
            return f"it has not answered for {age:.0f} s"
        return self.failure


class Watcher:
    """A thread that keeps `known` up to date.

    Args:
        source: what is read; only this thread uses it from now on.
        first: what has been read already.
        interval_seconds: from the start of one reading to that of the next.
        notify: called by the thread after each attempt.
    """

    def __init__(self, source: Source, first: Reading, *, interval_seconds: float, notify: Callable[[], None]) -> None:
        self._source = source
        self._interval_seconds = interval_seconds
        self._notify = notify
        self._known = Known(first, time.monotonic())
        self._broken: Exception | None = None
        self._stop = threading.Event()
        # A driver that hangs must not keep the program from its end.
        self._thread = threading.Thread(target=self._run, name="gpumem-top", daemon=True)

    @property
    def known(self) -> Known:
        """What is known now. Any thread may ask.

        Raises:
            Exception: an unexpected error ended the thread.
        """
        if self._broken is not None:
            raise self._broken
        return self._known

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout_seconds: float = 0.5) -> None:
        """Stop the thread; a reading that hangs is abandoned."""
        self._stop.set()
        self._thread.join(timeout_seconds)

    def _run(self) -> None:
        try:
            due = time.monotonic() + self._interval_seconds
            while not self._stop.wait(max(0.0, due - time.monotonic())):
                due = max(due + self._interval_seconds, time.monotonic())
                self._read()
                self._notify()
        except Exception as error:  # noqa: BLE001 - the next caller of `known` raises it
            self._broken = error
            self._notify()
        finally:
            self._source.close()

    def _read(self) -> None:
        try:
            self._known = Known(self._source.read(), time.monotonic())
        except GpumemError as error:
            self._known = replace(self._known, failure=str(error))
