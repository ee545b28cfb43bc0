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
    process = Path(f"/proc/{pid}")
    try:
        fields = process.joinpath("stat").read_text().rpartition(")")[2].split()
        threads = list(process.joinpath("task").iterdir())
        children = [child for thread in threads for child in thread.joinpath("children").read_text().split()]
    except OSError:  # it ended meanwhile
        return 0.0
    return sum(map(int, fields[11:15])) / _TICKS + sum(_cpu_seconds(int(child)) for child in children)
