"""Bytes for human eyes, with IEC units; unknown is a dash."""

from __future__ import annotations

__all__ = ["UNKNOWN", "human_bytes", "human_growth"]

UNKNOWN = "-"

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def human_bytes(value: int | None) -> str:
    """`1.5 GiB`, `512 MiB`, `-3.0 KiB`, `17 B`: three figures at most before the next unit, signed, rounded."""
    if value is None:
        return UNKNOWN
    amount, unit = float(abs(value)), 0
    while unit < len(_UNITS) - 1 and round(amount) >= 1024:
        amount /= 1024
        unit += 1
    figure = f"{amount:.0f}" if unit == 0 or round(amount, 1) >= 100 else f"{amount:.1f}"
    return f"{'-' if value < 0 else ''}{figure} {_UNITS[unit]}"


def human_growth(value: int | None) -> str:
    """The same with the sign of what is more: `+1.5 GiB`."""
    return f"+{human_bytes(value)}" if value is not None and value > 0 else human_bytes(value)
