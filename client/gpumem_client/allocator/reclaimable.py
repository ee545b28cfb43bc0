"""Computes the bytes that `empty_cache()` would release, from the statistics or from walks over the heap.

There are three cases, in this order:

- Exact, from the statistics: classic segments, no private pool, nothing pending on another stream. Then
  reserved − active − inactive split is the sum of the wholly free segments.
- Exact, from a walk: the heap was walked for this sample, or its counters show that it has not changed since. A walk
  holds the GIL for about half a microsecond per block. It is repeated after `_WALK_SHARE` times its duration, so a heap
  of up to about four thousand blocks is walked for every sample at one per second.
- Estimated, between walks over a larger heap that keeps changing: the estimate assumes that the bytes that the last
  walk found unreturnable still are. Fragmentation changes more slowly than the cache. The last walk is at most
  `_WALK_SHARE` times its duration old (5 s at 20,000 blocks).

Otherwise None: the heap is too large to walk, the allocator has no statistics or no snapshot, or the page size is
unknown.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Mapping
from typing import Dict, NamedTuple, Tuple

from gpumem_client.allocator.heap_sum import Heap, PoolId, PoolSegment
from gpumem_client.torch_access import DeviceState
from gpumem_client.wire.protocol import DeviceSample

_NEEDED = {
    *("reserved_bytes", "allocated_bytes", "active_bytes", "inactive_split_bytes", "segment", "num_device_alloc")
}
# The metrics of a statistic that change with each segment or page.
_LAYOUT = ("current", "allocated", "freed")
_PoolsLayout = Dict[PoolId, Tuple[int, ...]]
# A walk that used t seconds of CPU is repeated after 500 t at the earliest: 0.2 % of a core.
_WALK_SHARE = 500
# A heap with more blocks is not walked: the snapshot keeps the GIL, 5 to 7 ms for 10,000 blocks and 135 to 210 ms for
# 100,000 (torch 2.15).
_WALK_BLOCKS_MAX = 20_000


class _Walk(NamedTuple):
    """The heap of a device at the last walk, with the statistics right before it."""

    heap: Heap
    version: tuple[int, ...]
    layout: tuple[int, ...] | None
    """None if a segment came or went between the statistics and the walk: then the two do not belong together."""
    pools: _PoolsLayout | None
    """None also without statistics of pools."""


class Reclaimable:
    """The reclaimable bytes of each device. One thread at a time may call `walk_if_due`, any thread the other methods.

    `walk` takes a snapshot and reads it; it returns None if the allocator has no snapshot. `pools_version` returns a
    value that changes when a private pool dies, which no statistic shows.
    """

    def __init__(
        self,
        walk: Callable[[], Mapping[int, Heap] | None],
        pools_version: Callable[[], Hashable],
        *,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,  # without waits for the allocator's lock
    ) -> None:
        self._walk = walk
        self._pools_version = pools_version
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._expandable: set[int] = set()
        self._segments_seen: dict[int, int] = {}
        self._next_walk_seconds = 0.0
        self._walks: dict[int, _Walk] = {}
        self._walked_pools: Hashable = None

    def walk_if_due(self, states: Mapping[int, DeviceState]) -> None:
        """Walk over the heaps if a device needs it and has changed, and enough time has passed since the last walk."""
        unsettled = {
            index: state
            for index, state in states.items()
            if _complete(state) and (self._unproven(index, state) or not self.exact_from_statistics(index, state))
        }
        if not unsettled or self._clock() < self._next_walk_seconds:
            return
        pools_version = self._pools_version()
        if pools_version == self._walked_pools and all(
            index in self._walks and self._walks[index].version == _version(state) for index, state in unsettled.items()
        ):
            return
        # Before the check of the size: a heap that has become too large to walk has no value, instead of an old one.
        self._walks.clear()
        if sum(_blocks(state) for state in states.values()) > _WALK_BLOCKS_MAX:
            return
        started = self._cpu_clock()
        heaps = self._walk()
        self._next_walk_seconds = self._clock() + (self._cpu_clock() - started) * _WALK_SHARE
        if heaps is None:
            return
        self._walked_pools = pools_version
        for index, state in states.items():
            if _complete(state):
                self._segments_seen[index] = _segments_ever(state)
                heap = heaps.get(index, Heap())
                if heap.expandable:
                    self._expandable.add(index)
                layout = _layout(state) if heap.reserved_bytes == state["reserved_bytes"]["current"] else None
                pools = _pools_layout(state) if heap.private_bytes == state.get("private_pools_bytes") else None
                self._walks[index] = _Walk(heap, _version(state), layout, pools)

    def bytes(self, index: int, state: DeviceState) -> int | None:
        """Return what `empty_cache()` would release of a device with these statistics; None if unknown."""
        if not _complete(state):
            return None
        reserved: int = state["reserved_bytes"]["current"]
        allocated: int = state["allocated_bytes"]["current"]
        if self.exact_from_statistics(index, state):
            split: int = state["inactive_split_bytes"]["current"]
            return reserved - allocated - split
        walk = self._walks.get(index)
        if walk is None or walk.heap.returnable_bytes is None:
            return None
        # Of the snapshot alone: another thread may have changed the heap since the statistics were read.
        unreturnable = walk.heap.reserved_bytes - walk.heap.allocated_bytes - walk.heap.returnable_bytes
        return max(0, reserved - allocated - unreturnable)

    def unused_bytes(self, index: int, state: DeviceState) -> int | None:
        """Return `bytes` without a walk for classic segments: memory pending on another stream counts as used."""
        if not self._classic(index, state):
            return self.bytes(index, state)
        reserved: int = state["reserved_bytes"]["current"]
        active: int = state["active_bytes"]["current"]
        split: int = state["inactive_split_bytes"]["current"]
        return reserved - active - split

    def private_bytes(self, index: int, state: DeviceState) -> int | None:
        """Return the bytes reserved by private pools; None if a segment was added or removed since the last walk."""
        heap = self._heap(index, state)
        return None if heap is None else heap.private_bytes

    def pool_segments(self, index: int, state: DeviceState) -> Collection[PoolSegment] | None:
        """Return the segments of private pools; None if one of them was added or removed since the last walk.

        Before torch 2.13, which has no statistics of pools, a segment of the default pool counts, too.
        """
        # cudaMallocAsync has neither segments nor pools.
        if state.get("private_pools_bytes") == 0 or "segment" not in state:
            return ()
        pools = _pools_layout(state)
        if pools is None:
            heap = self._heap(index, state)
            return None if heap is None else heap.pool_segments
        walk = self._walks.get(index)
        return walk.heap.pool_segments if walk is not None and walk.pools == pools else None

    def exact_from_statistics(self, index: int, state: DeviceState) -> bool:
        """Whether these statistics alone show the exact reclaimable bytes."""
        return self._classic(index, state) and state["active_bytes"]["current"] == state["allocated_bytes"]["current"]

    def _classic(self, index: int, state: DeviceState) -> bool:
        """Whether all segments are classic ones of the default pool."""
        if not _complete(state):
            return False
        private = state.get("private_pools_bytes")
        if private is None:
            private = self.private_bytes(index, state)
        return private == 0 and not self._may_be_expandable(index, state)

    def _heap(self, index: int, state: DeviceState) -> Heap | None:
        """Return the last walk's heap; None if a segment was added or removed since."""
        walk = self._walks.get(index)
        return walk.heap if walk is not None and _complete(state) and walk.layout == _layout(state) else None

    def _may_be_expandable(self, index: int, state: DeviceState) -> bool:
        """Whether the device may have expandable segments, which are mapped by the page and not counted as segments."""
        # Not from the settings: they apply to new segments only, and may change at any time. The counters may be reset,
        # so a device with expandable segments stays marked for the life of the process.
        if _segments_ever(state) != state["segment"]["allocated"]:
            self._expandable.add(index)
        return index in self._expandable

    def _unproven(self, index: int, state: DeviceState) -> bool:
        """Whether the counters were not observed from 0: before the first look, and after a reset."""
        taken = _segments_ever(state)
        before = self._segments_seen.get(index, 0 if state["reserved_bytes"]["current"] == 0 else taken + 1)
        self._segments_seen[index] = max(taken, before)
        return taken < before


def known(state: DeviceState | None, name: str, metric: str = "current") -> int | None:
    """Return one value of the nested statistics, or None without statistics or if the allocator does not keep it."""
    try:
        value: int = state[name][metric]  # type: ignore[index]
    except (TypeError, KeyError):
        return None
    return value


def unreturnable_bytes(sample: DeviceSample) -> int | None:
    """Return the bytes that are reserved, and neither allocated nor reclaimable; None if unknown."""
    reserved, allocated, reclaimable = sample.reserved_bytes, sample.allocated_bytes, sample.reclaimable_bytes
    if reserved is None or allocated is None or reclaimable is None:
        return None
    return max(0, reserved - allocated - reclaimable)


def _complete(state: DeviceState) -> bool:
    """Whether the statistics have all that the computation needs."""
    return state.keys() >= _NEEDED


def _version(state: DeviceState) -> tuple[int, ...]:
    """Return a value that changes whenever a block is allocated or freed."""
    return _segments_ever(state), *(
        state[name][metric]
        for name in ("allocated_bytes", "active_bytes", "reserved_bytes")
        for metric in ("current", "allocated", "freed")
    )


def _layout(state: DeviceState) -> tuple[int, ...]:
    """Return a value that changes whenever a segment, or a page of one, is allocated or released."""
    return tuple(state["reserved_bytes"][metric] for metric in _LAYOUT)


def _pools_layout(state: DeviceState) -> _PoolsLayout | None:
    """Return a value that changes whenever a private pool gets or releases a segment; None before torch 2.13."""
    pools = state.get("reserved_bytes_by_private_pools")
    if pools is None:
        return None
    return {pool: tuple(stat["all"][metric] for metric in _LAYOUT) for pool, stat in pools.items()}


def _segments_ever(state: DeviceState) -> int:
    """Return the number of allocations from the driver since the counters were last reset."""
    taken: int = state["num_device_alloc"]
    return taken


def _blocks(state: DeviceState) -> int:
    """Return about the number of blocks in a walk; no statistic counts free blocks of expandable segments."""
    return sum(known(state, name) or 0 for name in ("active", "inactive_split", "segment"))
