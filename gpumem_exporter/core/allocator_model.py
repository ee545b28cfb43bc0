"""A small model of PyTorch's caching allocator: one device of one process, with classic segments.

The demo's processes live on it, and the planner replays a job on it.

What is here is what the figures depend on, taken from `c10/cuda/CUDACachingAllocator.cpp`: sizes are rounded to 512
bytes; requests up to 1 MiB come from 2 MiB segments, larger ones from 20 MiB segments, from 10 MiB on from a segment of
their own in steps of 2 MiB; best fit within a pool; blocks are split, and merged with free neighbours when they are
freed; when the driver refuses, the whole cache is flushed once and the request tried again. Streams are not modelled,
but for blocks that another stream still uses.

Not thread-safe.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Protocol, TypeAlias

__all__ = ["Block", "CachingAllocator", "Driver", "Figures", "SimulatedOutOfMemoryError", "cut", "rounded_bytes"]

MIB = 1 << 20
MIN_BLOCK_BYTES = 512
SMALL_BYTES = MIB
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
OWN_SEGMENT_BYTES = 10 * MIB
SEGMENT_STEP_BYTES = 2 * MIB


class SimulatedOutOfMemoryError(Exception):
    """What `torch.cuda.OutOfMemoryError` is to a real program; it never leaves a simulation or a plan.

    Args:
        message: what failed.
        driver_bytes: what was asked of the driver in vain: the request, rounded up to a segment.
    """

    def __init__(self, message: str, driver_bytes: int) -> None:
        super().__init__(message)
        self.driver_bytes = driver_bytes


class Driver(Protocol):
    """The device's memory, shared by all processes on it."""

    def take(self, size_bytes: int) -> bool:
        """Take memory of the device; False when there is not enough."""

    def give(self, size_bytes: int) -> None:
        """Give memory back to the device."""


@dataclass(slots=True)
class Figures:
    """What `torch.cuda.memory_stats` says (`.all.`), bytes and counts."""

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
    """A piece of a segment; `before` and `after` are its neighbours in the segment."""

    __slots__ = ("address", "after", "before", "mapped", "pool", "requested_bytes", "size_bytes", "used")

    def __init__(self, pool: FreeList, address: int, size_bytes: int, *, mapped: bool = True) -> None:
        self.pool = pool
        self.address = address
        self.size_bytes = size_bytes
        self.requested_bytes = 0
        self.used = False
        self.mapped = mapped
        self.before: Block | None = None
        self.after: Block | None = None

    @property
    def split(self) -> bool:
        """The block is not its segment's only one."""
        return self.before is not None or self.after is not None


FreeList: TypeAlias = list[tuple[int, int, Block]]
"""Free blocks as (size, address, block), in order: the first that is large enough is the best fit."""


class CachingAllocator:
    """The cache of one device in one process.

    Args:
        driver: where segments come from and go back to.
    """

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.figures = Figures()
        self.limit_bytes: int | None = None
        """What may be reserved at most: the process' memory fraction. None where only the device limits it."""
        self._small: FreeList = []
        self._large: FreeList = []
        self._next_address = 0
        self._elsewhere: list[Block] = []

    @property
    def reclaimable_bytes(self) -> int:
        """What `empty_cache` would give back now: the segments that hold no live block."""
        figures = self.figures
        return figures.reserved_bytes - figures.active_bytes - figures.inactive_split_bytes

    def allocate(self, requested_bytes: int) -> Block:
        """Hand out a block of at least `requested_bytes`.

        Raises:
            SimulatedOutOfMemoryError: neither the cache nor the driver has it, not even after a flush.
        """
        self.settle()
        size_bytes = rounded_bytes(requested_bytes)
        block = self._place(size_bytes)
        if block is None:
            self._flush()
            self.figures.alloc_retries += 1
            block = self._place(size_bytes)
        if block is None:
            self.figures.ooms += 1
            raise SimulatedOutOfMemoryError(f"tried to allocate {requested_bytes} bytes", _segment_bytes(size_bytes))
        return self._hand_out(block, requested_bytes)

    def capture_graph(self, requested_bytes: int) -> None:
        """Capture a CUDA graph whose private pool holds that much, in live blocks, for as long as the process lives.

        Raises:
            SimulatedOutOfMemoryError: the driver does not have it.
        """
        segment_bytes = -(-requested_bytes // SEGMENT_STEP_BYTES) * SEGMENT_STEP_BYTES
        block = self._new_segment([], segment_bytes)
        if block is None:
            self.figures.ooms += 1
            raise SimulatedOutOfMemoryError(f"tried to allocate {requested_bytes} bytes for a graph", segment_bytes)
        self.figures.private_pools_bytes += block.size_bytes
        self._hand_out(block, requested_bytes)

    def free(self, block: Block, *, used_elsewhere: bool = False) -> None:
        """Take a block back. One that another stream still uses stays active until the next allocation settles it."""
        self.figures.allocated_bytes -= block.size_bytes
        self.figures.requested_bytes -= block.requested_bytes
        if used_elsewhere:
            self._elsewhere.append(block)
        else:
            self._return(block)

    def settle(self) -> None:
        """The other streams are done: what they used is free now."""
        while self._elsewhere:
            self._return(self._elsewhere.pop())

    def empty_cache(self) -> int:
        """Give every segment that holds no live block back to the driver; returns the bytes given back."""
        before = self.figures.reserved_bytes
        self._flush()
        return before - self.figures.reserved_bytes

    def reset_peaks(self) -> None:
        """Let the peaks start from what is held now."""
        self.figures.peak_resets += 1
        self.figures.allocated_peak_bytes = self.figures.allocated_bytes
        self.figures.reserved_peak_bytes = self.figures.reserved_bytes

    def close(self) -> None:
        """The process ends: everything goes back to the driver, live or not. Ask nothing of this object afterwards."""
        self._release(self.figures.reserved_bytes)

    def _place(self, size_bytes: int) -> Block | None:
        """A used block from the cache, else from a new segment; None when the driver refuses."""
        pool = self._small if size_bytes <= SMALL_BYTES else self._large
        i = bisect_left(pool, (size_bytes,))
        if i < len(pool):
            block = pool.pop(i)[2]
            if block.split:
                self.figures.inactive_split_bytes -= block.size_bytes
        else:
            fresh = self._new_segment(pool, _segment_bytes(size_bytes))
            if fresh is None:
                return None
            block = fresh
        rest_bytes = block.size_bytes - size_bytes
        if rest_bytes >= MIN_BLOCK_BYTES if pool is self._small else rest_bytes > SMALL_BYTES:
            rest = cut(block, size_bytes)
            insort(pool, (rest_bytes, rest.address, rest))
            self.figures.inactive_split_bytes += rest_bytes
        return block

    def _new_segment(self, pool: FreeList, size_bytes: int) -> Block | None:
        if not self._reserve(size_bytes):
            return None
        self.figures.segments_allocated += 1
        block = Block(pool, self._next_address, size_bytes)
        self._next_address += size_bytes
        return block

    def _return(self, block: Block) -> None:
        """Put a block into its pool, merged with its free neighbours."""
        self.figures.active_bytes -= block.size_bytes
        block.used = False
        self._merge(block)
        if block.split:
            self.figures.inactive_split_bytes += block.size_bytes
        insort(block.pool, (block.size_bytes, block.address, block))

    def _merge(self, block: Block) -> None:
        before, after = block.before, block.after
        if before is not None and not before.used and before.mapped == block.mapped:
            self._take_out(before)
            block.address = before.address
            block.size_bytes += before.size_bytes
            block.before = before.before
            if block.before is not None:
                block.before.after = block
        if after is not None and not after.used and after.mapped == block.mapped:
            self._take_out(after)
            block.size_bytes += after.size_bytes
            block.after = after.after
            if block.after is not None:
                block.after.before = block

    def _take_out(self, block: Block) -> None:
        """Take a free block, part of a split segment, out of its pool, to be merged."""
        del block.pool[bisect_left(block.pool, (block.size_bytes, block.address))]
        self.figures.inactive_split_bytes -= block.size_bytes

    def _flush(self) -> None:
        self.settle()
        self.figures.cache_flushes += 1
        for pool in (self._small, self._large):
            whole = [size_bytes for size_bytes, _, block in pool if not block.split]
            pool[:] = [entry for entry in pool if entry[2].split]
            self._release(sum(whole))
            self.figures.segments_freed += len(whole)

    def _reserve(self, size_bytes: int) -> bool:
        if self.limit_bytes is not None and self.figures.reserved_bytes + size_bytes > self.limit_bytes:
            return False
        if not self.driver.take(size_bytes):
            return False
        self.figures.reserved_bytes += size_bytes
        self.figures.reserved_peak_bytes = max(self.figures.reserved_peak_bytes, self.figures.reserved_bytes)
        return True

    def _release(self, size_bytes: int) -> None:
        self.driver.give(size_bytes)
        self.figures.reserved_bytes -= size_bytes

    def _hand_out(self, block: Block, requested_bytes: int) -> Block:
        figures = self.figures
        block.used = True
        block.requested_bytes = requested_bytes
        figures.requested_bytes += requested_bytes
        figures.allocated_bytes += block.size_bytes
        figures.active_bytes += block.size_bytes
        figures.allocated_peak_bytes = max(figures.allocated_peak_bytes, figures.allocated_bytes)
        return block


def cut(block: Block, size_bytes: int, *, rest_mapped: bool = True) -> Block:
    """Shorten a block to `size_bytes`; returns the rest, its new neighbour, which is in no pool yet."""
    rest = Block(block.pool, block.address + size_bytes, block.size_bytes - size_bytes, mapped=rest_mapped)
    rest.before, rest.after = block, block.after
    if block.after is not None:
        block.after.before = rest
    block.after = rest
    block.size_bytes = size_bytes
    return rest


def rounded_bytes(requested_bytes: int) -> int:
    """The size of the block that a request gets: the next multiple of 512 bytes."""
    return max(MIN_BLOCK_BYTES, -(-requested_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES)


def _segment_bytes(size_bytes: int) -> int:
    if size_bytes <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size_bytes < OWN_SEGMENT_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-size_bytes // SEGMENT_STEP_BYTES) * SEGMENT_STEP_BYTES
