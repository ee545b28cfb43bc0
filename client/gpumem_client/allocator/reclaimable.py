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
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Tuple

from gpumem_client.torch_access import DeviceState
from gpumem_client.wire.protocol import DeviceSample

_NEEDED = {
    *("reserved_bytes", "allocated_bytes", "active_bytes", "inactive_split_bytes", "segment", "num_device_alloc")
}
# The metrics of a statistic that change with each segment or page.
_LAYOUT = ("current", "allocated", "freed")
# A walk that used t seconds of CPU is repeated after 500 t at the earliest: 0.2 % of a core.
_WALK_SHARE = 500
# A heap with more blocks is not walked: the snapshot keeps the GIL, 5 to 7 ms for 10,000 blocks and 135 to 210 ms for
# 100,000 (torch 2.15).
_WALK_BLOCKS_MAX = 20_000


class _Walk(NamedTuple):
    """The heap of a device at the last walk, with the statistics right before it."""

    heap: Heap
    version: tuple[int, ...]
    pools: object
    """See `_pools_layout`. None if a segment came or went between the statistics and the walk: then the two do not
    belong together."""


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
        # The devices whose segments were followed from the first one, or read by a walk.
        self._proven: set[int] = set()
        self._next_walk_seconds = 0.0
        self._walks: dict[int, _Walk] = {}
        self._walked_pools: Hashable = None

    def walk_if_due(self, states: Mapping[int, DeviceState]) -> None:
        """Walk over the heaps if a device needs it and has changed, and enough time has passed since the last walk."""
        unsettled = {
            index: state
            for index, state in states.items()
            if _complete(state) and not (self._is_proven(index, state) and self.exact_from_statistics(index, state))
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
                self._proven.add(index)
                self._learn(index, state, heaps.get(index, Heap()))

    def bytes(self, index: int, state: DeviceState) -> int | None:
        """Return what `empty_cache()` would release of a device with these statistics; None if unknown."""
        if not _complete(state):
            return None
        reserved: int = state["reserved_bytes"]["current"]
        allocated: int = state["allocated_bytes"]["current"]
        if self.exact_from_statistics(index, state):
            return _free_segments(state)
        walk = self._walks.get(index)
        if walk is None or walk.heap.returnable_bytes is None:
            return None
        # Of the snapshot alone: another thread may have changed the heap since the statistics were read.
        unreturnable = walk.heap.reserved_bytes - walk.heap.allocated_bytes - walk.heap.returnable_bytes
        return max(0, reserved - allocated - unreturnable)

    def unused_bytes(self, index: int, state: DeviceState) -> int | None:
        """Return `bytes` without a walk for classic segments: memory pending on another stream counts as used."""
        return _free_segments(state) if self._classic(index, state) else self.bytes(index, state)

    def private_bytes(self, index: int, state: DeviceState) -> int | None:
        """Return the bytes reserved by private pools; None if that may have changed since the last walk."""
        listed: int | None = state.get("private_pools_bytes")
        heap = self._heap(index, state) if listed is None else None
        return listed if heap is None else heap.private_bytes

    def pool_segments(self, index: int, state: DeviceState) -> Collection[PoolSegment] | None:
        """Return the segments of private pools; None if one of them was added or removed since the last walk.

        Before torch 2.13, which has no statistics of pools, a segment of the default pool counts, too.
        """
        # cudaMallocAsync has neither segments nor pools.
        if state.get("private_pools_bytes") == 0 or "segment" not in state:
            return ()
        heap = self._heap(index, state)
        return None if heap is None else heap.pool_segments

    def exact_from_statistics(self, index: int, state: DeviceState) -> bool:
        """Whether these statistics alone show the exact reclaimable bytes."""
        return self._classic(index, state) and state["active_bytes"]["current"] == state["allocated_bytes"]["current"]

    def _classic(self, index: int, state: DeviceState) -> bool:
        """Whether all segments are classic ones of the default pool."""
        if not _complete(state) or self.private_bytes(index, state) != 0:
            return False
        # A device may have expandable segments, which are mapped by the page and not counted as segments. Not from the
        # settings: they apply to new segments only, and may change at any time. The counters may be reset, so a device
        # with expandable segments stays marked for the life of the process.
        if state["num_device_alloc"] != state["segment"]["allocated"]:
            self._expandable.add(index)
        return index not in self._expandable

    def _heap(self, index: int, state: DeviceState) -> Heap | None:
        """Return the last walk's heap; None if a segment of a private pool was added or removed since."""
        walk = self._walks.get(index)
        return walk.heap if walk is not None and walk.pools == _pools_layout(state) else None

    def _is_proven(self, index: int, state: DeviceState) -> bool:
        if state["reserved_bytes"]["current"] == 0:
            self._proven.add(index)
        return index in self._proven

    def _learn(self, index: int, state: DeviceState, heap: Heap) -> None:
        if heap.expandable:
            self._expandable.add(index)
        if "private_pools_bytes" in state:
            settled = heap.private_bytes == state["private_pools_bytes"]
        else:
            settled = heap.reserved_bytes == state["reserved_bytes"]["current"]
        self._walks[index] = _Walk(heap, _version(state), _pools_layout(state) if settled else None)


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
    return state["num_device_alloc"], *(
        state[name][metric]
        for name in ("allocated_bytes", "active_bytes", "reserved_bytes")
        for metric in ("current", "allocated", "freed")
    )


def _pools_layout(state: DeviceState) -> object:
    """Return a value that changes whenever a private pool gets or releases a segment; before torch 2.13, any pool."""
    pools = state.get("reserved_bytes_by_private_pools")
    if pools is None:
        return tuple(state["reserved_bytes"][metric] for metric in _LAYOUT)
    return {pool: tuple(stat["all"][metric] for metric in _LAYOUT) for pool, stat in pools.items()}


def _free_segments(state: DeviceState) -> int:
    """Return the bytes of wholly free segments, if all are classic."""
    reserved, active, split = (state[f"{name}_bytes"]["current"] for name in ("reserved", "active", "inactive_split"))
    return int(reserved - active - split)


def _blocks(state: DeviceState) -> int:
    """Return about the number of blocks in a walk; no statistic counts free blocks of expandable segments."""
    return sum(known(state, name) or 0 for name in ("active", "inactive_split", "segment"))


PoolId = Tuple[int, int]

LARGE_PAGE_BYTES = 20 << 20
"""A page of an expandable segment in the large pool, without the setting `large_segment_size_mb`."""
_SMALL_PAGE_BYTES = 2 << 20
_DEFAULT_POOL = (0, 0)


class PoolSegment(NamedTuple):
    """A segment of a private pool."""

    address: int
    size_bytes: int
    allocated_bytes: int
    pool: PoolId
    expandable: bool = False


@dataclass
class Heap:
    """One device's heap at the time of the snapshot, in bytes."""

    reserved_bytes: int = 0
    allocated_bytes: int = 0
    private_bytes: int = 0
    """Reserved by private pools."""
    expandable: bool = False
    """Whether there is an expandable segment."""
    returnable_bytes: int | None = 0
    """What `empty_cache()` would release to the driver; None if unknown."""
    pool_segments: list[PoolSegment] = field(default_factory=list)


def read_heaps(
    segments: Iterable[Mapping[str, Any]],
    *,
    large_page: int | None = LARGE_PAGE_BYTES,
    dead_pools: Collection[PoolId] = (),
) -> dict[int, Heap]:
    """Return the heap of each device index, from the result of `torch.cuda.memory_snapshot()`.

    `large_page` is the page size of expandable segments in the large pool; None if they may have several. `dead_pools`
    are private pools that no graph uses.
    """
    # As `release_cached_blocks` and `ExpandableSegment::unmap` in c10's CUDACachingAllocator.cpp: a clear waits for
    # blocks that are pending on another stream. It then releases classic segments without a block in use, and of
    # expandable ones each whole page between blocks in use; pages count from the segment's start, because unmapped gaps
    # are whole pages, too. Segments of private pools stay while a graph uses the pool.
    heaps: dict[int, Heap] = {}
    for segment in segments:
        heap = heaps.get(segment["device"])
        if heap is None:
            heap = heaps[segment["device"]] = Heap()
        total, allocated = segment["total_size"], segment["allocated_size"]
        pool = tuple(segment.get("segment_pool_id", _DEFAULT_POOL))
        heap.reserved_bytes += total
        heap.allocated_bytes += allocated
        heap.expandable = heap.expandable or bool(segment.get("is_expandable"))
        if pool != _DEFAULT_POOL:
            heap.private_bytes += total
            expandable = bool(segment.get("is_expandable"))
            heap.pool_segments.append(PoolSegment(segment["address"], total, allocated, pool, expandable))
            if pool not in dead_pools:
                continue
        returnable = _returnable(segment, large_page)
        if returnable is None or heap.returnable_bytes is None:
            heap.returnable_bytes = None
        else:
            heap.returnable_bytes += returnable
    return heaps


def _returnable(segment: Mapping[str, Any], large_page: int | None) -> int | None:
    total: int = segment["total_size"]
    if not segment["allocated_size"]:
        return total
    if not segment.get("is_expandable"):
        return 0
    page = _SMALL_PAGE_BYTES if segment["segment_type"] == "small" else large_page
    return None if page is None else _whole_pages(segment["blocks"], page)


def _whole_pages(blocks: Iterable[Mapping[str, Any]], page: int) -> int:
    """Return the bytes of whole pages between blocks in use; free and pending neighbors merge before the release."""
    found = end = free_from = 0
    for block in blocks:
        if block["state"] == "active_allocated":
            found += max(0, end // page - -(-free_from // page))
            free_from = end + block["size"]
        end += block["size"]
    found += max(0, end // page - -(-free_from // page))
    return found * page
