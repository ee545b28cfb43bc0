"""CPU time of this process and of all processes below it, those that have ended included."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["tree_cpu_seconds"]

_TICKS = os.sysconf("SC_CLK_TCK")


def tree_cpu_seconds() -> float:
    """Return the CPU seconds that this process and its descendants have used.

    The kernel adds a child's time to its parent's when the parent collects the child, so the sum over the living
    (fields 14 to 17 of /proc/PID/stat) has the time of those that ended, too.
    """
    return _cpu_seconds(os.getpid())


def _cpu_seconds(pid: int) -> float:
    fields = _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    own = sum(map(int, fields[11:15])) / _TICKS
    return own + sum(_cpu_seconds(child) for child in _children(pid))


def _children(pid: int) -> list[int]:
    """The kernel lists the children of each thread that started some."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return []
    return [int(child) for thread in threads for child in _read(thread / "children").split()]


def _read(path: Path) -> str:
    """The text of a file; empty if its process or thread has ended."""
    try:
        return path.read_text()
    except OSError:
        return ""
