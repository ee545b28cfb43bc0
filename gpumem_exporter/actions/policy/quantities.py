"""Quantities of a policy file, such as `4GiB`, `5 %` and `90s`. Units: bytes, ratio (0 to 1) and seconds."""

from __future__ import annotations

import re
from math import isfinite

__all__ = ["read_quantity", "shown_quantity"]

_NUMBER = re.compile(r"([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z%]*)")
_BINARY = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_DECIMAL = {"kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS: dict[str, dict[str, float]] = {
    "bytes": {"": 1, "B": 1, **_BINARY, **_DECIMAL},
    "ratio": {"": 1, "%": 0.01},
    "seconds": {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400},
}
_EXPECTED = {
    "bytes": "bytes, such as 4GiB or 512MiB",
    "ratio": "a ratio, such as 5% or 0.05",
    "seconds": "a time, such as 60s, 5m or 1h",
}


def read_quantity(text: str, unit: str) -> float:
    """Read a quantity; `unit` is bytes, ratio or seconds.

    Raises:
        ValueError: the text is invalid; the message is what is accepted.
    """
    found = _NUMBER.fullmatch(text.strip())
    factor = _UNITS[unit].get(found[2]) if found else None
    if found is None or factor is None:
        raise ValueError(_EXPECTED[unit])
    value = float(found[1]) * factor
    if not isfinite(value) or (unit == "ratio" and value > 1):
        raise ValueError(_EXPECTED[unit])
    return value


def shown_quantity(value: float, unit: str) -> str:
    """Format a quantity: `4.2 GiB`, `3.1 %`, `75 s`."""
    if unit == "ratio":
        return f"{100 * value:.3g} %"
    if unit == "seconds":
        return f"{value:.0f} s" if value >= 10 else f"{value:.2g} s"
    for name, size in reversed(_BINARY.items()):
        if abs(value) >= size:
            return f"{value / size:.1f} {name}"
    return f"{value:.0f} bytes"
