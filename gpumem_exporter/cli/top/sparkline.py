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
"""With these widths, a character is a whole number of seconds."""
_LEVELS = "▁▂▃▄▅▆▇█"
_STYLE = "dim"


def sparkline(points: Sequence[Point], total_bytes: int | None, width: int, now: float) -> Text:
    """Return the highest use in each of `width` parts of the ten minutes before `now`, scaled to `total_bytes`.

    A part without a reading is blank. A part without use is the lowest block. The parts are aligned with the clock, so
    that the line moves to the left. A part that is nearly full has the color of scarce memory.
    """
    drawn = plain("")
    if not total_bytes:
        return drawn.append(" " * width)
    part_seconds = SPAN_SECONDS / width
    last = now // part_seconds
    highest: dict[int, int] = {}
    for seconds, in_use in points:
        position = width - 1 - int(last - seconds // part_seconds)
        if 0 <= position < width:
            highest[position] = max(in_use, highest.get(position, 0))
    for position in range(width):
        if position not in highest:
            drawn.append(" ")
            continue
        eighths = max(1, min(len(_LEVELS), round(highest[position] * len(_LEVELS) / total_bytes)))
        drawn.append(_LEVELS[eighths - 1], style=scarce_style(total_bytes - highest[position], total_bytes) or _STYLE)
    return drawn
