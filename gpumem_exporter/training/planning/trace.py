"""The allocations and frees of a few training steps, in their order, each with what it is for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

__all__ = ["KINDS", "Line", "Trace", "blend"]

KINDS = ("parameters", "buffers", "gradients", "optimizer", "activations", "temporaries")
"""What an allocation is for. Activations: made in the forward pass, batches included; temporaries: all else."""


@dataclass(slots=True)
class Trace:
    """What a job asks the allocator for.

    Attributes:
        events: `+n` allocates the allocation with that number, `-n` frees it; numbers start with 1.
        sizes: of each allocation, bytes as requested; index 0 stands for none.
        kinds: of each allocation, one of KINDS.
    """

    events: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=lambda: [0])
    kinds: list[str] = field(default_factory=lambda: ["temporaries"])

    def allocate(self, size_bytes: int, kind: str) -> int:
        """Write an allocation down; returns its number."""
        self.sizes.append(size_bytes)
        self.kinds.append(kind)
        number = len(self.sizes) - 1
        self.events.append(number)
        return number

    def free(self, number: int) -> None:
        """Write down that an allocation is over."""
        self.events.append(-number)

    def ordered(self) -> Trace:
        """The same with frees that follow each other in a fixed order.

        The allocator ends up the same, and two runs can be compared: autocast, for one, drops its cached casts in the
        order of their addresses.
        """
        events: list[int] = []
        frees: list[int] = []
        for event in self.events:
            if event < 0:
                frees.append(event)
                continue
            if frees:
                events += sorted(frees, reverse=True)
                frees.clear()
            events.append(event)
        return Trace(events + sorted(frees, reverse=True), self.sizes, self.kinds)

    def peak(self) -> dict[str, int]:
        """Bytes of each kind, as requested, at the moment at which the most was live."""
        live = best = 0
        best_at = -1
        for i, event in enumerate(self.events):
            live += self.sizes[event] if event > 0 else -self.sizes[-event]
            if live > best:
                best, best_at = live, i
        shares = dict.fromkeys(KINDS, 0)
        for event in self.events[: best_at + 1]:
            number = abs(event)
            shares[self.kinds[number]] += self.sizes[number] if event > 0 else -self.sizes[number]
        return shares

    def highs(self) -> dict[str, int]:
        """The most that was live of each kind at any moment, bytes as requested; not all at the same one."""
        live, most = dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0)
        for event in self.events:
            kind, size = self.kinds[abs(event)], self.sizes[abs(event)]
            live[kind] += size if event > 0 else -size
            most[kind] = max(most[kind], live[kind])
        return most


def blend(small: Trace, small_batch: int, large: Trace, large_batch: int) -> Line | None:
    """The trace of any batch size from those of two, if each allocation's size is a line in the batch size.

    Returns None when the two do not make the same allocations in the same order: the job then branches on the batch.
    """
    if small.events != large.events or small_batch == large_batch:
        return None
    return Line(small, small_batch, large, large_batch)


@dataclass(frozen=True, slots=True)
class Line:
    """Two traces of the same events at two batch sizes; `at` gives the trace of another."""

    small: Trace
    small_batch: int
    large: Trace
    large_batch: int

    def at(self, batch: int) -> Trace:
        """The trace of that batch size; sizes in between are rounded up."""
        return Trace(self.small.events, list(self._sizes(batch)), self.small.kinds)

    def _sizes(self, batch: int) -> Iterator[int]:
        span, way = self.large_batch - self.small_batch, batch - self.small_batch
        for a, b in zip(self.small.sizes, self.large.sizes, strict=True):
            yield a if a == b else max(0, a - (a - b) * way // span)
