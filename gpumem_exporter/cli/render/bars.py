"""Device memory as lines of characters: the ledger as a bar, and the last ten minutes. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpumem_exporter.cli.render.terminal import plain

if TYPE_CHECKING:
    from rich.text import Text

PAST_SECONDS = 600.0
_LEVELS = "▁▂▃▄▅▆▇█"
_SCARCE = ((0.05, "bold red"), (0.1, "bold yellow"))
"""The style if less than this share of the memory is available. The live page and the dashboards have these limits."""


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
DRIVER_SEGMENTS: tuple[Segment, ...] = (
    Segment("used", ("used_bytes",), "█", "blue"),
    Segment("reserved by the driver", ("reserved_bytes",), "░", "magenta"),
    Segment("free", ("free_bytes",), "·", "dim"),
)
"""The parts of the bar without an exporter: there is no ledger."""
_CACHE = Segment("cache, may be released", ("torch_fragmented",), "▒", "red")


def segments_of(ledgers: Iterable[Mapping[str, int]]) -> tuple[Segment, ...]:
    """Return the segments with names that are true for ledgers."""
    caches = [ledger for ledger in ledgers if ledger.get("torch_fragmented")]
    if not caches or any("torch_reclaimable" in ledger for ledger in caches):
        return SEGMENTS
    # cudaMallocAsync does not know how much of its cache a clear releases, so its cache is not called fragmented.
    return tuple(_CACHE if segment.categories == _CACHE.categories else segment for segment in SEGMENTS)


def key_of(segment: Segment) -> Text:
    """Return a segment's character and name."""
    return plain("").append(segment.character, style=segment.style).append(f" {segment.name}")


def draw_bar(sizes: Mapping[str, int | None], width: int, segments: Sequence[Segment] = SEGMENTS) -> Text:
    """Return the bar of some categories; empty if all sizes are 0."""
    drawn = plain("")
    for segment, length in zip(segments, bar_lengths(sizes, width, segments), strict=True):
        drawn.append(segment.character * length, style=segment.style)
    return drawn


def bar_lengths(sizes: Mapping[str, int | None], width: int, segments: Sequence[Segment] = SEGMENTS) -> tuple[int, ...]:
    """Return the number of characters of each segment, by largest remainder; they add up to `width`.

    A segment with a negative sum gets none: non-torch and unattributed are signed.
    """
    sums = [max(0, sum(sizes.get(category) or 0 for category in segment.categories)) for segment in segments]
    total = sum(sums)
    if total == 0:
        return tuple(0 for _ in segments)
    lengths = [size * width // total for size in sums]
    by_remainder = sorted(range(len(sums)), key=lambda i: (-(sums[i] * width % total), i))
    for i in by_remainder[: width - sum(lengths)]:
        lengths[i] += 1
    return tuple(lengths)


def draw_past(points: Sequence[tuple[float, int]], now: float, total_bytes: int | None, width: int) -> Text:
    """Return the highest use in each of `width` parts of the ten minutes before `now`, scaled to `total_bytes`.

    A point has the seconds by the clock of `now`, and the bytes in use. A part without a point is blank, a part without
    use is the lowest block. A part that was nearly full has the color of scarce memory.
    """
    if not total_bytes:
        return plain("")
    part_seconds = PAST_SECONDS / width
    # The parts are aligned with the clock, so that the line moves to the left and a part keeps its height.
    last = now // part_seconds
    highest: dict[int, int] = {}
    for seconds, in_use in points:
        position = width - 1 - int(last - seconds // part_seconds)
        highest[position] = max(in_use, highest.get(position, 0))
    drawn = plain("")
    for position in range(width):
        in_use = highest.get(position, -1)
        if in_use < 0:
            drawn.append(" ")
            continue
        level = max(1, min(len(_LEVELS), round(in_use * len(_LEVELS) / total_bytes)))
        drawn.append(_LEVELS[level - 1], style=scarce_style(total_bytes - in_use, total_bytes) or "dim")
    return drawn


def scarce_style(available: float | None, total: float | None) -> str:
    """Return the style of memory of which `available` bytes are left; empty if that is enough or unknown."""
    if available is None or total is None:
        return ""
    return next((style for part, style in _SCARCE if available < part * total), "")
