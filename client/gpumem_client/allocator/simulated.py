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
    """The simulated `torch.cuda.OutOfMemoryError`; it never leaves a simulation or a plan.

    `driver_bytes` is the size of the failed request to the driver: the allocation rounded up to a segment.
    """

    def __init__(self, message: str, driver_bytes: int) -> None:
        super().__init__(message)
        self.driver_bytes = driver_bytes


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
    """A piece of a segment; `before` and `after` are its neighbors in the segment."""

    __slots__ = ("address", "after", "before", "pool", "requested_bytes", "size_bytes", "used")

    def __init__(self, pool: FreeList, address: int, size_bytes: int) -> None:
        self.pool = pool
        self.address = address
        self.size_bytes = size_bytes
        self.requested_bytes = 0
        self.used = False
        self.before: Block | None = None
        self.after: Block | None = None

    @property
    def split(self) -> bool:
        """Whether the segment has other blocks."""
        return self.before is not None or self.after is not None


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
        self._next_address = 0

    @property
    def reclaimable_bytes(self) -> int:
        """The bytes that `empty_cache` would release now: the segments without a live block."""
        statistics = self.statistics
        return statistics.reserved_bytes - statistics.active_bytes - statistics.inactive_split_bytes

    def allocate(self, requested_bytes: int) -> Block:
        """Return a block of at least `requested_bytes`.

        Raises:
            SimulatedOutOfMemoryError: neither the cache nor the driver has enough memory, even after a flush.
        """
        size_bytes = _multiple(requested_bytes, MIN_BLOCK_BYTES)
        block = self._place(size_bytes)
        if block is None:
            self._flush()
            self.statistics.alloc_retries += 1
            block = self._place(size_bytes)
        if block is None:
            self.statistics.ooms += 1
            raise SimulatedOutOfMemoryError(f"tried to allocate {requested_bytes} bytes", _segment_bytes(size_bytes))
        return self._hand_out(block, requested_bytes)

    def capture_graph(self, requested_bytes: int) -> Block:
        """Capture a CUDA graph whose private pool keeps the returned block live until the process exits.

        Raises:
            SimulatedOutOfMemoryError: the driver does not have enough memory.
        """
        segment_bytes = _multiple(requested_bytes, SEGMENT_STEP_BYTES)
        block = self._new_segment([], segment_bytes)
        if block is None:
            self.statistics.ooms += 1
            raise SimulatedOutOfMemoryError(f"tried to allocate {requested_bytes} bytes for a graph", segment_bytes)
        self.statistics.private_pools_bytes += block.size_bytes
        return self._hand_out(block, requested_bytes)

    def free(self, block: Block) -> None:
        """Put a block into its pool, merged with its free neighbors."""
        self.statistics.allocated_bytes -= block.size_bytes
        self.statistics.requested_bytes -= block.requested_bytes
        self.statistics.active_bytes -= block.size_bytes
        block.used = False
        self._merge(block)
        if block.split:
            self.statistics.inactive_split_bytes += block.size_bytes
        insort(block.pool, (block.size_bytes, block.address, block))

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

    def _place(self, size_bytes: int) -> Block | None:
        """Take a block from the cache, otherwise from a new segment; None if the driver has no memory left."""
        pool = self._small if size_bytes <= SMALL_BYTES else self._large
        i = bisect_left(pool, (size_bytes,))
        if i < len(pool):
            block = pool.pop(i)[2]
            if block.split:
                self.statistics.inactive_split_bytes -= block.size_bytes
        else:
            fresh = self._new_segment(pool, _segment_bytes(size_bytes))
            if fresh is None:
                return None
            block = fresh
        rest_bytes = block.size_bytes - size_bytes
        if rest_bytes >= MIN_BLOCK_BYTES if pool is self._small else rest_bytes > SMALL_BYTES:
            rest = _split_block(block, size_bytes)
            insort(pool, (rest_bytes, rest.address, rest))
            self.statistics.inactive_split_bytes += rest_bytes
        return block

    def _new_segment(self, pool: FreeList, size_bytes: int) -> Block | None:
        if not self._reserve(size_bytes):
            return None
        self.statistics.segments_allocated += 1
        block = Block(pool, self._next_address, size_bytes)
        self._next_address += size_bytes
        return block

    def _merge(self, block: Block) -> None:
        before, after = block.before, block.after
        if before is not None and not before.used:
            self._take_out(before)
            block.address = before.address
            block.size_bytes += before.size_bytes
            block.before = before.before
            if block.before is not None:
                block.before.after = block
        if after is not None and not after.used:
            self._take_out(after)
            block.size_bytes += after.size_bytes
            block.after = after.after
            if block.after is not None:
                block.after.before = block

    def _take_out(self, block: Block) -> None:
        """Remove a free block of a split segment from its pool, so that it can be merged."""
        del block.pool[bisect_left(block.pool, (block.size_bytes, block.address))]
        self.statistics.inactive_split_bytes -= block.size_bytes

    def _flush(self) -> None:
        self.statistics.cache_flushes += 1
        for pool in (self._small, self._large):
            whole = [size_bytes for size_bytes, _, block in pool if not block.split]
            pool[:] = [entry for entry in pool if entry[2].split]
            self._release(sum(whole))
            self.statistics.segments_freed += len(whole)

    def _reserve(self, size_bytes: int) -> bool:
        if self.limit_bytes is not None and self.statistics.reserved_bytes + size_bytes > self.limit_bytes:
            return False
        if not self.driver.allocate(size_bytes):
            return False
        self.statistics.reserved_bytes += size_bytes
        self.statistics.reserved_peak_bytes = max(self.statistics.reserved_peak_bytes, self.statistics.reserved_bytes)
        return True

    def _release(self, size_bytes: int) -> None:
        self.driver.free(size_bytes)
        self.statistics.reserved_bytes -= size_bytes

    def _hand_out(self, block: Block, requested_bytes: int) -> Block:
        statistics = self.statistics
        block.used = True
        block.requested_bytes = requested_bytes
        statistics.requested_bytes += requested_bytes
        statistics.allocated_bytes += block.size_bytes
        statistics.active_bytes += block.size_bytes
        statistics.allocated_peak_bytes = max(statistics.allocated_peak_bytes, statistics.allocated_bytes)
        return block


def _split_block(block: Block, size_bytes: int) -> Block:
    """Shorten a block to `size_bytes` and return the rest, its new neighbor, which is in no pool yet."""
    rest = Block(block.pool, block.address + size_bytes, block.size_bytes - size_bytes)
    rest.before, rest.after = block, block.after
    if block.after is not None:
        block.after.before = rest
    block.after = rest
    block.size_bytes = size_bytes
    return rest


def _segment_bytes(size_bytes: int) -> int:
    if size_bytes <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size_bytes < OWN_SEGMENT_BYTES:
        return LARGE_SEGMENT_BYTES
    return _multiple(size_bytes, SEGMENT_STEP_BYTES)


def _multiple(size_bytes: int, step_bytes: int) -> int:
    """Return the next multiple of a step; at least one step."""
    return max(step_bytes, -(-size_bytes // step_bytes) * step_bytes)
