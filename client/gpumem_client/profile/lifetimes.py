"""Follows the allocator's history backward from a snapshot: when each block was allocated and freed, and its size.

The history has the requested size of a block, not its size. The allocator rounds requests up to 512 bytes, and leaves
the rest of a free block to a request if the rest is small: `round_size` and `should_split` in c10's
CUDACachingAllocator.cpp have these rules. The functions are pure.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpumem_client.profile.heap_blocks import BEFORE, DeviceBlocks, Lifetime, Stacks, consumed, pool_name, resting

_ROUNDING_BYTES = 512
# The largest request in the small pool.
_SMALL_BYTES = 1 << 20
REST_BYTES_MAX = 1 << 20
"""The largest rest of a free block in a classic segment that is not split off."""
_FAR_FUTURE = 1 << 62


@dataclass(frozen=True)
class SplitRules:
    """What the allocator's settings change about the sizes of blocks."""

    expandable: bool = False
    max_split_bytes: int | None = None
    known: bool = True
    """Whether sizes can be derived: not with `roundup_power2_divisions`."""


def living(blocks: DeviceBlocks, earlier: DeviceBlocks) -> list[Lifetime]:
    """Return the allocated blocks without a history. `earlier` are the blocks of an earlier snapshot.

    What was not allocated then, or with another size, has a time of allocation in the far future.
    """
    for life in resting(blocks.allocated.values()):
        if not earlier.has(life):
            life.allocated_at, life.allocated_us = BEFORE + 1, _FAR_FUTURE
    return list(blocks.allocated.values())


def between_snapshots(entries: list[dict[str, Any]], *, from_first: bool) -> list[dict[str, Any]] | None:
    """Return the entries up to the last snapshot, also from the first one on if that is requested; None without one.

    A snapshot adds an entry, at the place that its blocks belong to.
    """
    snapshots = [index for index, entry in enumerate(entries) if entry["action"] == "snapshot"]
    if not snapshots or (from_first and len(snapshots) < 2):
        return None
    return entries[snapshots[0] + 1 if from_first else 0 : snapshots[-1]]


class History:
    """The allocations of one device between two snapshots, or up to a snapshot if `start` is None.

    Empties the entries.
    """

    def __init__(
        self,
        entries: list[dict[str, Any]],
        end: DeviceBlocks,
        stacks: Stacks,
        rules: SplitRules,
        start: DeviceBlocks | None = None,
    ) -> None:
        self.lifetimes = list(end.allocated.values())
        self.exact = rules.known
        """Whether the entries, the sizes and the snapshots agree."""
        self._stacks = stacks
        self._rules = rules
        # The heap at one place of the history, from its end to its start.
        self._in_use: dict[int, Lifetime] = {}
        self._pending = set(end.pending)
        # Sorted: the large blocks in use, and the classic segments with the addresses after them.
        self._large: list[int] = []
        self._segments = sorted((address, address + size) for address, size in end.classic_segments.items())
        for life in (*self.lifetimes, *end.pending.values()):
            self._occupy(life)
        index = len(entries)
        for entry in resting(consumed(entries)):
            index -= 1
            self._undo(index, entry)
        self._reach(start)

    def highest(self) -> tuple[int, int]:
        """Return the most bytes that were allocated at one time, and the index of the entry after which they were."""
        changes: list[tuple[int, int]] = []
        for life in self.lifetimes:
            changes.append((life.allocated_at, life.size_bytes))
            if life.freed_at is not None:
                changes.append((life.freed_at, -life.size_bytes))
        now, highest, index = 0, 0, BEFORE
        for at, change in sorted(changes):
            now += change
            if now > highest:
                highest, index = now, at
        return highest, index

    def _undo(self, index: int, entry: Mapping[str, Any]) -> None:
        """Go back over one entry."""
        action = entry["action"]
        address: int = entry.get("addr", 0)
        if action == "alloc":
            self._undo_allocation(index, entry, address)
        elif action == "free_requested":
            self._undo_free(index, entry, address)
        elif action == "free_completed":
            self.exact = self.exact and address not in self._in_use
            self._occupy(Lifetime(address, 0, entry["size"], pool_name(entry.get("pool_id"))))
            self._pending.add(address)
        elif action == "segment_alloc" and (address, address + entry["size"]) in self._segments:
            self._segments.remove((address, address + entry["size"]))
        elif action == "segment_free":
            insort(self._segments, (address, address + entry["size"]))

    def _reach(self, start: DeviceBlocks | None) -> None:
        """Compare with the blocks at the start of the history, and take their sizes."""
        for address in self._pending:
            self._in_use.pop(address, None)
        if start is not None:
            self.exact = self.exact and start.allocated.keys() == self._in_use.keys()
        for address, life in self._in_use.items():
            known = None if start is None else start.allocated.get(address)
            if known is not None:
                self.exact = self.exact and life.size_bytes in (0, known.size_bytes)
                life.size_bytes = life.size_bytes or known.size_bytes
                life.stack = known.stack if life.stack is None else life.stack
            # Otherwise its allocation is older than the history. Before the next block may be a rest that was not split
            # off, of at most `REST_BYTES_MAX`.
            life.size_bytes = life.size_bytes or self._size(address, life.requested_bytes)

    def _undo_allocation(self, index: int, entry: Mapping[str, Any], address: int) -> None:
        life = self._in_use.get(address)
        if life is None or address in self._pending:
            self.exact = False
            return
        size = self._size(address, entry["size"])
        # The sizes of the blocks that are still in use prove the rules.
        self.exact = self.exact and life.size_bytes in (0, size)
        life.size_bytes = life.size_bytes or size
        life.allocated_at, life.allocated_us = index, entry.get("time_us", 0)
        stack = self._stacks.number(entry.get("frames", ()))
        life.stack = life.stack if stack is None else stack
        del self._in_use[address]
        if life.requested_bytes > _SMALL_BYTES:
            del self._large[bisect_left(self._large, address)]

    def _undo_free(self, index: int, entry: Mapping[str, Any], address: int) -> None:
        life = self._in_use.get(address)
        if life is None or address not in self._pending:
            self.exact = False
            return
        self._pending.discard(address)
        life.freed_at, life.freed_us = index, entry.get("time_us")
        # Without stacks for frees, torch records the stack of the allocation.
        life.stack = self._stacks.number(entry.get("frames", ())) if life.stack is None else life.stack
        self.lifetimes.append(life)

    def _occupy(self, life: Lifetime) -> None:
        self._in_use[life.address] = life
        if life.requested_bytes > _SMALL_BYTES:
            insort(self._large, life.address)

    def _size(self, address: int, requested_bytes: int) -> int:
        """Return the size of a block, if its neighbors now are its neighbors at its allocation."""
        rounded = max(1, -(-requested_bytes // _ROUNDING_BYTES)) * _ROUNDING_BYTES
        place = bisect_right(self._segments, (address + 1,)) - 1
        end = self._segments[place][1] if place >= 0 else 0
        if rounded <= _SMALL_BYTES or self._rules.expandable or end <= address:
            return rounded  # not in a classic segment of the large pool
        following = bisect_right(self._large, address)
        room = min(end, *self._large[following : following + 1], end) - address
        most = self._rules.max_split_bytes
        split = room - rounded > REST_BYTES_MAX and (most is None or rounded < most)
        return rounded if split else room
