"""The timeline of a job: memory over time, with both axes, in block characters."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.text import Text

from gpumem_client.wire.units import short_bytes
from gpumem_exporter.cli.render.terminal import plain

LAYERS = (("allocated", "green"), ("idle_cache", "yellow"), ("used", "blue"))
"""From the bottom: the series of the history, and their colors. `used` is the rest of the used memory."""
_BLOCKS = " ▁▂▃▄▅▆▇█"
_AXIS_WIDTH = 8
_EIGHTHS = 8


def timeline(
    history: Mapping[str, Any], width: int, height: int, marks: Sequence[tuple[float, str, str]] = ()
) -> Iterator[Text]:
    """Yield the lines of the plot of a history's first series, with `height` lines of bars.

    A column has the highest value in its time, and is blank where nothing is known. `marks` are times, characters and
    styles of what happened, which are shown below the bars.
    """
    columns = max(1, width - _AXIS_WIDTH)
    start, end = history["from_unix_seconds"], history["to_unix_seconds"]
    values = _highest(history, columns)
    top = max((used for *_, used in values if used is not None), default=0)
    scale = height * _EIGHTHS / (top or 1)
    for row in range(height - 1, -1, -1):
        size = {height - 1: top, (height - 1) // 2: top * ((height - 1) // 2 + 1) // height, 0: 0}.get(row)
        label = short_bytes(size) if size is not None and top else ""
        line = plain("").append(f"{label:>{_AXIS_WIDTH - 2}} {'┤' if label else '│'}", style="dim")
        for column in values:
            line.append(*_cell([round(edge * scale) for edge in _stacked(column)], row * _EIGHTHS))
        yield line
    yield _marks(marks, start, end, columns)
    yield _times(start, end, columns)


def legend(words: Mapping[str, Any]) -> Text:
    """Return the colors of the timeline and their names."""
    line = plain("")
    for name, color in LAYERS:
        line.append("■", style=color).append(f" {words[name]['label']}  ")
    return line


def _highest(history: Mapping[str, Any], columns: int) -> list[list[int | None]]:
    """Return the highest value of each layer in each column; None if it is unknown."""
    start, end, step = (history[name] for name in ("from_unix_seconds", "to_unix_seconds", "step_seconds"))
    scale = columns / max(end - start, step)
    found: list[list[int | None]] = [[None] * len(LAYERS) for _ in range(columns)]
    if not history["series"]:
        return found
    layers = [history["series"][0][name]["max"] for name, _ in LAYERS]
    for index, at in enumerate(history["unix_seconds"]):
        first = max(0, math.floor((at - step - start) * scale + 1e-6))
        last = min(columns, max(first + 1, math.ceil((at - start) * scale - 1e-6)))
        for layer, values in enumerate(layers):
            value = values[index]
            for column in range(first, last):
                known = found[column][layer]
                if value is not None and (known is None or value > known):
                    found[column][layer] = value
    return found


def _stacked(values: Sequence[int | None]) -> list[int]:
    """Return the upper edge of each layer: none is above the used memory."""
    allocated, idle, used = values
    highest = used if used is not None else allocated or 0
    first = min(allocated or 0, highest)
    return [first, min(first + (idle or 0), highest), highest]


def _cell(edges: Sequence[int], low: int) -> tuple[str, str]:
    """Return the character and the style of a cell from its lowest eighth on; it has room for two layers."""
    layers = [next((i for i, edge in enumerate(edges) if low + eighth < edge), -1) for eighth in range(_EIGHTHS)]
    lower = layers[0]
    if lower < 0:
        return " ", ""
    count = layers.count(lower)
    above = layers[-1] if count < _EIGHTHS else -1
    return _BLOCKS[count], LAYERS[lower][1] + (f" on {LAYERS[above][1]}" if above >= 0 else "")


def _marks(marks: Sequence[tuple[float, str, str]], start: float, end: float, columns: int) -> Text:
    line = ["─"] * columns
    styles = ["dim"] * columns
    for at, character, style in marks:
        if start <= at <= end:
            column = min(columns - 1, int((at - start) / max(1e-9, end - start) * columns))
            line[column], styles[column] = character, style
    drawn = plain("").append(f"{'└':>{_AXIS_WIDTH}}", style="dim")
    for character, style in zip(line, styles, strict=True):
        drawn.append(character, style=style)
    return drawn


def _times(start: float, end: float, columns: int) -> Text:
    first, middle, last = (time.strftime("%H:%M", time.localtime(at)) for at in (start, (start + end) / 2, end))
    gap = max(1, columns // 2 - len(first) - len(middle) // 2)
    line = f"{first}{' ' * gap}{middle}"
    return plain(" " * _AXIS_WIDTH + line + last.rjust(max(len(last) + 1, columns - len(line))), "dim")
