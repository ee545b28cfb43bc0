"""Adds up PyTorch's snapshot of its heap (`torch.cuda.memory_snapshot`): the bytes that a clear would release.

The statistics alone show this for classic segments in the default pool (see `reclaimable`). Three kinds of memory need
the snapshot: expandable segments, of which whole pages are released; private pools, which are released only once no
graph uses them; and blocks that wait for work on another stream, which a clear waits for. The functions are pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Tuple

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
    large_pages: Collection[int] = (LARGE_PAGE_BYTES,),
    dead_pools: Collection[PoolId] = (),
) -> dict[int, Heap]:
    """Return the heap of each device index, from the result of `torch.cuda.memory_snapshot()`.

    `large_pages` are the page sizes that expandable segments of the large pool may have: a segment keeps the size that
    was set when it was made. `dead_pools` are private pools that no graph uses.
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
        returnable = _returnable(segment, large_pages)
        if returnable is None or heap.returnable_bytes is None:
            heap.returnable_bytes = None
        else:
            heap.returnable_bytes += returnable
    return heaps


def _returnable(segment: Mapping[str, Any], large_pages: Collection[int]) -> int | None:
    total: int = segment["total_size"]
    if not segment["allocated_size"]:
        return total
    if not segment.get("is_expandable"):
        return 0
    pages = (_SMALL_PAGE_BYTES,) if segment["segment_type"] == "small" else large_pages
    # A segment consists of whole pages, so its page size divides its size.
    answers = {_whole_pages(segment["blocks"], page) for page in pages if total % page == 0}
    return answers.pop() if len(answers) == 1 else None


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
