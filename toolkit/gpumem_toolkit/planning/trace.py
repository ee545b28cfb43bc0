"""The allocations and frees of a few training steps, and the memory that the caching allocator reserves.

`gpumem_client.allocator.simulated` is the allocator. Its own tests compare it with PyTorch's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from gpumem_client.allocator.simulated import Block, CachingAllocator, SimulatedOutOfMemoryError

KINDS = ("parameters", "buffers", "gradients", "optimizer", "activations", "temporaries")
"""The purposes of allocations. Activations come from the forward pass and its batch, temporaries from all else."""


class Mark(NamedTuple):
    """A position in a trace: the index of the next event, and the number of the next allocation."""

    event: int
    number: int


@dataclass(slots=True)
class Trace:
    """The allocations and frees of a job, in their order."""

    events: list[int] = field(default_factory=list)
    """`+n` allocates allocation number n, `-n` frees it; numbers start at 1."""
    sizes: list[int] = field(default_factory=lambda: [0])
    """The requested bytes of each allocation; index 0 is unused."""
    kinds: list[str] = field(default_factory=lambda: ["temporaries"])
    notes: tuple[str, ...] = ()
    """What the job does on a device and the trace leaves out."""

    def allocate(self, size_bytes: int, kind: str) -> int:
        """Record an allocation and return its number."""
        self.sizes.append(size_bytes)
        self.kinds.append(kind)
        number = len(self.sizes) - 1
        self.events.append(number)
        return number

    def free(self, number: int) -> None:
        """Record that the allocation with this number is freed."""
        self.events.append(-number)

    def mark(self) -> Mark:
        """Return the end of the trace."""
        return Mark(len(self.events), len(self.sizes))

    def until(self, mark: Mark) -> Trace:
        """Return the trace without the events after a mark."""
        return Trace(self.events[: mark.event], self.sizes[: mark.number], self.kinds[: mark.number])

    def repeated(self, start: Mark, end: Mark) -> Trace | None:
        """Return the trace with the events between two marks once more; the trace ends at the second one.

        Returns None if the job has not reached a steady state.
        """
        events = self.events[start.event : end.event]
        freed = {-event for event in events if event < 0}
        before = sorted(number for number in freed if number < start.number)
        left = [number for number in range(start.number, end.number) if number not in freed]
        # In a steady state, the repetition frees what the original left, as the original freed what was there before.
        if [self.sizes[number] for number in before] != [self.sizes[number] for number in left]:
            return None
        more = end.number - start.number
        names = dict(zip(before, left, strict=True)) | {n: n + more for n in range(start.number, end.number)}
        events = [names[event] if event > 0 else -names[-event] for event in events]
        repeated = slice(start.number, end.number)
        return Trace(self.events + events, self.sizes + self.sizes[repeated], self.kinds + self.kinds[repeated])

    def ordered(self) -> Trace:
        """Return the trace with consecutive frees in a fixed order, so that two traces can be compared."""
        # Autocast, for example, drops its cached casts in the order of their addresses, which differs from run to run.
        events: list[int] = []
        frees: list[int] = []
        for event in self.events:
            if event < 0:
                frees.append(event)
                continue
            events += sorted(frees, reverse=True)
            frees.clear()
            events.append(event)
        return Trace(events + sorted(frees, reverse=True), self.sizes, self.kinds)

    def peak(self) -> dict[str, int]:
        """Return the requested bytes of each kind at the event with the highest total."""
        total = highest = 0
        live, at_peak = dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0)
        for kind, change in self._changes():
            live[kind] += change
            total += change
            if total > highest:
                highest, at_peak = total, dict(live)
        return at_peak

    def highs(self) -> dict[str, int]:
        """Return the highest requested bytes of each kind; the kinds reach them at different events."""
        live, highest = dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0)
        for kind, change in self._changes():
            live[kind] += change
            highest[kind] = max(highest[kind], live[kind])
        return highest

    def _changes(self) -> Iterator[tuple[str, int]]:
        for event in self.events:
            number = abs(event)
            yield self.kinds[number], self.sizes[number] if event > 0 else -self.sizes[number]


def blend(small: Trace, small_batch: int, large: Trace, large_batch: int) -> Line | None:
    """Interpolate the traces of two batch sizes. Returns None if their events differ."""
    if small.events != large.events or small_batch == large_batch:
        return None
    return Line(small, small_batch, large, large_batch)


def proportional(trace: Trace, batch: int) -> Line:
    """Estimate the traces of other batch sizes from one: activations and temporaries grow with the batch size."""
    scaled = ("activations", "temporaries")
    sizes = [0 if kind in scaled else size for size, kind in zip(trace.sizes, trace.kinds, strict=True)]
    return Line(Trace(trace.events, sizes, trace.kinds), 0, trace, batch)


@dataclass(frozen=True, slots=True)
class Line:
    """Two traces with the same events at two batch sizes."""

    small: Trace
    small_batch: int
    large: Trace
    large_batch: int

    def at(self, batch: int) -> Trace:
        """Return the trace of a batch size, with sizes rounded up."""
        span, way = self.large_batch - self.small_batch, batch - self.small_batch
        pairs = zip(self.small.sizes, self.large.sizes, strict=True)
        sizes = [a if a == b else max(0, a - (a - b) * way // span) for a, b in pairs]
        return Trace(self.small.events, sizes, self.small.kinds)


@dataclass(frozen=True, slots=True)
class Peaks:
    """The values of `torch.cuda.max_memory_allocated` and `max_memory_reserved` at the end, or at an error."""

    allocated_bytes: int
    reserved_bytes: int
    out_of_memory: bool = False


class _Device:
    """The memory that the driver has free for the process."""

    def __init__(self, free_bytes: float) -> None:
        self.free_bytes = free_bytes

    def allocate(self, size_bytes: int) -> bool:
        fits = size_bytes <= self.free_bytes
        self.free_bytes -= size_bytes if fits else 0
        return fits

    def free(self, size_bytes: int) -> None:
        self.free_bytes += size_bytes


def replay(trace: Trace, free_bytes: int | None = None) -> Peaks:
    """Run a trace through the allocator, on a device with this number of free bytes; None means unlimited."""
    allocator = CachingAllocator(_Device(math.inf if free_bytes is None else free_bytes))
    blocks: dict[int, Block] = {}
    out_of_memory = False
    for event in trace.events:
        if event < 0:
            block = blocks.pop(-event, None)
            if block is not None:
                allocator.free(block)
        elif trace.sizes[event]:
            try:
                blocks[event] = allocator.allocate(trace.sizes[event])
            except SimulatedOutOfMemoryError:
                out_of_memory = True
                break
    stats = allocator.statistics
    return Peaks(stats.allocated_peak_bytes, stats.reserved_peak_bytes, out_of_memory)
