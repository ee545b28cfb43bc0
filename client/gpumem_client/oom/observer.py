"""Records the out-of-memory errors of this process until a report has delivered them.

PyTorch calls an observer in the allocating thread (for example an autograd thread) right before it raises, with the GIL
and without the allocator's lock. An error of the observer would replace the user's OutOfMemoryError, and PyTorch
cannot remove an observer. So one is attached per process; it suppresses its errors and does little work. With
cudaMallocAsync or a pluggable allocator PyTorch calls no observer, so errors are unknown.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from gpumem_client.wire.protocol import OutOfMemory

__all__ = ["OutOfMemoryLog"]

_KEPT = 32
"""The number of errors that are kept until the next report. A search for a batch size causes many."""
_WAKE_SECONDS = 0.5
"""Errors in quick succession wake the reporter once."""


class OutOfMemoryLog:
    """The errors that no report has delivered yet. Any thread may call `note`, only the reporter's thread the rest.

    Args:
        wake: called when an error should be reported at once, because it may end the process.
        clock: monotonic seconds.
    """

    def __init__(self, wake: Callable[[], None], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._wake = wake
        self._clock = clock
        # Reentrant: a finalizer may allocate and fail while its thread has the lock.
        self._lock = threading.RLock()
        self._noted: deque[tuple[float, OutOfMemory]] = deque(maxlen=_KEPT)
        self._number = 0
        self._woken_seconds = float("-inf")
        self.latest: tuple[float, OutOfMemory] | None = None
        """Time and value of the last error, also after it was reported."""

    def note(self, oom: OutOfMemory) -> None:
        """Record an error in the thread in which it happened, and number it."""
        now = self._clock()
        with self._lock:
            self._number += 1
            self._noted.append((now, replace(oom, number=self._number)))
            self.latest = now, oom
            wake = now - self._woken_seconds >= _WAKE_SECONDS
            if wake:
                self._woken_seconds = now
        if wake:
            self._wake()

    def waiting(self) -> tuple[OutOfMemory, ...]:
        """Return the errors for the report that is sent now."""
        now = self._clock()
        with self._lock:
            return tuple(replace(oom, age_seconds=max(0.0, now - seconds)) for seconds, oom in self._noted)

    def reported(self, ooms: Sequence[OutOfMemory]) -> None:
        """Remove the errors of a report that was answered."""
        numbers = {oom.number for oom in ooms}
        if numbers:
            with self._lock:
                self._noted = deque((each for each in self._noted if each[1].number not in numbers), maxlen=_KEPT)
