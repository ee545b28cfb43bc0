"""The figures of a policy file: `4GiB`, `5 %`, `90s`. Read and written; bytes, ratios from 0 to 1, and seconds."""

from __future__ import annotations

import re
from math import isfinite

__all__ = ["read_value", "shown_value"]

_NUMBER = re.compile(r"([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z%]*)")
_BINARY = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_DECIMAL = {"kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS: dict[str, dict[str, float]] = {
    "bytes": {"": 1, "B": 1, **_BINARY, **_DECIMAL},
    "ratio": {"": 1, "%": 0.01},
    "seconds": {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400},
}
_EXPECTED = {
    "bytes": "expected bytes, such as 4GiB or 512MiB",
    "ratio": "expected a part of the whole, such as 5% or 0.05",
    "seconds": "expected a time, such as 60s, 5m or 1h",
}


def read_value(text: str, unit: str) -> float:
    """Read one figure; `unit` is bytes, ratio or seconds.

    Raises:
        ValueError: it is none; says what would be.
    """
    found = _NUMBER.fullmatch(text.strip())
    factor = _UNITS[unit].get(found[2]) if found else None
    if found is None or factor is None:
        raise ValueError(_EXPECTED[unit])
    value = float(found[1]) * factor
    if not isfinite(value) or (unit == "ratio" and value > 1):
        raise ValueError(_EXPECTED[unit])
    return value


def shown_value(value: float, unit: str) -> str:
    """A figure as somebody would write it: `4.2 GiB`, `3.1 %`, `75 s`."""
    if unit == "ratio":
        return f"{100 * value:.3g} %"
    if unit == "seconds":
        return f"{value:.0f} s" if value >= 10 else f"{value:.2g} s"
    for name, size in reversed(_BINARY.items()):
        if abs(value) >= size:
            return f"{value / size:.1f} {name}"
    return f"{value:.0f} bytes"
