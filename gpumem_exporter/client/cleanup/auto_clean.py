"""Empties the cache when fragmentation has grown, at the end of a step, and stops where that does not help."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gpumem_exporter.client.allocator.attached import attached
from gpumem_exporter.client.cleanup.clear import clear_cache
from gpumem_exporter.client.hooks.steps import OneStep, process_steps
from gpumem_exporter.client.log import log
from gpumem_exporter.client.sizes import human_bytes

__all__ = ["AutoClean", "Cache", "auto_clean"]

_WORTH_SHARE = 0.5
"""A clear that frees less than half of `min_bytes` was not worth it…"""
_REGAINED_SHARE = 0.8
"""…nor was one after which four fifths of what it freed are reserved again when the next one is due."""
_FRUITLESS_MAX = 3


@dataclass(frozen=True, slots=True)
class Cache:
    """The allocator's cache on one device."""

    reserved_bytes: int
    fragmented_bytes: int
    reclaimable_bytes: int


class AutoClean:
    """Looks at the end of each step. `auto_clean` makes one; `stop()` ends it.

    Args:
        fragmentation: see `auto_clean`.
        min_bytes: see there.
        cooldown_steps: see there.
        caches: what the allocator holds, a device each.
        clear: empties the cache, returns the bytes freed.
    """

    def __init__(
        self,
        fragmentation: float,
        min_bytes: int,
        cooldown_steps: int,
        *,
        caches: Callable[[], tuple[Cache, ...]],
        clear: Callable[[], int],
    ) -> None:
        if not 0 <= fragmentation <= 1 or min_bytes < 1 or cooldown_steps < 1:
            raise ValueError("fragmentation lies between 0 and 1, min_bytes and cooldown_steps above 0")
        self._fragmentation = fragmentation
        self._min_bytes = min_bytes
        self._cooldown_steps = self._cooldown = cooldown_steps
        self._caches = caches
        self._clear = clear
        self._since = cooldown_steps
        self._reserved_after: int | None = None
        self._last_freed = 0
        self._fruitless = 0
        self._listening: Callable[[], None] = lambda: None
        self._step = OneStep()
        self.clears = 0
        """How often it has cleared."""
        self.freed_bytes = 0
        """What that has given back in all."""
        self.stopped = ""
        """Why it does nothing any more; empty while it does."""

    def listen(self) -> None:
        """Look at the end of each step."""
        self._listening = process_steps().listen(self._stepped)

    def _stepped(self, optimizer: Any) -> None:
        if self._step.ends(optimizer):
            self.look()

    def stop(self, reason: str = "it was told to stop") -> None:
        """Clear no more."""
        self._listening()
        self._listening = lambda: None
        self.stopped = self.stopped or reason

    def __reduce__(self) -> tuple[Callable[[int, int], AutoClean], tuple[int, int]]:
        """What it is copied or pickled with, such as a trainer that keeps it, gets one that has stopped."""
        return _stopped, (self.clears, self.freed_bytes)

    def look(self) -> int:
        """Clear if it is time and worth it; returns the bytes freed. For the thread that trains, between two steps."""
        self._since += 1
        if self.stopped or self._since < self._cooldown:
            return 0
        caches = self._caches()
        reclaimable = sum(cache.reclaimable_bytes for cache in caches)
        fragmented = any(
            cache.reserved_bytes and cache.fragmented_bytes >= self._fragmentation * cache.reserved_bytes
            for cache in caches
        )
        if not fragmented or reclaimable < self._min_bytes:
            return 0
        if self._reserved_after is not None:
            regained = sum(cache.reserved_bytes for cache in caches) - self._reserved_after
            self._judge(fruitful=regained < _REGAINED_SHARE * self._last_freed)
            if self.stopped or self._since < self._cooldown:
                return 0
        freed = self._clear()
        self.clears += 1
        self.freed_bytes += freed
        self._since = 0
        if freed < _WORTH_SHARE * self._min_bytes:
            self._reserved_after = None
            self._judge(fruitful=False)
        else:
            self._last_freed = freed
            self._reserved_after = sum(cache.reserved_bytes for cache in self._caches())
        return freed

    def _judge(self, *, fruitful: bool) -> None:
        self._reserved_after = None
        if fruitful:
            self._fruitless, self._cooldown = 0, self._cooldown_steps
            return
        self._fruitless += 1
        self._cooldown *= 2
        if self._fruitless >= _FRUITLESS_MAX:
            self.stop(f"{_FRUITLESS_MAX} clears in a row freed little, or what was reserved again at once")
            log.warning(
                "auto_clean stops after %d clears, %s in all: %s",
                self.clears,
                human_bytes(self.freed_bytes),
                self.stopped,
            )


def auto_clean(fragmentation: float = 0.3, *, min_bytes: int = 1 << 30, cooldown_steps: int = 100) -> AutoClean:
    """From now on, empty the cache at the end of a step where the heap is fragmented and that frees something.

    It looks after each step of an optimizer, or at each `client.step()`, in that thread, never while a CUDA graph is
    being captured. Looking costs some 30 µs a device, and nothing during the cooldown. A clear that frees less than
    half of `min_bytes`, or after which the same is reserved again by the time the next one is due, doubles the
    cooldown; after three such in a row it stops and says so. In a job of several ranks each clears for itself: the
    others wait for the one that does.

    Args:
        fragmentation: the share of a device's reserved memory that is in no tensor and cannot be given back.
        min_bytes: reclaimable on all devices together.
        cooldown_steps: steps between two clears at least.

    Raises:
        ValueError: a bound is none.
    """
    cleaner = AutoClean(fragmentation, min_bytes, cooldown_steps, caches=_caches, clear=clear_cache)
    cleaner.listen()
    return cleaner


def _stopped(clears: int, freed_bytes: int) -> AutoClean:
    cleaner = AutoClean(1.0, 1, 1, caches=_caches, clear=clear_cache)
    cleaner.stop("it is a copy")
    cleaner.clears, cleaner.freed_bytes = clears, freed_bytes
    return cleaner


def _caches() -> tuple[Cache, ...]:
    allocator = attached()
    if allocator is None or allocator.capturing:
        return ()
    found = []
    for sample in allocator.samples():
        figures: tuple[Any, ...] = (sample.reserved_bytes, sample.allocated_bytes, sample.reclaimable_bytes)
        if None not in figures:
            reserved, allocated, reclaimable = figures
            found.append(Cache(reserved, reserved - allocated - reclaimable, reclaimable))
    return tuple(found)
