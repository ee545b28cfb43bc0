"""Out-of-memory errors: the hook that observes them, and the errors that wait for a report.

PyTorch calls an observer in the allocating thread (for example an autograd thread) right before it raises, with the GIL
and without the allocator's lock. With cudaMallocAsync or a pluggable allocator it calls none, so errors are unknown.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from gpumem_client import torch_access
from gpumem_client.guest_safety import guest_safety
from gpumem_client.wire.protocol import OutOfMemory

# The number of errors that are kept until the next report. A search for a batch size causes many.
_KEPT = 32
# Errors in quick succession wake the reporter once.
_WAKE_SECONDS = 0.5
_CHAIN_MAX = 8
_latest: tuple[float, OutOfMemory] | None = None

_OUT_OF_MEMORY = re.compile(
    r"(?:CUDA|HIP|CUBLAS|CUDNN|NCCL|GPU).*(?:out of memory|ALLOC_FAILED)", re.IGNORECASE | re.DOTALL
)


class OutOfMemoryObserver:
    """Passes each error to its listener, in the allocating thread, before PyTorch raises the error.

    PyTorch cannot remove an observer, so there is one per process, which does nothing without a listener.
    """

    def __init__(self) -> None:
        self._attached = False
        self.listener: Callable[[int, int, int, int], None] | None = None
        """Receives device index, requested bytes, limit and free bytes."""

    def install(self, torch: Any) -> None:
        """Attach this observer to PyTorch, once per process, if its allocator has observers."""
        self._attached = self._attached or torch_access.attach_oom_observer(torch, self)

    def remove(self, listener: Callable[[int, int, int, int], None] | None) -> None:
        """Stop calling this listener. The listener of a later reporter stays."""
        if self.listener is listener:
            self.listener = None

    @guest_safety()  # an error here would replace the user's OutOfMemoryError, and break the code that recovers from it
    def __call__(self, device: int, requested_bytes: int, limit_bytes: int, device_free_bytes: int) -> None:
        """Pass the numbers of an error to the listener, if there is one."""
        listener = self.listener
        if listener is not None:
            listener(device, requested_bytes, limit_bytes, device_free_bytes)


class OutOfMemoryLog:
    """The errors that no report has delivered yet. Any thread may call `note`, only the reporter's thread the rest.

    `wake` is called when an error should be reported at once, because it may end the process.
    """

    def __init__(self, wake: Callable[[], None], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._wake = wake
        self._clock = clock
        # Without a lock: each access is one operation, which is atomic. A finalizer may allocate and fail at any time.
        self._noted: deque[tuple[float, OutOfMemory]] = deque(maxlen=_KEPT)
        self._numbers = itertools.count(1)
        self._woken_seconds = float("-inf")

    def note(self, oom: OutOfMemory) -> OutOfMemory:
        """Record an error in the thread in which it happened, and return it with its number."""
        global _latest
        now, oom = self._clock(), replace(oom, number=next(self._numbers))
        self._noted.append((now, oom))
        _latest = now, oom
        if now - self._woken_seconds >= _WAKE_SECONDS:
            self._woken_seconds = now
            self._wake()
        return oom

    def waiting(self) -> tuple[OutOfMemory, ...]:
        """Return the errors for the report that is sent now."""
        now = self._clock()
        return tuple([replace(oom, age_seconds=max(0.0, now - seconds)) for seconds, oom in self._noted.copy()])

    def reported(self, ooms: Sequence[OutOfMemory]) -> None:
        """Remove the errors of a report that was answered."""
        numbers = {oom.number for oom in ooms}
        for each in self._noted.copy():
            if each[1].number in numbers:
                # Many later errors have replaced it, or one comes now: an error that is sent twice is recognized.
                with contextlib.suppress(ValueError, IndexError):
                    self._noted.remove(each)


def latest_oom() -> tuple[float, OutOfMemory] | None:
    """Return the last error that a reporter of this process has observed, and its monotonic time."""
    return _latest


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error reports that device memory is exhausted, from PyTorch or from a library."""
    if any(kind.__name__ == "OutOfMemoryError" and kind.__module__.startswith("torch") for kind in type(error).__mro__):
        return True
    return isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)[:4000]) is not None


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and its causes."""
    at: BaseException | None = error
    for _ in range(_CHAIN_MAX):  # a chain may be a circle
        if at is None:
            return
        yield at
        at = at.__cause__ or (None if at.__suppress_context__ else at.__context__)


def out_of_memory_in(error: BaseException) -> BaseException | None:
    """Return the first out-of-memory error among an error and its causes; None if there is none."""
    return next((each for each in chain(error) if is_out_of_memory(each)), None)
