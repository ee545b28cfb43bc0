"""The allocations and frees of a few training steps, and the memory that the caching allocator reserves.

`gpumem_client.allocator.simulated` is the allocator. Its own tests compare it with PyTorch's.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import groupby
from types import SimpleNamespace
from typing import Any, TypeAlias

from gpumem_client.allocator.simulated import Block, CachingAllocator, SimulatedOutOfMemoryError

KINDS = ("parameters", "buffers", "gradients", "optimizer", "activations", "temporaries")
"""The purposes of allocations. Activations come from the forward pass and its batch, temporaries from all else."""


Mark: TypeAlias = "tuple[int, int]"
"""A position in a trace: the index of the next event, and the number of the next allocation."""


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
        return len(self.events), len(self.sizes)

    def until(self, mark: Mark) -> Trace:
        """Return the trace without the events after a mark."""
        return replace(self, events=self.events[: mark[0]], sizes=self.sizes[: mark[1]], kinds=self.kinds[: mark[1]])

    def repeated(self, start: Mark, end: Mark) -> Trace | None:
        """Return the trace with the events between two marks once more; the trace ends at the second one.

        Returns None if the job has not reached a steady state.
        """
        events, (first, last) = self.events[start[0] : end[0]], (start[1], end[1])
        freed = {-event for event in events if event < 0}
        before = sorted(number for number in freed if number < first)
        left = [number for number in range(first, last) if number not in freed]
        # In a steady state, the repetition frees what the original left, as the original freed what was there before.
        if [self.sizes[number] for number in before] != [self.sizes[number] for number in left]:
            return None
        names = dict(zip(before, left, strict=True)) | {n: n + last - first for n in range(first, last)}
        events = [names[event] if event > 0 else -names[-event] for event in events]
        sizes, kinds = self.sizes + self.sizes[first:last], self.kinds + self.kinds[first:last]
        return replace(self, events=self.events + events, sizes=sizes, kinds=kinds)

    def ordered(self) -> Trace:
        """Return the trace with consecutive frees in a fixed order, so that two traces can be compared."""
        # Autocast, for example, drops its cached casts in the order of their addresses, which differs from run to run.
        events: list[int] = []
        for frees, group in groupby(self.events, lambda event: event < 0):
            run = list(group)
            events += sorted(run, reverse=True) if frees else run
        return replace(self, events=events)

    def shares(self) -> tuple[dict[str, int], dict[str, int]]:
        """Return the requested bytes of each kind at the event with the highest total, and the highest of each kind."""
        total = most = 0
        live, at_peak, highest = (dict.fromkeys(KINDS, 0) for _ in range(3))
        for event in self.events:
            number = abs(event)
            kind, change = self.kinds[number], self.sizes[number] if event > 0 else -self.sizes[number]
            live[kind] += change
            highest[kind] = max(highest[kind], live[kind])
            total += change
            if total > most:
                most, at_peak = total, dict(live)
        return at_peak, highest


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


_UNLIMITED: Any = SimpleNamespace(allocate=lambda _size_bytes: True, free=lambda _size_bytes: None)
"""The memory of a device, which the allocator's limit bounds."""


def replay(trace: Trace, free_bytes: int | None = None) -> Peaks:
    """Run a trace through the allocator, on a device with this number of free bytes; None means unlimited."""
    allocator = CachingAllocator(_UNLIMITED)
    allocator.limit_bytes = free_bytes
    blocks: dict[int, Block] = {}
    out_of_memory = False
    for event in trace.events:
        if event < 0:
            if -event in blocks:
                allocator.free(blocks.pop(-event))
        elif trace.sizes[event]:
            try:
                blocks[event] = allocator.allocate(trace.sizes[event])
            except SimulatedOutOfMemoryError:
                out_of_memory = True
                break
    stats = allocator.statistics
    return Peaks(stats.allocated_peak_bytes, stats.reserved_peak_bytes, out_of_memory)
