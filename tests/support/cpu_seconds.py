"""CPU time of this process and of all its descendants, including exited ones."""

from __future__ import annotations

import os
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


def tree_cpu_seconds() -> float:
    """Return the CPU seconds that this process and its descendants have used.

    The kernel adds a child's time to its parent's when the parent waits for it, so the sum over the running processes
    (fields 14 to 17 of /proc/PID/stat) includes exited ones.
    """
    return _cpu_seconds(os.getpid())


def _cpu_seconds(pid: int) -> float:
    fields = _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    own = sum(map(int, fields[11:15])) / _TICKS
    return own + sum(_cpu_seconds(child) for child in _children(pid))


def _children(pid: int) -> list[int]:
    """Return the children of all threads of a process."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return []
    return [int(child) for thread in threads for child in _read(thread / "children").split()]


def _read(path: Path) -> str:
    """Return the text of a file; empty if its process or thread has exited."""
    try:
        return path.read_text()
    except OSError:
        return ""
