"""Real PID namespaces, created with unshare(1), and their processes in the host's /proc."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

CONTAINER = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
"""A launcher that makes its command pid 1 of a new PID namespace with its own /proc."""


def _can_unshare() -> bool:
    try:
        return subprocess.run([*CONTAINER, "true"], capture_output=True, timeout=30, check=False).returncode == 0
    except OSError:
        return False


needs_namespaces = pytest.mark.skipif(not _can_unshare(), reason="making PID namespaces is not allowed here (unshare)")


def children(pid: int) -> list[int]:
    """Return the pids of the children of a process."""
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
