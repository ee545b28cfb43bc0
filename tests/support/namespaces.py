"""Real PID namespaces, made with unshare(1), and what the host's /proc says of the processes in them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

__all__ = ["CONTAINER", "children", "needs_namespaces"]

CONTAINER = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
"""A launcher: what follows it is pid 1 of a PID namespace of its own, with a /proc of its own."""


def _can_unshare() -> bool:
    try:
        return subprocess.run([*CONTAINER, "true"], capture_output=True, timeout=30, check=False).returncode == 0
    except OSError:
        return False


needs_namespaces = pytest.mark.skipif(not _can_unshare(), reason="making PID namespaces is not allowed here (unshare)")


def children(pid: int) -> list[int]:
    """The pids of a process' children."""
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
