"""A device's ledger as a bar of fixed width, and the key of its characters. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpumem_exporter.cli.render.terminal import plain

if TYPE_CHECKING:
    from rich.text import Text

__all__ = ["SEGMENTS", "Segment", "bar_lengths", "draw_bar", "key_of", "segments_of"]


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of the bar: its name in the legend, its categories, and its character."""

    name: str
    categories: tuple[str, ...]
    character: str
    style: str


SEGMENTS: tuple[Segment, ...] = (
    Segment("allocated", ("torch_allocated",), "█", "green"),
    Segment("reclaimable", ("torch_reclaimable",), "▓", "yellow"),
    Segment("fragmented", ("torch_fragmented",), "▒", "red"),
    Segment("other", ("non_torch", "other_processes", "driver_reserved", "unattributed"), "░", "blue"),
    Segment("free", ("free",), "·", "dim"),
)
"""From left to right."""
_CACHE = Segment("cache, may be released", ("torch_fragmented",), "▒", "red")


def segments_of(ledgers: Iterable[Mapping[str, int]]) -> tuple[Segment, ...]:
    """Return the segments with names that are true for ledgers.

    The allocator cudaMallocAsync does not know how much of its cache a clear releases. If that is true for every
    cache, the cache is not called fragmented.
    """
    caches = [ledger for ledger in ledgers if ledger.get("torch_fragmented")]
    if not caches or any("torch_reclaimable" in ledger for ledger in caches):
        return SEGMENTS
    return tuple(_CACHE if segment.categories == _CACHE.categories else segment for segment in SEGMENTS)


def draw_bar(ledger: Mapping[str, int], width: int, segments: Sequence[Segment] = SEGMENTS) -> Text:
    """Return the bar of a ledger; empty if all its sizes are 0."""
    drawn = plain("")
    for segment, length in zip(segments, bar_lengths(ledger, width, segments), strict=True):
        drawn.append(segment.character * length, style=segment.style)
    return drawn


def key_of(segment: Segment) -> Text:
    """Return a segment's character and name."""
    return plain("").append(segment.character, style=segment.style).append(f" {segment.name}")


def bar_lengths(ledger: Mapping[str, int], width: int, segments: Sequence[Segment] = SEGMENTS) -> tuple[int, ...]:
    """Return the number of characters of each segment, by largest remainder; they add up to `width`.

    A segment with a negative sum gets none: non-torch and unattributed are signed.
    """
    sizes = [max(0, sum(ledger.get(category, 0) for category in segment.categories)) for segment in segments]
    total = sum(sizes)
    if total == 0:
        return tuple(0 for _ in segments)
    lengths = [size * width // total for size in sizes]
    by_remainder = sorted(range(len(sizes)), key=lambda i: (-(sizes[i] * width % total), i))
    for i in by_remainder[: width - sum(lengths)]:
        lengths[i] += 1
    return tuple(lengths)
