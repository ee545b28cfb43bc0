"""A device's last ten minutes in a few characters. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpumem_exporter.cli.render.terminal import plain
from gpumem_exporter.cli.top.history import SPAN_SECONDS, Point
from gpumem_exporter.cli.top.scarce import scarce_style

if TYPE_CHECKING:
    from rich.text import Text

__all__ = ["WIDTHS", "sparkline"]

WIDTHS = (60, 40, 30, 20, 15)
"""The widths in which a character is a whole number of seconds."""
_LEVELS = "▁▂▃▄▅▆▇█"
_STYLE = "dim"


def sparkline(points: Sequence[Point], total_bytes: int | None, width: int, now: float) -> Text:
    """The highest use in each of `width` parts of the ten minutes up to `now`, on a scale of 0 to `total_bytes`.

    A part without a reading is a blank; a part without use is the lowest block. The parts are aligned with the clock,
    so that the line moves to the left. A part that is nearly full has the color of scarce memory.
    """
    drawn = plain("")
    if not total_bytes:
        return drawn.append(" " * width)
    part_seconds = SPAN_SECONDS / width
    last = now // part_seconds
    most: dict[int, int] = {}
    for seconds, in_use in points:
        place = width - 1 - int(last - seconds // part_seconds)
        if 0 <= place < width:
            most[place] = max(in_use, most.get(place, 0))
    for place in range(width):
        if place not in most:
            drawn.append(" ")
            continue
        eighths = max(1, min(len(_LEVELS), round(most[place] * len(_LEVELS) / total_bytes)))
        drawn.append(_LEVELS[eighths - 1], style=scarce_style(total_bytes - most[place], total_bytes) or _STYLE)
    return drawn
