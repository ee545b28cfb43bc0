"""The blocks of the allocator's heap, from torch's snapshot, and the stacks that were recorded with them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from gpumem_client.profile.profile_types import Frame
from gpumem_client.wire.protocol import MAX_TEXT_LENGTH

_Item = TypeVar("_Item")

_WORK_SECONDS, _REST_SECONDS = 0.001, 0.0003
# The interval after which Python takes the GIL from a thread.
_WORK_SECONDS_MAX = 0.005
_ITEMS = 32
BEFORE = -1
"""The index of what happened before the first entry of a history."""
_PENDING = ("active_pending_free", "active_awaiting_free")


def resting(items: Iterable[_Item]) -> Iterator[_Item]:
    """Yield the items, and sleep regularly, so that the user's threads get the GIL after a millisecond."""
    # A thread that waits for the GIL otherwise gets it after 5 ms only, each time that it has released it.
    rested, work_seconds = time.perf_counter(), _WORK_SECONDS
    for number, item in enumerate(items):
        yield item
        if number % _ITEMS == 0:
            now = time.perf_counter()
            if now - rested > work_seconds:
                time.sleep(_REST_SECONDS)
                rested = time.perf_counter()
                # If a thread that never releases the GIL lengthens the sleep, the next one comes later: the work takes
                # twice the time, not six times. Reports wait for it.
                work_seconds = min(max(_WORK_SECONDS, rested - now), _WORK_SECONDS_MAX)


def consumed(items: list[_Item]) -> Iterator[_Item]:
    """Yield the items, and free each: to free a long list at once stops the interpreter for some milliseconds."""
    while items:
        yield items.pop()


class Stacks:
    """The recorded stacks and their frames, each once, with their numbers."""

    def __init__(self) -> None:
        self.frames: dict[Frame, int] = {}
        self.stacks: dict[tuple[int, ...], int] = {}
        """By the numbers of their frames, the innermost frame first."""
        # By the ids of torch's frames, which are kept, so that no other object gets such an id.
        self._seen: dict[tuple[int, ...], tuple[int, Sequence[Mapping[str, Any]]]] = {}

    def number(self, frames: Sequence[Mapping[str, Any]]) -> int | None:
        """Return the number of a stack in torch's form, innermost frame first; None if it is empty."""
        if not frames:
            return None
        ids = tuple(map(id, frames))  # torch makes one object for equal frames of a snapshot
        if ids not in self._seen:
            stack = tuple([self.frames.setdefault(_frame(each), len(self.frames)) for each in frames])
            self._seen[ids] = self.stacks.setdefault(stack, len(self.stacks)), frames
        return self._seen[ids][0]


def _frame(frame: Mapping[str, Any]) -> Frame:
    return Frame(str(frame["name"])[:MAX_TEXT_LENGTH], str(frame["filename"])[-MAX_TEXT_LENGTH:], int(frame["line"]))


@dataclass(eq=False)
class Lifetime:
    """One allocation of a block."""

    address: int
    size_bytes: int
    """0 until it is known."""
    requested_bytes: int
    pool: str
    stack: int | None = None
    allocated_at: int = BEFORE
    """The index of the entry."""
    allocated_us: int = 0
    """Microseconds since the epoch; 0 if it is not known."""
    freed_at: int | None = None
    """None if it is still allocated."""
    freed_us: int | None = None

    def lived_at(self, index: int) -> bool:
        """Whether it was allocated right after this entry."""
        return self.allocated_at <= index and (self.freed_at is None or self.freed_at > index)


@dataclass
class DeviceBlocks:
    """The blocks of one device at the time of a snapshot, by address."""

    allocated: dict[int, Lifetime] = field(default_factory=dict)
    pending: dict[int, Lifetime] = field(default_factory=dict)
    """Freed blocks that another stream still uses. Torch does not count them as allocated."""
    classic_segments: dict[int, int] = field(default_factory=dict)
    """The bytes of the segments that are not expandable."""
    segments: int = 0
    reserved_bytes: int = 0
    fragmented_bytes: int | None = None
    """Free bytes of segments that blocks in use keep from the driver."""

    def has(self, life: Lifetime) -> bool:
        """Whether it is among the allocated blocks, or another allocation that looks the same."""
        block = self.allocated.get(life.address)
        return block is not None and block.requested_bytes == life.requested_bytes


def read_blocks(segments: list[dict[str, Any]], stacks: Stacks) -> dict[int, DeviceBlocks]:
    """Return the blocks of each device index, from the result of torch's snapshot. Empties the list."""
    devices: dict[int, DeviceBlocks] = {}
    for segment in resting(consumed(segments)):
        device = devices.setdefault(segment["device"], DeviceBlocks())
        device.segments += 1
        device.reserved_bytes += segment["total_size"]
        if not segment.get("is_expandable"):
            device.classic_segments[segment["address"]] = segment["total_size"]
        pool = pool_name(segment.get("segment_pool_id"))
        for block in resting(consumed(segment["blocks"])):
            state = block["state"]
            if state == "inactive":
                continue
            blocks = device.pending if state in _PENDING else device.allocated
            requested = block.get("requested_size") or block["size"]
            stack = stacks.number(block.get("frames", ()))
            blocks[block["address"]] = Lifetime(block["address"], block["size"], requested, pool, stack)
    return devices


def pool_name(pool_id: Sequence[int] | None) -> str:
    """Return the name of a pool for a row."""
    return "private" if pool_id is not None and tuple(pool_id) != (0, 0) else "default"
