"""Text for people: bytes with IEC units, seconds with the unit that fits, percentages. Unknown is a dash."""

from __future__ import annotations

from typing import Any

UNKNOWN = "-"

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def counted(number: int | str, one: str, more: str) -> str:
    """Return a number with its noun: `1 device`, `2 devices`."""
    return f"{number} {one if number == 1 else more}"


def human_bytes(value: int | None) -> str:
    """Return `1.5 GiB`, `512 MiB`, `-3.0 KiB` or `17 B`: rounded to two or more digits, below 1024 of the unit."""
    if value is None:
        return UNKNOWN
    amount, unit = float(abs(value)), 0
    while unit < len(_UNITS) - 1 and round(amount) >= 1024:
        amount /= 1024
        unit += 1
    number = f"{amount:.0f}" if unit == 0 or round(amount, 1) >= 100 else f"{amount:.1f}"
    return f"{'-' if value < 0 else ''}{number} {_UNITS[unit]}"


def human_growth(value: int | None) -> str:
    """Return bytes like `human_bytes`, with a plus sign for growth: `+1.5 GiB`."""
    return f"+{human_bytes(value)}" if value is not None and value > 0 else human_bytes(value)


def short_bytes(value: int | None) -> str:
    """Return `1.5G`, `512M`, `-3.0K` or `17B`, for a column of six characters; K is KiB."""
    return human_bytes(value).replace(" ", "").replace("iB", "")


def human_seconds(value: float | None) -> str:
    """Return `17 µs`, `3.1 ms`, `0.4 s`, `12 s`, `3 min`, `2 h` or `5 d`."""
    if value is None:
        return UNKNOWN
    if value < 9.995e-4:
        return f"{value * 1e6:.0f} µs"
    for limit, divisor, unit in ((0.1, 1e-3, "ms"), (10, 1, "s")):
        if value < limit:
            return f"{value / divisor:.1f} {unit}"
    for limit, divisor, unit in ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if value < limit:
            return f"{value / divisor:.0f} {unit}"
    return f"{value / 86400:.0f} d"


def human_ratio(value: float | None) -> str:
    """Return `93 %` for a ratio of 0.93."""
    return UNKNOWN if value is None else f"{value * 100:.0f} %"


class ShownAsText:
    """Shows an object as its text, `str(object)`, where the last line of a notebook's cell shows it without `print`."""

    __slots__ = ()

    def __init_subclass__(cls, **named: Any) -> None:
        super().__init_subclass__(**named)
        # IPython prefers a class's own `__repr__`, such as a dataclass's, to an inherited `_repr_pretty_`.
        cls._repr_pretty_ = ShownAsText._repr_pretty_  # type: ignore[method-assign]

    def _repr_pretty_(self, printer: Any, _cycle: bool) -> None:
        printer.text(str(self))
