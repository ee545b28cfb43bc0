"""Empties the cache at the end of a step if the heap is fragmented, less often if that does not help."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpumem_client.allocator.allocator import attached
from gpumem_client.allocator.reclaimable import unreturnable_bytes
from gpumem_client.hooks.steps import OneStep, process_steps
from gpumem_client.release import clear_cache
from gpumem_client.wire.protocol import DeviceSample

_REGAINED_SHARE = 0.8


class AutoClean:
    """Checks the cache at the end of each step until `stop()`. `auto_clean` creates it, and describes its arguments."""

    def __init__(self, fragmentation: float, min_bytes: int, cooldown_steps: int) -> None:
        if not 0 <= fragmentation <= 1 or min_bytes < 1 or cooldown_steps < 1:
            raise ValueError("fragmentation must be from 0 to 1, min_bytes and cooldown_steps at least 1")
        self._fragmentation, self._min_bytes, self._cooldown = fragmentation, min_bytes, cooldown_steps
        self._steps_since = cooldown_steps
        self._reserved_after = self._last_freed = 0
        self.clears = 0
        """The number of clears."""
        self.freed_bytes = 0
        """The bytes that all clears have freed."""
        self.stop: Callable[[], None] = lambda: None
        """Stops the checks."""

    def look(self) -> int:
        """Clear if it is due and worth it. Returns the bytes freed. Call it in the training thread between steps."""
        self._steps_since += 1
        if self._steps_since < self._cooldown:
            return 0
        samples = _samples()
        reserved = sum(sample.reserved_bytes or 0 for sample in samples)
        fragmented = any(
            sample.reserved_bytes and (unreturnable_bytes(sample) or 0) >= self._fragmentation * sample.reserved_bytes
            for sample in samples
        )
        if not fragmented or sum(sample.reclaimable_bytes or 0 for sample in samples) < self._min_bytes:
            return 0
        # After each clear, the next steps allocate from the driver again. transformers' Trainer cleared at each step,
        # became slower, and stopped doing so (huggingface/transformers#31372).
        if self._last_freed and reserved - self._reserved_after >= _REGAINED_SHARE * self._last_freed:
            self._cooldown, self._last_freed = 2 * self._cooldown, 0
            return 0
        self._last_freed = clear_cache()
        self._reserved_after = reserved - self._last_freed
        self._steps_since = 0
        self.clears, self.freed_bytes = self.clears + 1, self.freed_bytes + self._last_freed
        return self._last_freed

    def __reduce__(self) -> tuple[Callable[..., AutoClean], tuple[float, int, int]]:
        """Make copies and pickles, for example of a trainer, contain an instance that does not listen."""
        return AutoClean, (self._fragmentation, self._min_bytes, self._cooldown)


def auto_clean(fragmentation: float = 0.3, *, min_bytes: int = 1 << 30, cooldown_steps: int = 100) -> AutoClean:
    """Empty the cache at the end of a step whenever the heap is fragmented and enough bytes are reclaimable.

    The check runs after each step of an optimizer, or at each `gpumem_client.step()`, in that thread, and never while a
    CUDA graph is being captured. If most of the freed bytes are reserved again when the next clear is due, the cooldown
    doubles instead. In a job of several ranks each rank clears for itself, and the others wait for it. Raises
    ValueError if an argument is out of range.

    The heap of a device is fragmented if at least the share `fragmentation` of its reserved memory is neither
    allocated nor reclaimable. `min_bytes` counts the reclaimable bytes of all devices. There are at least
    `cooldown_steps` steps between two clears.
    """
    cleaner, step = AutoClean(fragmentation, min_bytes, cooldown_steps), OneStep()

    def stepped(optimizer: Any) -> None:
        if step.ends(optimizer):
            cleaner.look()

    cleaner.stop = process_steps().listen(stepped)
    return cleaner


def _samples() -> tuple[DeviceSample, ...]:
    allocator = attached()
    return () if allocator is None or allocator.capturing else allocator.samples()
