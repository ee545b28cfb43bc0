"""Reads PyTorch's block-level picture of its heap (`torch.cuda.memory_snapshot`): what a clear would really return.

Only two kinds of heap need it: expandable segments, whose free memory goes back in whole pages, and private pools,
whose free memory does not go back while they live. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["returnable_bytes"]

_SMALL_PAGE_BYTES = 2 << 20
_LARGE_PAGE_BYTES = 20 << 20
_DEFAULT_POOL = (0, 0)


def returnable_bytes(segments: Iterable[Mapping[str, Any]]) -> dict[int, int]:
    """What `empty_cache()` would give back to the driver, in bytes by device index.

    A classic segment goes back when none of its blocks is in use. Of an expandable one, each whole page (2 MiB in the
    small pool, 20 MiB in the large one, counted from the segment's start) inside a free block goes back. Segments of
    private pools stay. Source: `release_cached_blocks` and `ExpandableSegment::unmap` in c10's
    CUDACachingAllocator.cpp.
    """
    returnable: dict[int, int] = {}
    for segment in segments:
        if tuple(segment.get("segment_pool_id", _DEFAULT_POOL)) != _DEFAULT_POOL:
            continue
        if segment.get("is_expandable"):
            found = _whole_pages(segment)
        else:
            found = 0 if any(block["state"] != "inactive" for block in segment["blocks"]) else segment["total_size"]
        returnable[segment["device"]] = returnable.get(segment["device"], 0) + found
    return returnable


def _whole_pages(segment: Mapping[str, Any]) -> int:
    page = _SMALL_PAGE_BYTES if segment["segment_type"] == "small" else _LARGE_PAGE_BYTES
    found = offset = 0
    for block in segment["blocks"]:
        end = offset + block["size"]
        if block["state"] == "inactive":
            first, last = -(-offset // page), end // page
            found += max(0, last - first) * page
        offset = end
    return found
