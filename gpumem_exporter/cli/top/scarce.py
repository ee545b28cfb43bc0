"""How what is nearly full is marked."""

from __future__ import annotations

__all__ = ["scarce_style"]

_SCARCE = ((0.05, "bold red"), (0.1, "bold yellow"))
"""Less than that part of the memory is free: the live page draws the same lines."""


def scarce_style(free: float | None, total: float | None) -> str:
    """How something is written while `free` bytes of `total` are left; empty where that is enough, or is not known."""
    if free is None or total is None:
        return ""
    return next((style for part, style in _SCARCE if free < part * total), "")
