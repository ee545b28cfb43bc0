"""Formats values by Grafana's units, and resolves Grafana's color names."""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["by_threshold", "css", "text_of", "ticks"]

_COLORS = {
    "green": "#56a64b",
    "dark-green": "#37872d",
    "yellow": "#e0b400",
    "orange": "#ff780a",
    "red": "#e02f44",
    "dark-red": "#a3162a",
    "super-light-red": "#ffa6b0",
    "blue": "#3274d9",
    "dark-blue": "#1f60c4",
    "super-light-blue": "#8ab8ff",
    "purple": "#a352cc",
    "text": "#333333",
    "transparent": "transparent",
}
SERIES = ("#3274d9", "#56a64b", "#ff780a", "#a352cc", "#e02f44", "#e0b400", "#19a2a2", "#8f5a2b", "#c15c9b", "#5a6d7e")
"""The colors of series without an own color, in turn."""


def css(name: str) -> str:
    """Return the CSS color."""
    return _COLORS.get(name, name)


def by_threshold(value: float, thresholds: Mapping[str, Any] | None) -> str:
    """Return the color name of a value by a panel's thresholds; empty if there is none."""
    found = ""
    for step in (thresholds or {}).get("steps", ()):
        if step["value"] is None or value >= step["value"]:
            found = step["color"]
    return found


def text_of(value: float, unit: str, decimals: int | None = None) -> str:
    """Format a value in its unit."""
    if math.isnan(value):
        return "NaN"
    if unit in ("bytes", "binBps"):
        return _scaled(value, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB")) + ("/s" if unit == "binBps" else "")
    if unit == "percentunit":
        return f"{value * 100:.{1 if decimals is None else decimals}f} %"
    if unit == "s":
        return _seconds(value)
    if unit == "dateTimeAsIso":
        return datetime.datetime.fromtimestamp(value / 1000, datetime.timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    number = f"{value:.0f}" if decimals == 0 or value == int(value) else f"{value:.3g}"
    return number + (" /s" if unit == "cps" else "")


def ticks(low: float, high: float, unit: str, count: int = 4) -> list[float]:
    """Return about `count` round values between the two."""
    span = (high - low) or 1.0
    base = 1024.0 if unit in ("bytes", "binBps") else 10.0
    size = base ** math.floor(math.log(span / count, base))
    steps: Sequence[float] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024) if base > 10 else (1, 2, 5, 10)
    step = next((size * factor for factor in steps if span / (size * factor) <= count), span)
    first = math.ceil(low / step)
    return [at * step for at in range(first, math.floor(high / step) + 1)]


def _scaled(value: float, base: int, names: Sequence[str]) -> str:
    scale = 0
    while abs(value) >= base and scale < len(names) - 1:
        value /= base
        scale += 1
    return f"{value:.{0 if scale == 0 or abs(value) >= 100 else 1}f} {names[scale]}"


def _seconds(value: float) -> str:
    for size, name in ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"), (1e-3, "ms")):
        if abs(value) >= size:
            return f"{value / size:.{1 if value < 100 * size else 0}f} {name}"
    return f"{value * 1e6:.0f} µs" if value else "0 s"
