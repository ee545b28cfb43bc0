"""What the integrations share: phases, the guard of a step, the leak detector, and values for a trainer's logger."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from gpumem_client import phase
from gpumem_client.allocator.allocator import attached
from gpumem_client.allocator.idle_cache import IdleCache
from gpumem_client.driver_memory import read_driver
from gpumem_client.guest_safety import ErrorLog, GuestLog, guest_safety
from gpumem_toolkit.leaks.detector import LeakDetector, leak_detector
from gpumem_toolkit.oom.diagnosis import OomDiagnosis
from gpumem_toolkit.oom.guard import oom_guard

_log = GuestLog(logging.getLogger("gpumem_toolkit"), None)
_errors = ErrorLog()
# The idle cache is known after a minute, from readings this far apart.
_READING_SECONDS = 1.0


def safely(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function in a boundary: its own first error is one line in the log, and none reaches the trainer."""
    return guest_safety(lambda error: _errors.note(f"{function.__module__} failed", error))(function)


class TrainingWatch:
    """Watches one training, in the thread that trains, until `stop`. No method raises."""

    def __init__(self, *, leaks: bool) -> None:
        self._guard = oom_guard(on_oom=_log_diagnosis, clean=False)
        self._step: contextlib.ExitStack | None = None
        self._idle_cache = IdleCache()
        self._next_reading_seconds = 0.0
        self._detector: LeakDetector | None = leak_detector() if leaks else None

    @safely
    def step_starts(self, batch_size: int | None) -> None:
        """Start a training step: the phase `train`, and a run of the guard."""
        self.step_ends()
        self._step = contextlib.ExitStack()
        self._guard.batch_size = batch_size
        self._step.enter_context(phase("train"))
        self._step.push(self._guard.__enter__().__exit__)

    @safely
    def step_ends(self) -> None:
        """End the step, if one runs."""
        step, self._step = self._step, None
        if step is not None:
            step.close()
        allocator, now = attached(), time.monotonic()
        if allocator is not None and now >= self._next_reading_seconds:
            self._next_reading_seconds = now + _READING_SECONDS
            for reading in allocator.unused():
                self._idle_cache.note(reading, now)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure a phase that the trainer makes between its steps."""
        self.step_ends()
        with phase(name):
            yield

    @safely
    def failed(self, error: BaseException) -> None:
        """End the step by an error that leaves the training. An out-of-memory error is explained in the log."""
        step, self._step = self._step, None
        if step is not None:
            step.__exit__(type(error), error, error.__traceback__)
        else:
            self._guard.__exit__(type(error), error, error.__traceback__)

    @safely
    def stop(self) -> None:
        """End the step and the leak detector."""
        self.step_ends()
        if self._detector is not None:
            self._detector.stop()

    def values(self) -> dict[str, float]:
        """Return the values of the current device for a logger. What is not known is left out."""
        found: dict[str, float] = {}
        with guest_safety(lambda error: _errors.note("the values for a trainer's logger are not known", error)):
            found.update((f"gpumem/{name}", value) for name, value in self._values() if value is not None)
        return found

    def _values(self) -> Iterator[tuple[str, float | None]]:
        allocator = attached()
        if allocator is None:
            return
        device = int(sys.modules["torch"].cuda.current_device())
        sample = allocator.sample_now(device)
        process = read_driver(sample.uuid).process_bytes
        leaks = () if self._detector is None else self._detector.leaks
        yield "allocated_peak_bytes", sample.allocated_peak_bytes
        yield "reserved_bytes", sample.reserved_bytes
        yield "idle_cache_bytes", self._idle_cache.bytes(sample.uuid, time.monotonic())
        if process is not None and sample.reserved_bytes is not None:
            yield "non_torch_bytes", process - sample.reserved_bytes
        yield "alloc_retries", sample.alloc_retries
        yield "leak_bytes_per_step", max((each.bytes_per_step for each in leaks if each.device == device), default=None)


def _log_diagnosis(diagnosis: OomDiagnosis) -> None:
    _log.error("%s", diagnosis)
