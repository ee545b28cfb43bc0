"""Empties the cache at the end of a step if the heap is fragmented, and stops if that does not help."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from gpumem_client.allocator.allocator import attached
from gpumem_client.allocator.reclaimable import unreturnable_bytes
from gpumem_client.guest_safety import GuestLog
from gpumem_client.hooks.steps import OneStep, process_steps
from gpumem_client.release import clear_cache
from gpumem_client.wire.protocol import DeviceSample
from gpumem_client.wire.units import human_bytes

_log = GuestLog(logging.getLogger("gpumem_toolkit"), None)

# A clear fails if it frees less than the first share of `min_bytes`, or if the second share of the freed bytes is
# reserved again when the next clear is due.
_WORTH_SHARE = 0.5
_REGAINED_SHARE = 0.8
_FAILURES_MAX = 3
# After each clear, the next steps allocate from the driver again. transformers' Trainer cleared at each step, became
# slower, and stopped doing so (huggingface/transformers#31372): so a clear that does not help must not be repeated.


class AutoClean:
    """Checks the cache at the end of each step until `stop()`. `auto_clean` creates it, and describes its arguments."""

    def __init__(
        self,
        fragmentation: float,
        min_bytes: int,
        cooldown_steps: int,
        *,
        samples: Callable[[], tuple[DeviceSample, ...]],
        clear: Callable[[], int],
    ) -> None:
        if not 0 <= fragmentation <= 1 or min_bytes < 1 or cooldown_steps < 1:
            raise ValueError("fragmentation must be from 0 to 1, min_bytes and cooldown_steps at least 1")
        self._fragmentation = fragmentation
        self._min_bytes = min_bytes
        self._cooldown_steps = self._cooldown = cooldown_steps
        self._samples = samples
        self._clear = clear
        self._steps_since = cooldown_steps
        self._reserved_after: int | None = None
        self._last_freed = 0
        self._failures = 0
        self._stop_listening: Callable[[], None] = lambda: None
        self._step = OneStep()
        self.clears = 0
        """The number of clears."""
        self.freed_bytes = 0
        """The bytes that all clears have freed."""
        self.stopped = ""
        """The reason for the stop; empty while the checks run."""

    def listen(self) -> None:
        """Check at the end of each step."""
        self._stop_listening = process_steps().listen(self._stepped)

    def _stepped(self, optimizer: Any) -> None:
        if self._step.ends(optimizer):
            self.look()

    def stop(self, reason: str = "stop() was called") -> None:
        """Stop the checks."""
        self._stop_listening()
        self._stop_listening = lambda: None
        self.stopped = self.stopped or reason

    def __reduce__(self) -> tuple[Callable[[int, int], AutoClean], tuple[int, int]]:
        """Make copies and pickles, for example of a trainer, contain a stopped instance."""
        return _stopped, (self.clears, self.freed_bytes)

    def look(self) -> int:
        """Clear if it is due and worth it. Returns the bytes freed. Call it in the training thread between steps."""
        self._steps_since += 1
        if self.stopped or self._steps_since < self._cooldown:
            return 0
        samples = self._samples()
        reclaimable = sum(sample.reclaimable_bytes or 0 for sample in samples)
        fragmented = any(
            sample.reserved_bytes and (unreturnable_bytes(sample) or 0) >= self._fragmentation * sample.reserved_bytes
            for sample in samples
        )
        if not fragmented or reclaimable < self._min_bytes:
            return 0
        if self._reserved_after is not None:
            regained = _reserved(samples) - self._reserved_after
            self._judge(succeeded=regained < _REGAINED_SHARE * self._last_freed)
            if self.stopped or self._steps_since < self._cooldown:
                return 0
        return self._clear_now()

    def _clear_now(self) -> int:
        freed = self._clear()
        self.clears += 1
        self.freed_bytes += freed
        self._steps_since = 0
        if freed < _WORTH_SHARE * self._min_bytes:
            self._judge(succeeded=False)
        else:
            self._last_freed = freed
            self._reserved_after = _reserved(self._samples())
        return freed

    def _judge(self, *, succeeded: bool) -> None:
        self._reserved_after = None
        if succeeded:
            self._failures, self._cooldown = 0, self._cooldown_steps
            return
        self._failures += 1
        self._cooldown *= 2
        if self._failures >= _FAILURES_MAX:
            self.stop(f"{_FAILURES_MAX} clears in a row freed little, or the same was reserved again")
            _log.warning(
                "auto_clean stops after %d clears that freed %s: %s",
                self.clears,
                human_bytes(self.freed_bytes),
                self.stopped,
            )


def auto_clean(fragmentation: float = 0.3, *, min_bytes: int = 1 << 30, cooldown_steps: int = 100) -> AutoClean:
    """Empty the cache at the end of a step whenever the heap is fragmented and enough bytes are reclaimable.

    The check runs after each step of an optimizer, or at each `gpumem_client.step()`, in that thread, and never while a
    CUDA graph is being captured. It takes about 30 µs per device, and nothing during the cooldown. A clear fails if it
    frees less than half of `min_bytes`, or if most of the freed bytes are reserved again when the next clear is due. A
    failure doubles the cooldown; after three failures in a row it stops and logs that. In a job of several ranks each
    rank clears for itself, and the others wait for it. Raises ValueError if an argument is out of range.

    The heap of a device is fragmented if at least the share `fragmentation` of its reserved memory is neither
    allocated nor reclaimable. `min_bytes` counts the reclaimable bytes of all devices. There are at least
    `cooldown_steps` steps between two clears.
    """
    cleaner = AutoClean(fragmentation, min_bytes, cooldown_steps, samples=_samples, clear=clear_cache)
    cleaner.listen()
    return cleaner


def _stopped(clears: int, freed_bytes: int) -> AutoClean:
    cleaner = AutoClean(1.0, 1, 1, samples=_samples, clear=clear_cache)
    cleaner.stop("this is a copy")
    cleaner.clears, cleaner.freed_bytes = clears, freed_bytes
    return cleaner


def _samples() -> tuple[DeviceSample, ...]:
    allocator = attached()
    return () if allocator is None or allocator.capturing else allocator.samples()


def _reserved(samples: tuple[DeviceSample, ...]) -> int:
    return sum(sample.reserved_bytes or 0 for sample in samples)
