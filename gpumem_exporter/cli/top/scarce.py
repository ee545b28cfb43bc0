"""The colors of memory that is nearly full."""

from __future__ import annotations

__all__ = ["scarce_style"]

_SCARCE = ((0.05, "bold red"), (0.1, "bold yellow"))
"""Style if less than this share of the memory is free. The live page has the same limits."""


def scarce_style(free: float | None, total: float | None) -> str:
    """Return the style while `free` of `total` bytes are free; empty if that is enough or unknown."""
    if free is None or total is None:
        return ""
    return next((style for part, style in _SCARCE if free < part * total), "")
