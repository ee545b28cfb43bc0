"""Out-of-memory errors of this process, noted where they happen and kept until they have been reported.

PyTorch calls an observer in the allocating thread (an autograd thread, for instance) with the allocator's lock released
and the GIL held, right before it raises. What the observer raises would replace the program's OutOfMemoryError, and it
cannot be taken off again: so it is attached once in a process, swallows what goes wrong in it, and does little work.
Where a PyTorch has no observer, the growth of its own count is told instead. With cudaMallocAsync or a pluggable
allocator it neither calls nor counts, and nothing can be told.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from gpumem_exporter.wire.protocol import DeviceSample, OutOfMemory

__all__ = ["OutOfMemoryLog"]

_KEPT = 32
"""Errors kept until the next report. A program that tries batch sizes makes many: of those the last are told."""
_WAKE_SECONDS = 0.5
"""Errors in quick succession hasten one report."""


class OutOfMemoryLog:
    """The errors that no report has carried yet. `note` may be called by any thread, the rest by the reporter's.

    Args:
        wake: called, rarely, when there is something that should be reported at once: the process may end of it.
        clock: monotonic seconds.
    """

    def __init__(self, wake: Callable[[], None], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._wake = wake
        self._clock = clock
        # Reentrant: a finalizer that runs inside may allocate, fail, and come back here.
        self._lock = threading.RLock()
        self._noted: deque[tuple[float, OutOfMemory]] = deque(maxlen=_KEPT)
        self._number = 0
        self._counted: dict[str, int] = {}
        self._woken_seconds = float("-inf")
        self.latest: tuple[float, OutOfMemory] | None = None
        """The last one, and when it was; also once it has been reported."""

    def note(self, oom: OutOfMemory) -> None:
        """Take one down, in the thread that it happened in; its number is given here."""
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

    def compare(self, devices: Sequence[DeviceSample], step: int | None) -> None:
        """Note what PyTorch has counted since the last time, where nobody observes it."""
        for sample in devices:
            if sample.ooms is None:
                continue
            # At the first sample, and after the program reset its counters, there is nothing to compare with.
            before = self._counted.get(sample.uuid, sample.ooms)
            self._counted[sample.uuid] = sample.ooms
            for _ in range(min(sample.ooms - before, _KEPT)):
                self.note(OutOfMemory(sample.uuid, 0, step=step, sample=sample))

    def waiting(self) -> tuple[OutOfMemory, ...]:
        """What a report that is sent now should carry."""
        now = self._clock()
        with self._lock:
            return tuple(replace(oom, age_seconds=max(0.0, now - seconds)) for seconds, oom in self._noted)

    def reported(self, ooms: Sequence[OutOfMemory]) -> None:
        """A report that carried these has been answered."""
        numbers = {oom.number for oom in ooms}
        if numbers:
            with self._lock:
                self._noted = deque((each for each in self._noted if each[1].number not in numbers), maxlen=_KEPT)
