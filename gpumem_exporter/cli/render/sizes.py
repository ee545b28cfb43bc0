"""Numbers for human eyes: bytes with IEC units, seconds with the unit that fits. Unknown is a dash."""

from __future__ import annotations

from gpumem_exporter.client.sizes import UNKNOWN, human_bytes

__all__ = ["UNKNOWN", "human_bytes", "human_ratio", "human_seconds", "short_bytes"]


def human_seconds(value: float | None) -> str:
    """`17 µs`, `3.1 ms`, `0.4 s`, `12 s`, `3 min`, `2 h`, `5 d`."""
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
    """`93 %` of a ratio from 0 to 1."""
    return UNKNOWN if value is None else f"{value * 100:.0f} %"


def short_bytes(value: int | None) -> str:
    """`1.5G`, `512M`, `-3.0K`, `17B`: as `human_bytes`, where a column has six characters; K is KiB."""
    return human_bytes(value).replace(" ", "").replace("iB", "")
