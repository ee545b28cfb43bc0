"""A small model of PyTorch's caching allocator: one device of one process, with classic segments.

The demo simulates its processes with this model, and the planner replays a job with it.

The model implements the rules of `c10/cuda/CUDACachingAllocator.cpp` that affect the statistics:

- Sizes are rounded up to 512 bytes.
- Requests up to 1 MiB use 2 MiB segments. Larger requests use 20 MiB segments. A request of 10 MiB or more gets its own
  segment, rounded up to 2 MiB.
- A pool uses best fit. Blocks are split, and freed blocks are merged with free neighbors.
- When the driver has no memory left, the allocator flushes the cache once and retries.

Streams are not modeled. The model is not thread-safe.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import List, Protocol, Tuple

MIB = 1 << 20
MIN_BLOCK_BYTES = 512
SMALL_BYTES = MIB
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
OWN_SEGMENT_BYTES = 10 * MIB
SEGMENT_STEP_BYTES = 2 * MIB


class SimulatedOutOfMemoryError(Exception):
    """The simulated `torch.cuda.OutOfMemoryError`; it never leaves a simulation or a plan."""


class Driver(Protocol):
    """The memory of a device, shared by all processes on it."""

    def allocate(self, size_bytes: int) -> bool:
        """Allocate memory of the device; returns False if there is not enough."""

    def free(self, size_bytes: int) -> None:
        """Release memory of the device."""


@dataclass
class AllocatorStatistics:
    """The values of `torch.cuda.memory_stats` (`.all.`), in bytes and counts."""

    allocated_bytes: int = 0
    reserved_bytes: int = 0
    active_bytes: int = 0
    inactive_split_bytes: int = 0
    requested_bytes: int = 0
    allocated_peak_bytes: int = 0
    reserved_peak_bytes: int = 0
    peak_resets: int = 0
    private_pools_bytes: int = 0
    alloc_retries: int = 0
    ooms: int = 0
    segments_allocated: int = 0
    segments_freed: int = 0
    cache_flushes: int = 0


class Block:
    """A piece of a segment."""

    __slots__ = ("address", "pool", "requested_bytes", "segment_bytes", "size_bytes")

    def __init__(self, pool: FreeList, address: int, size_bytes: int, segment_bytes: int) -> None:
        self.pool = pool
        self.address = address
        self.size_bytes = size_bytes
        self.requested_bytes = 0
        self.segment_bytes = segment_bytes

    @property
    def split(self) -> bool:
        """Whether the segment has other blocks."""
        return self.size_bytes < self.segment_bytes


FreeList = List[Tuple[int, int, Block]]
"""Free blocks as (size, address, block), sorted: the first block that is large enough is the best fit."""


class CachingAllocator:
    """The cache of one device in one process. The driver provides the memory of the segments."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.statistics = AllocatorStatistics()
        self.limit_bytes: int | None = None
        """The maximum of reserved bytes (the process' memory fraction). None if only the device limits the process."""
        self._small: FreeList = []
        self._large: FreeList = []
        # The free blocks by their first address, and by the address after them.
        self._starts: dict[int, Block] = {}
        self._ends: dict[int, Block] = {}
        self._next_address = 0

    @property
    def reclaimable_bytes(self) -> int:
        """The bytes that `empty_cache` would release now: the segments without a live block."""
        statistics = self.statistics
        return statistics.reserved_bytes - statistics.active_bytes - statistics.inactive_split_bytes

    def allocate(self, requested_bytes: int, *, private: bool = False) -> Block:
        """Return a block of at least `requested_bytes`.

        A `private` block is in a pool of its own, like the memory of a CUDA graph. It must not be freed.

        Raises:
            SimulatedOutOfMemoryError: neither the cache nor the driver has enough memory, even after a flush.
        """
        statistics, size_bytes = self.statistics, _multiple(requested_bytes, MIN_BLOCK_BYTES)
        pool = [] if private else self._small if size_bytes <= SMALL_BYTES else self._large
        block = self._place(pool, size_bytes)
        if block is None:
            self._flush()
            statistics.alloc_retries += 1
            block = self._place(pool, size_bytes)
        if block is None:
            statistics.ooms += 1
            raise SimulatedOutOfMemoryError(f"tried to allocate {requested_bytes} bytes")
        block.requested_bytes = requested_bytes
        statistics.requested_bytes += requested_bytes
        statistics.allocated_bytes += block.size_bytes
        statistics.active_bytes += block.size_bytes
        statistics.allocated_peak_bytes = max(statistics.allocated_peak_bytes, statistics.allocated_bytes)
        statistics.private_pools_bytes += block.segment_bytes if private else 0
        return block

    def free(self, block: Block) -> None:
        """Put a block into its pool, merged with its free neighbors."""
        self.statistics.allocated_bytes -= block.size_bytes
        self.statistics.requested_bytes -= block.requested_bytes
        self.statistics.active_bytes -= block.size_bytes
        for neighbor in (self._ends.get(block.address), self._starts.get(block.address + block.size_bytes)):
            if neighbor is not None:
                self._take(neighbor)
                block.address = min(block.address, neighbor.address)
                block.size_bytes += neighbor.size_bytes
        self._put(block)

    def empty_cache(self) -> int:
        """Release every segment without a live block to the driver; returns the released bytes."""
        before = self.statistics.reserved_bytes
        self._flush()
        return before - self.statistics.reserved_bytes

    def reset_peaks(self) -> None:
        """Set the peaks to the current values."""
        self.statistics.peak_resets += 1
        self.statistics.allocated_peak_bytes = self.statistics.allocated_bytes
        self.statistics.reserved_peak_bytes = self.statistics.reserved_bytes

    def close(self) -> None:
        """Release all segments, live or not, because the process exits. The object must not be used afterwards."""
        self._release(self.statistics.reserved_bytes)

    def _place(self, pool: FreeList, size_bytes: int) -> Block | None:
        """Take a block from the cache, otherwise from a new segment; None if the driver has no memory left."""
        i = bisect_left(pool, (size_bytes,))
        if i < len(pool):
            block = pool[i][2]
            self._take(block)
        else:
            segment_bytes = _segment_bytes(size_bytes)
            if not self._reserve(segment_bytes):
                return None
            block = Block(pool, self._next_address, segment_bytes, segment_bytes)
            # With a gap, so that blocks of two segments are no neighbors.
            self._next_address += segment_bytes + MIN_BLOCK_BYTES
        rest_bytes = block.size_bytes - size_bytes
        if rest_bytes >= MIN_BLOCK_BYTES if pool is self._small else rest_bytes > SMALL_BYTES:
            block.size_bytes = size_bytes
            self._put(Block(pool, block.address + size_bytes, rest_bytes, block.segment_bytes))
        return block

    def _put(self, block: Block) -> None:
        """Add a free block to its pool."""
        insort(block.pool, (block.size_bytes, block.address, block))
        self._starts[block.address] = self._ends[block.address + block.size_bytes] = block
        if block.split:
            self.statistics.inactive_split_bytes += block.size_bytes

    def _take(self, block: Block) -> None:
        """Remove a free block from its pool."""
        del block.pool[bisect_left(block.pool, (block.size_bytes, block.address))]
        del self._starts[block.address], self._ends[block.address + block.size_bytes]
        if block.split:
            self.statistics.inactive_split_bytes -= block.size_bytes

    def _flush(self) -> None:
        self.statistics.cache_flushes += 1
        for block in [block for _, _, block in (*self._small, *self._large) if not block.split]:
            self._take(block)
            self._release(block.size_bytes)
            self.statistics.segments_freed += 1

    def _reserve(self, size_bytes: int) -> bool:
        statistics = self.statistics
        if self.limit_bytes is not None and statistics.reserved_bytes + size_bytes > self.limit_bytes:
            return False
        if not self.driver.allocate(size_bytes):
            return False
        statistics.segments_allocated += 1
        statistics.reserved_bytes += size_bytes
        statistics.reserved_peak_bytes = max(statistics.reserved_peak_bytes, statistics.reserved_bytes)
        return True

    def _release(self, size_bytes: int) -> None:
        self.driver.free(size_bytes)
        self.statistics.reserved_bytes -= size_bytes


def _segment_bytes(size_bytes: int) -> int:
    if size_bytes <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size_bytes < OWN_SEGMENT_BYTES:
        return LARGE_SEGMENT_BYTES
    return _multiple(size_bytes, SEGMENT_STEP_BYTES)


def _multiple(size_bytes: int, step_bytes: int) -> int:
    """Return the next multiple of a step; at least one step."""
    return max(step_bytes, -(-size_bytes // step_bytes) * step_bytes)
