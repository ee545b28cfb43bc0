"""The allocator model with `expandable_segments:True`: each pool has one address range that is mapped page by page.

The model follows `try_allocate_expandable_block`, `map_block` and `unmap_block` in `c10/cuda/CUDACachingAllocator.cpp`.
Pages of 2 MiB (small pool) and 20 MiB (large pool) are mapped where a request needs them. A flush unmaps every whole
page without a live block. PyTorch counts no segments and no inactive splits in this mode, so those values stay 0. If a
request fits in several gaps, PyTorch may in rare cases choose a different gap than this model.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from gpumem_exporter.core.allocator_model import (
    LARGE_SEGMENT_BYTES,
    MIN_BLOCK_BYTES,
    SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
    Block,
    CachingAllocator,
    Driver,
    FreeList,
    split_block,
)

__all__ = ["ExpandableAllocator"]

ADDRESS_SPACE_BYTES = 1 << 40
"""The size of a pool's address range, which is larger than the memory of any device."""


class ExpandableAllocator(CachingAllocator):
    """The cache of one device in one process, with expandable segments.

    Args:
        driver: provides the memory of the pages.
    """

    def __init__(self, driver: Driver) -> None:
        super().__init__(driver)
        self._unmapped: list[tuple[int, Block]] = []
        for i, pool in enumerate((self._small, self._large)):
            block = Block(pool, i * ADDRESS_SPACE_BYTES, ADDRESS_SPACE_BYTES, mapped=False)
            self._unmapped.append((block.address, block))

    @property
    def reclaimable_bytes(self) -> int:
        """The bytes that `empty_cache` would release now: the whole pages inside free blocks."""
        total_bytes = 0
        for pool in (self._small, self._large):
            for _, _, block in pool:
                start, end = self._whole_pages(block)
                total_bytes += max(0, end - start)
        return total_bytes

    def _place(self, size_bytes: int) -> Block | None:
        pool = self._small if size_bytes <= SMALL_BYTES else self._large
        i = bisect_left(pool, (size_bytes,))
        if i < len(pool):
            # The size of a block that could grow includes the space into which it could grow.
            while i + 1 < len(pool) and _room_bytes(pool[i + 1][2]) < _room_bytes(pool[i][2]):
                i += 1
            block = pool.pop(i)[2]
        else:
            grown = self._grow(pool, size_bytes)
            if grown is None:
                return None
            block = grown
        if block.size_bytes - size_bytes >= MIN_BLOCK_BYTES:
            rest = split_block(block, size_bytes)
            insort(pool, (rest.size_bytes, rest.address, rest))
        return block

    def _grow(self, pool: FreeList, size_bytes: int) -> Block | None:
        """Map pages at the lowest address with enough room, and extend a free block directly before them."""
        found = self._find_room(pool, size_bytes)
        if found is None:
            return None
        if not found.mapped and not self._map(found, min(found.size_bytes, size_bytes)):
            return None
        while found.size_bytes < size_bytes:
            unmapped = found.after
            if unmapped is None or not self._map(unmapped, min(size_bytes - found.size_bytes, unmapped.size_bytes)):
                return None
            found = unmapped
        del pool[bisect_left(pool, (found.size_bytes, found.address))]
        return found

    def _find_room(self, pool: FreeList, size_bytes: int) -> Block | None:
        for _, block in self._unmapped:
            if block.pool is pool:
                first = block.before if block.before is not None and not block.before.used else block
                if _has_room(first, size_bytes):
                    return first
        return None

    def _map(self, block: Block, size_bytes: int) -> bool:
        """Map the start of an unmapped block, and merge it with its free neighbors."""
        page = self._page_bytes(block)
        mapped_bytes = -(-size_bytes // page) * page
        if not self._reserve(mapped_bytes):
            return False
        del self._unmapped[bisect_left(self._unmapped, (block.address,))]
        if mapped_bytes < block.size_bytes:
            rest = split_block(block, mapped_bytes, rest_mapped=False)
            insort(self._unmapped, (rest.address, rest))
        block.mapped = True
        self._merge(block)
        insort(block.pool, (block.size_bytes, block.address, block))
        return True

    def _unmap(self, block: Block) -> None:
        """Release the whole pages inside a free block; partial pages at either end stay mapped."""
        start, end = self._whole_pages(block)
        if start >= end:
            return
        pool = block.pool
        del pool[bisect_left(pool, (block.size_bytes, block.address))]
        if block.address < start:
            inner = split_block(block, start - block.address)
            insort(pool, (block.size_bytes, block.address, block))
            block = inner
        if block.address + block.size_bytes > end:
            tail = split_block(block, end - block.address)
            insort(pool, (tail.size_bytes, tail.address, tail))
        block.mapped = False
        self._release(block.size_bytes)
        self._merge(block)
        insort(self._unmapped, (block.address, block))

    def _return(self, block: Block) -> None:
        self.statistics.active_bytes -= block.size_bytes
        block.used = False
        self._merge(block)
        insort(block.pool, (block.size_bytes, block.address, block))

    def _take_out(self, block: Block) -> None:
        if block.mapped:
            del block.pool[bisect_left(block.pool, (block.size_bytes, block.address))]
        else:
            del self._unmapped[bisect_left(self._unmapped, (block.address,))]

    def _flush(self) -> None:
        self.finish_other_streams()
        self.statistics.cache_flushes += 1
        for pool in (self._small, self._large):
            for _, _, block in tuple(pool):
                self._unmap(block)

    def _page_bytes(self, block: Block) -> int:
        return SMALL_SEGMENT_BYTES if block.pool is self._small else LARGE_SEGMENT_BYTES

    def _whole_pages(self, block: Block) -> tuple[int, int]:
        """Return the start and end of the whole pages inside a block; there is none if end <= start."""
        page = self._page_bytes(block)
        base = block.address // ADDRESS_SPACE_BYTES * ADDRESS_SPACE_BYTES
        start = base + -(-(block.address - base) // page) * page
        end = base + (block.address + block.size_bytes - base) // page * page
        return start, end


def _room_bytes(block: Block) -> int:
    after = block.after
    return block.size_bytes + (after.size_bytes if after is not None and not after.mapped else 0)


def _has_room(block: Block | None, size_bytes: int) -> bool:
    while block is not None and not block.used and size_bytes > 0:
        size_bytes -= block.size_bytes
        block = block.after
    return size_bytes <= 0
