"""Reads PyTorch's block-level picture of its heap (`torch.cuda.memory_snapshot`): what a clear would really return.

The statistics alone tell it for classic segments in the default pool (see `_reclaimable`). Three kinds of memory need
the picture: expandable segments, which go back in whole pages; private pools, which do not go back while they live; and
blocks that are free but for another stream's pending work, which a clear waits for. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["LARGE_PAGE_BYTES", "Heap", "PoolId", "read_heaps"]

PoolId = tuple[int, int]

LARGE_PAGE_BYTES = 20 << 20
"""A page of an expandable segment in the large pool, unless `large_segment_size_mb` says otherwise."""
_SMALL_PAGE_BYTES = 2 << 20
_DEFAULT_POOL = (0, 0)


@dataclass(slots=True)
class Heap:
    """One device's heap at the moment of the snapshot, in bytes."""

    reserved_bytes: int = 0
    allocated_bytes: int = 0
    private_bytes: int = 0
    """Reserved by private pools."""
    expandable: bool = False
    """Some of it is in expandable segments."""
    returnable_bytes: int | None = 0
    """What `empty_cache()` would give back to the driver; None where that cannot be told."""


def read_heaps(
    segments: Iterable[Mapping[str, Any]],
    *,
    large_pages: Collection[int] = (LARGE_PAGE_BYTES,),
    dead_pools: Collection[PoolId] = (),
) -> dict[int, Heap]:
    """Add up a snapshot, by device index.

    A classic segment goes back when none of its blocks is in use. Of an expandable one, each whole page inside of what
    is not in use goes back; pages count from the segment's start, since what is not mapped is whole pages too. A clear
    waits for blocks that are pending on another stream, and returns them as well. Segments of private pools stay as
    long as anything holds the pool. Source: `release_cached_blocks` and `ExpandableSegment::unmap` in c10's
    CUDACachingAllocator.cpp.

    Args:
        segments: of `torch.cuda.memory_snapshot()`.
        large_pages: the page sizes that the large pool's expandable segments may have: a segment keeps the one that was
            in force when it was made.
        dead_pools: private pools that nothing holds any more.
    """
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
    # What is mapped in one piece is whole pages: a size that does not divide it is not this segment's.
    answers = {_whole_pages(segment["blocks"], page) for page in pages if total % page == 0}
    return answers.pop() if len(answers) == 1 else None


def _whole_pages(blocks: Iterable[Mapping[str, Any]], page: int) -> int:
    """The whole pages between blocks that are in use; free and pending neighbours merge before they go."""
    found = end = free_from = 0
    for block in blocks:
        if block["state"] == "active_allocated":
            found += max(0, end // page - -(-free_from // page))
            free_from = end + block["size"]
        end += block["size"]
    found += max(0, end // page - -(-free_from // page))
    return found * page
