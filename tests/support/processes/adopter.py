"""A process that adopts whatever is started below it, as `docker run --init` does, so that a test finds all of it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from typing_extensions import Self

from tests.support.processes.namespaces import children
from tests.support.waiting import wait_for

PROGRAM = Path(__file__).parents[2] / "programs" / "adopter.py"


_IDLE_SOON = """
import gpumem_exporter.features.orphans.orphan_search as orphans
orphans.QUIET_SECONDS, orphans.ENDING_SECONDS = 1.0, 0.0
"""


def idle_soon(folder: Path) -> dict[str, str]:
    """Return the environment of a fresh exporter for which a process is idle after a second, not after minutes."""
    path = folder / "sitecustomize"
    path.mkdir()
    (path / "sitecustomize.py").write_text(_IDLE_SOON)
    return {"PYTHONPATH": str(path)}


class Adopter:
    """Runs commands of a shell in `folder`; a context manager, which kills everything that they have started.

    `tini`, the name of its program, is the name of an init. It is the parent of every process whose parent has ended.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str] | None = None) -> None:
        self._popen = subprocess.Popen(
            ["bash", "-c", 'exec -a tini "$0" "$@"', sys.executable, str(PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={**os.environ, "PYTHONHOME": sys.base_prefix, "PYTHON": sys.executable, **(environment or {})},
        )

    def run(self, command: str) -> int:
        """Start a command of a shell, and return the pid of the shell, or of the program that replaces it."""
        stdin, stdout = self._popen.stdin, self._popen.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(f"{command}\n".encode())
        stdin.flush()
        return int(stdout.readline())

    @property
    def pids(self) -> list[int]:
        """The pids of all that run below it."""
        return list(self._below(self._popen.pid))

    def kill(self, *pids: int) -> None:
        """Send SIGKILL to processes, and wait until they have ended."""
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not set(pids) & set(self.pids), f"the end of {pids}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # What is killed may start others before it ends.
        while running := self.pids:
            self.kill(*running)
        self._popen.kill()
        self._popen.communicate()

    def _below(self, pid: int) -> Iterator[int]:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            for child in children(pid):
                yield child
                yield from self._below(child)
