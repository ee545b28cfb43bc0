"""Formats bytes for people, in IEC units; an unknown size is a dash."""

from __future__ import annotations

__all__ = ["UNKNOWN", "human_bytes", "human_growth"]

UNKNOWN = "-"

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


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
    """Return the same with a sign for growth: `+1.5 GiB`."""
    return f"+{human_bytes(value)}" if value is not None and value > 0 else human_bytes(value)
