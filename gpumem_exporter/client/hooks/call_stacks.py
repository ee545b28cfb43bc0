"""Where the threads of the process are: a hook must not be changed while a thread walks over torch's list of hooks."""

from __future__ import annotations

import sys
from types import FrameType

__all__ = ["any_thread_runs"]


def any_thread_runs(function: str, file: str) -> bool:
    """Whether a thread is in a function of that name, defined in that file, or in anything that it calls."""

    def runs(frame: FrameType | None) -> bool:
        while frame is not None:
            if frame.f_code.co_filename == file and frame.f_code.co_name == function:
                return True
            frame = frame.f_back
        return False

    # The frame of this function is among them. A variable of its own that held it would keep it, and with it those of
    # the user's code that have called it and all their tensors, until a garbage collection.
    return any(map(runs, sys._current_frames().values()))  # noqa: SLF001 - nothing else shows where every thread is
