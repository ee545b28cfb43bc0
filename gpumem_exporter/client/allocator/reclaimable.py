"""How much `empty_cache()` would give back, from the statistics where they tell it, else from walks over the heap.

Three answers, in this order.

- Exact, from the statistics alone: classic segments, no private pool, nothing pending on another stream. Then
  reserved − active − inactive split is the sum of the segments that are wholly free.
- Exact, from a walk: the heap has not changed since (its counters say so), or it is walked for this sample. A walk
  holds the GIL for about half a microsecond a block; it is repeated when `_WALK_SHARE` times its cost have passed, so
  heaps of up to some four thousand blocks are walked for every sample at one a second.
- Between the walks over a larger heap that keeps changing, what could not be returned at the last one is taken for what
  cannot be returned now. Fragmentation moves slowly where the cache moves fast; and the last walk is never older than
  `_WALK_SHARE` times its cost (5 s at 20,000 blocks).

Else None: a heap too large to walk, an allocator without statistics or snapshot, pages of unknown size.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeAlias

from gpumem_exporter.client.allocator.heap import Heap

__all__ = ["DeviceState", "Reclaimable", "known"]

DeviceState: TypeAlias = "Mapping[str, Any]"
"""One device's nested statistics, as torch gives them."""

_WALK_SHARE = 500
"""A walk that took t seconds of this thread is not repeated before 500 t have passed: 0.2 % of a core."""
_WALK_BLOCKS_MAX = 20_000
"""A heap with more blocks is not walked: it would stop the interpreter for tens of milliseconds."""


class Reclaimable:
    """Knows each device's heap well enough to say what a clear would return.

    One thread at a time may call `look`; any may call the rest.

    Args:
        walk: takes a snapshot and reads it, None where the allocator has none.
        pools_version: changes when private pools die, which no statistic shows.
        expandable_from_the_start: what the settings say of expandable segments.
        clock: monotonic seconds.
        cpu_clock: seconds of this thread; a wait for the allocator's lock is no cost.
    """

    def __init__(
        self,
        walk: Callable[[], Mapping[int, Heap] | None],
        pools_version: Callable[[], Hashable],
        *,
        expandable_from_the_start: bool = False,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._walk = walk
        self._pools_version = pools_version
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._all_expandable = expandable_from_the_start
        self._expandable: set[int] = set()
        self._taken: dict[int, int] = {}
        self._next_walk_seconds = 0.0
        self._unreturnable: dict[int, int] = {}
        self._walked: dict[int, tuple[int, ...]] = {}
        self._walked_pools: Hashable = None
        self._layouts: dict[int, tuple[tuple[int, ...], int]] = {}

    def look(self, states: Mapping[int, DeviceState]) -> None:
        """Walk over the heaps if one of these devices needs it, has changed, and enough time has passed."""
        unsettled = {
            index: state
            for index, state in states.items()
            if _complete(state) and (self._unproven(index, state) or not self.told_by_statistics(index, state))
        }
        if not unsettled or self._clock() < self._next_walk_seconds:
            return
        pools_version = self._pools_version()
        if pools_version == self._walked_pools and all(
            self._walked.get(index) == _version(state) for index, state in unsettled.items()
        ):
            return
        self._unreturnable.clear()
        self._walked.clear()
        self._layouts.clear()
        if sum(_blocks(state) for state in states.values()) > _WALK_BLOCKS_MAX:
            return
        begun = self._cpu_clock()
        heaps = self._walk()
        self._next_walk_seconds = self._clock() + (self._cpu_clock() - begun) * _WALK_SHARE
        if heaps is None:
            return
        self._walked_pools = pools_version
        for index, state in states.items():
            if _complete(state):
                self._taken[index] = _taken(state)
                self._learn(index, state, heaps.get(index, Heap()))

    def bytes(self, index: int, state: DeviceState) -> int | None:
        """What `empty_cache()` would give back of a device with these statistics."""
        if not _complete(state):
            return None
        reserved: int = state["reserved_bytes"]["all"]["current"]
        allocated: int = state["allocated_bytes"]["all"]["current"]
        if self.told_by_statistics(index, state):
            split: int = state["inactive_split_bytes"]["all"]["current"]
            return reserved - allocated - split
        unreturnable = self._unreturnable.get(index)
        return None if unreturnable is None else max(0, reserved - allocated - unreturnable)

    def private_bytes(self, index: int, state: DeviceState) -> int | None:
        """Reserved by private pools, where the last walk still tells: as long as no segment has come or gone."""
        layout, private = self._layouts.get(index, (None, None))
        return private if layout is not None and _complete(state) and layout == _layout(state) else None

    def told_by_statistics(self, index: int, state: DeviceState) -> bool:
        """These statistics alone tell it, exactly; any thread may ask."""
        if not _complete(state):
            return False
        private = state.get("private_pools_bytes")
        if private is None:
            private = self.private_bytes(index, state)
        return (
            private == 0
            and state["active_bytes"]["all"]["current"] == state["allocated_bytes"]["all"]["current"]
            and not self._may_be_expandable(index, state)
        )

    def _may_be_expandable(self, index: int, state: DeviceState) -> bool:
        """Expandable segments are mapped by the page, and only classic ones are counted as segments.

        The settings tell what new segments will be, not what there is: they may change while the program runs. Once
        seen, expandable segments count as there for good, since the program may reset the counters.
        """
        taken = state.get("num_device_alloc")  # 2.3 and later
        if taken is not None and taken != state["segment"]["all"]["allocated"]:
            self._expandable.add(index)
        return self._all_expandable or index in self._expandable

    def _unproven(self, index: int, state: DeviceState) -> bool:
        """The counters that tell expandable segments were not watched from 0: before the first look, after a reset."""
        taken = _taken(state)
        before = self._taken.get(index, 0 if state["reserved_bytes"]["all"]["current"] == 0 else taken + 1)
        self._taken[index] = max(taken, before)
        return taken < before

    def _learn(self, index: int, state: DeviceState, heap: Heap) -> None:
        if heap.expandable:
            self._expandable.add(index)
        if heap.returnable_bytes is not None:
            # All from the picture: another thread may have changed the heap since the statistics were read.
            self._unreturnable[index] = heap.reserved_bytes - heap.allocated_bytes - heap.returnable_bytes
        self._walked[index] = _version(state)
        if heap.reserved_bytes == state["reserved_bytes"]["all"]["current"]:
            self._layouts[index] = _layout(state), heap.private_bytes


def known(state: DeviceState | None, name: str, metric: str = "current") -> int | None:
    """Return one value of the nested statistics, or None without statistics or if the allocator does not keep it."""
    value: int | None = (state or {}).get(name, {}).get("all", {}).get(metric)
    return value


def _complete(state: DeviceState) -> bool:
    """It has what the arithmetic needs."""
    return all(
        name in state
        for name in ("reserved_bytes", "allocated_bytes", "active_bytes", "inactive_split_bytes", "segment")
    )


def _version(state: DeviceState) -> tuple[int, ...]:
    """Changes whenever a block was taken or given back: two equal versions are one heap."""
    return _taken(state), *(
        state[name]["all"][metric]
        for name in ("allocated_bytes", "active_bytes", "reserved_bytes")
        for metric in ("current", "allocated", "freed")
    )


def _layout(state: DeviceState) -> tuple[int, ...]:
    """Changes whenever a segment was taken or given back, or a page of one."""
    return tuple(state["reserved_bytes"]["all"][metric] for metric in ("current", "allocated", "freed"))


def _taken(state: DeviceState) -> int:
    """How often the driver was asked for memory since the program last reset its counters."""
    taken: int = state.get("num_device_alloc") or state["segment"]["all"]["allocated"]
    return taken


def _blocks(state: DeviceState) -> int:
    """About as many as a walk meets; free blocks of expandable segments are not counted anywhere."""
    return sum(known(state, name) or 0 for name in ("active", "inactive_split", "segment"))
