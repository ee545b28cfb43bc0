"""Follows the allocator's history backward from a snapshot: when each block was allocated and freed, and its size.

The history has the requested size of a block, not its size. The allocator rounds requests up to 512 bytes, and leaves
the rest of a free block to a request if the rest is small: `round_size` and `should_split` in c10's
CUDACachingAllocator.cpp have these rules. The functions are pure.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpumem_client.profile.heap_blocks import Block, DeviceBlocks, Stacks, consumed, pool_name, resting

BEFORE = -1
"""The index of what happened before the first entry."""
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


class Lifetime:
    """One allocation of a block."""

    __slots__ = (
        *("address", "size_bytes", "requested_bytes", "pool", "stack"),
        *("allocated_at", "allocated_us", "freed_at", "freed_us"),
    )

    def __init__(
        self, address: int, size_bytes: int, requested_bytes: int, pool: str, stack: int | None = None
    ) -> None:
        self.address = address
        self.size_bytes = size_bytes
        """0 until it is known."""
        self.requested_bytes = requested_bytes
        self.pool = pool
        self.stack = stack
        self.allocated_at = BEFORE
        """The index of the entry."""
        self.allocated_us = 0
        """Microseconds since the epoch; 0 if it is not known."""
        self.freed_at: int | None = None
        """None if it is still allocated."""
        self.freed_us: int | None = None

    def lived_at(self, index: int) -> bool:
        """Whether it was allocated right after this entry."""
        return self.allocated_at <= index and (self.freed_at is None or self.freed_at > index)


@dataclass
class History:
    """The allocations of a device that lived at some time of the history."""

    lifetimes: list[Lifetime]
    exact: bool
    """Whether the entries, the sizes and the snapshots agree."""

    def highest(self) -> tuple[int, int]:
        """Return the most bytes that were allocated at one time, and the index of the entry after which they were."""
        changes: list[tuple[int, int]] = []
        at_start = 0
        for life in self.lifetimes:
            size = life.size_bytes
            if life.allocated_at == BEFORE:
                at_start += size
            else:
                changes.append((life.allocated_at, size))
            if life.freed_at is not None:
                changes.append((life.freed_at, -size))
        changes.sort()
        now, highest, index = at_start, at_start, BEFORE
        for at, change in changes:
            now += change
            if now > highest:
                highest, index = now, at
        return highest, index


def living(blocks: DeviceBlocks, earlier: DeviceBlocks) -> list[Lifetime]:
    """Return the allocated blocks without a history. `earlier` are the blocks of an earlier snapshot.

    What was not allocated then, or with another size, has a time of allocation in the far future.
    """
    lifetimes = []
    for address, block in resting(blocks.allocated.items()):
        life = Lifetime(address, block.size_bytes, block.requested_bytes, block.pool, block.stack)
        before = earlier.allocated.get(address)
        if before is None or before.requested_bytes != block.requested_bytes:
            life.allocated_us = _FAR_FUTURE
        lifetimes.append(life)
    return lifetimes


def between_snapshots(entries: list[dict[str, Any]], *, from_first: bool) -> list[dict[str, Any]] | None:
    """Return the entries up to the last snapshot, also from the first one on if that is requested; None without one.

    A snapshot adds an entry, at the place that its blocks belong to.
    """
    snapshots = [index for index, entry in enumerate(entries) if entry["action"] == "snapshot"]
    if not snapshots or (from_first and len(snapshots) < 2):
        return None
    return entries[snapshots[0] + 1 if from_first else 0 : snapshots[-1]]


def read_history(
    entries: list[dict[str, Any]],
    end: DeviceBlocks,
    stacks: Stacks,
    rules: SplitRules,
    start: DeviceBlocks | None = None,
) -> History:
    """Return the allocations of one device between two snapshots, or up to a snapshot if `start` is None.

    Empties the entries.
    """
    reader = _Reader(end, stacks, rules)
    index = len(entries)
    for entry in resting(consumed(entries)):
        index -= 1
        reader.undo(index, entry)
    reader.reach(start)
    return History(reader.lifetimes, reader.exact and rules.known)


class _Reader:
    """The heap at one place of the history, from its end to its start."""

    def __init__(self, end: DeviceBlocks, stacks: Stacks, rules: SplitRules) -> None:
        self.lifetimes: list[Lifetime] = []
        self.exact = True
        self._stacks = stacks
        self._rules = rules
        self._in_use: dict[int, Lifetime] = {}
        self._pending: set[int] = set()
        self._size_when_freed: dict[int, int] = {}
        self._starts: list[int] = []
        self._ends: dict[int, int] = {}
        # For each classic segment, the addresses of its large blocks in use.
        self._large: dict[int, set[int]] = {}
        for address, size in end.classic_segments.items():
            self._add_segment(address, size)
        for blocks in (end.allocated, end.pending):
            for address, block in blocks.items():
                life = Lifetime(address, block.size_bytes, block.requested_bytes, block.pool, block.stack)
                self._occupy(life)
                if blocks is end.pending:
                    self._pending.add(address)
                else:
                    self.lifetimes.append(life)

    def undo(self, index: int, entry: Mapping[str, Any]) -> None:
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
        elif action == "segment_alloc":
            self._remove_segment(address)
        elif action == "segment_free":
            self._add_segment(address, entry["size"])

    def reach(self, start: DeviceBlocks | None) -> None:
        """Compare with the blocks at the start of the history, and take their sizes."""
        for address in self._pending:
            self._in_use.pop(address, None)
        if start is not None:
            self.exact = self.exact and start.allocated.keys() == self._in_use.keys()
        for address, life in self._in_use.items():
            known: Block | None = None if start is None else start.allocated.get(address)
            if known is not None:
                self.exact = self.exact and life.size_bytes in (0, known.size_bytes)
                life.size_bytes = life.size_bytes or known.size_bytes
                life.stack = known.stack if life.stack is None else life.stack
            elif not life.size_bytes:
                # Its allocation is older than the history. Between the block and the next one, a rest that was not
                # split off is at most `REST_BYTES_MAX` long, and no other large block would fit there.
                sizes = (self._size(address, life.requested_bytes), self._size_when_freed.get(address, 0))
                life.size_bytes = max(sizes)

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
        segment = self._segment(address)
        if segment is not None:
            self._large[segment].discard(address)

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
        if not life.size_bytes:
            self._size_when_freed[address] = self._size(address, life.requested_bytes)

    def _occupy(self, life: Lifetime) -> None:
        self._in_use[life.address] = life
        if life.requested_bytes > _SMALL_BYTES:
            segment = self._segment(life.address)
            if segment is not None:
                self._large[segment].add(life.address)

    def _size(self, address: int, requested_bytes: int) -> int:
        """Return the size of a block, if its neighbors now are its neighbors at its allocation."""
        rounded = max(1, -(-requested_bytes // _ROUNDING_BYTES)) * _ROUNDING_BYTES
        segment = self._segment(address)
        if rounded <= _SMALL_BYTES or self._rules.expandable or segment is None:
            return rounded
        following = [each for each in self._large[segment] if each > address]
        room = min(following, default=self._ends[segment]) - address
        most = self._rules.max_split_bytes
        split = room - rounded > REST_BYTES_MAX and (most is None or rounded < most)
        return rounded if split else room

    def _segment(self, address: int) -> int | None:
        """Return the start of the classic segment of an address."""
        place = bisect_right(self._starts, address) - 1
        if place < 0 or address >= self._ends[self._starts[place]]:
            return None
        return self._starts[place]

    def _add_segment(self, address: int, size_bytes: int) -> None:
        insort(self._starts, address)
        self._ends[address] = address + size_bytes
        self._large[address] = set()

    def _remove_segment(self, address: int) -> None:
        if address in self._ends:
            self._starts.remove(address)
            del self._ends[address], self._large[address]
