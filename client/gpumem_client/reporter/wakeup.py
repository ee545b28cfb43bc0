"""Wakes and stops the reporter's thread."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["Wakeup"]


class Wakeup:
    """Ends the waits of the reporter's thread between two reports. Any thread may call any method.

    Attributes:
        interrupt: ends the wait for the exporter's reply; set while there is such a wait.
    """

    def __init__(self) -> None:
        self._stopping = threading.Event()
        self._woken = threading.Event()
        self.interrupt: Callable[[], None] = lambda: None

    @property
    def stopping(self) -> bool:
        """Whether the thread should end."""
        return self._stopping.is_set()

    @property
    def woken(self) -> bool:
        """Whether to send a report now."""
        return self._woken.is_set()

    def wake(self) -> None:
        """Send the next report now. Does not wait."""
        self._woken.set()
        self.interrupt()

    def stop(self) -> None:
        """End the thread as soon as possible. Does not wait."""
        self._stopping.set()
        self.wake()

    def starts_round(self) -> bool:
        """Start a new round; False if the thread should end.

        Clears the event before it checks for a stop. Otherwise a stop could stay unnoticed for a round.
        """
        self._woken.clear()
        return not self._stopping.is_set()

    def wait(self, seconds: float) -> None:
        """Wait this long, or until the thread is woken."""
        self._woken.wait(max(0.0, seconds))
