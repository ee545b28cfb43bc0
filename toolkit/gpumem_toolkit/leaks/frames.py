"""Reads the local variables of the frames of all threads."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

__all__ = ["all_frames", "variables_of"]

_FRAMES_MAX = 500
_SHOWS_LOCALS = frozenset({"locals", "vars", "eval", "exec"})
_OPTIMIZED = 0x1  # CO_OPTIMIZED: a function's frame, whose f_locals is a copy


def all_frames() -> list[FrameType]:
    """Return the frames of all threads, without the frames of this package."""
    tops = sys._current_frames()
    found: list[FrameType] = []
    while tops and len(found) < _FRAMES_MAX:
        at: FrameType | None = tops.popitem()[1]
        while at is not None and len(found) < _FRAMES_MAX:
            module = at.f_globals.get("__name__")
            if not (type(module) is str and module.startswith(("gpumem_client.", "gpumem_toolkit."))):
                found.append(at)
            at = at.f_back
    # This frame is among them, so that the variable would be part of a reference cycle.
    tops.clear()
    return found


def variables_of(frame: FrameType) -> dict[str, Any]:
    """Return a copy of the local variables of a function; empty for a module or class body, and if reading changes it.

    The variables of a module or class body are in a dictionary, which is an object of its own.
    """
    code = frame.f_code
    if not code.co_flags & _OPTIMIZED:
        return {}
    copied = sys.version_info < (3, 13)
    if copied and not _SHOWS_LOCALS.isdisjoint(code.co_names):
        return {}  # f_locals would overwrite a dictionary that the user's code may use
    variables = frame.f_locals
    found = dict(variables)
    if copied:
        variables.clear()  # otherwise the frame keeps objects that the user's code deletes later
    return found
