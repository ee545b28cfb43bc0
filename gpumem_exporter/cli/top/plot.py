"""The past of a job or a device: a line of bars for each size."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from typing import Any

from rich.text import Text

from gpumem_client.wire.units import short_bytes
from gpumem_exporter.cli.render.columns import clock
from gpumem_exporter.cli.render.terminal import plain

_SIZES = (("used", "blue"), ("allocated", "green"), ("idle_cache", "yellow"))
_BARS = " ▁▂▃▄▅▆▇█"
_NAME_WIDTH, _HIGHEST_WIDTH = 11, 7


def bar_count(width: int) -> int:
    """Return the number of bars in a terminal of this width."""
    return max(1, width - _NAME_WIDTH - _HIGHEST_WIDTH)


def timeline(history: Mapping[str, Any], words: Mapping[str, Any], width: int) -> Iterator[Text]:
    """Yield a line for each size of a history's first series, with the highest value at its end, and the times.

    All lines have one scale. A bar is blank where nothing is known.
    """
    start, end, times = (history[name] for name in ("from_unix_seconds", "to_unix_seconds", "unix_seconds"))
    count = bar_count(width)
    moments = [start + (bar + 0.5) * (end - start) / count for bar in range(count)]
    points = [(bisect_left(times, moment), moment) for moment in moments]
    series = history["series"][0] if history["series"] else {}
    top = max((size for size in series["used"]["max"] if size is not None), default=0) if series else 0
    for name, color in _SIZES:
        sizes = series[name]["max"] if series else [None] * len(times)
        bars = ""
        for index, moment in points:
            size = sizes[index] if index < len(times) and times[index] - history["step_seconds"] < moment else None
            bars += _BARS[min(8, math.ceil(8 * size / top))] if size and top else " "
        highest = max((size for size in sizes if size is not None), default=None)
        line = plain(words[name]["label"].ljust(_NAME_WIDTH))
        yield line.append(bars, style=color).append(short_bytes(highest).rjust(_HIGHEST_WIDTH), style=color)
    yield plain(f"{'':{_NAME_WIDTH}}{clock(start)}{clock(end).rjust(count - len(clock(start)))}", "dim")
