"""Tells where the threads of the process are: a list of hooks must not change while torch walks over it."""

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

    # The frame of this function is among them. A variable of its own would keep that frame, and with it the frames and
    # tensors of the callers, until a garbage collection.
    return any(map(runs, sys._current_frames().values()))  # noqa: SLF001 - no public function shows other threads
