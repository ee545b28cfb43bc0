"""Reading /proc/PID of processes that may go at any moment, or be none of our business."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from gpumem_exporter.procfs import parse_stat_start_time, parse_stat_state

__all__ = ["HiddenError", "ProcEntries"]

_ENDED = "ZXx"
_LONGEST_READ = 1 << 16
_LONGEST_ENVIRONMENT = 1 << 22


class HiddenError(Exception):
    """The process is there, and the kernel does not let this user read the file."""


class ProcEntries:
    """The files of /proc/PID. Stateless; any thread may call it.

    Args:
        proc: where the proc file system is mounted.
    """

    def __init__(self, proc: Path) -> None:
        self._proc = str(proc)

    def path(self, pid: int | str, name: str) -> str:
        """The path of one file of a process."""
        return f"{self._proc}/{pid}/{name}"

    def read(self, pid: int | str, name: str, longest_bytes: int = _LONGEST_READ) -> bytes | None:
        """Read the beginning of one file; None when there is no such process.

        Raises:
            HiddenError: the process is there and the file may not be read.
        """
        try:
            # Unbuffered and without pathlib: this runs for every process on every device, each second.
            descriptor = os.open(self.path(pid, name), os.O_RDONLY | os.O_CLOEXEC)
            try:
                return os.read(descriptor, longest_bytes)
            finally:
                os.close(descriptor)
        except (FileNotFoundError, NotADirectoryError, ProcessLookupError):
            return None
        except OSError as error:
            raise HiddenError(str(error)) from error

    def start_time_ticks(self, pid: int | str) -> int | None:
        """Clock ticks after boot at which a process began; None when there is no such process, or it has ended.

        A process that has ended and waits to be reaped, or whose parent never does that, uses nothing any more.

        Raises:
            HiddenError: the process is there and its `stat` may not be read.
        """
        stat = self.read(pid, "stat")
        if stat is None:
            return None
        text = stat.decode("utf-8", "replace")
        try:
            return None if parse_stat_state(text) in _ENDED else parse_stat_start_time(text)
        except ValueError:
            return None

    def variables(self, pid: int | str, names: Sequence[str]) -> tuple[str, ...]:
        """These variables of the environment that a process was started with, empty where they are not set.

        Nothing else of it is decoded, kept or returned: an environment holds secrets.

        Raises:
            HiddenError: the process is there and its environment may not be read.
        """
        environment = b"\0" + (self.read(pid, "environ", _LONGEST_ENVIRONMENT) or b"")
        values = []
        for name in names:
            _, _, found = environment.partition(b"\0" + name.encode() + b"=")
            values.append(found.partition(b"\0")[0].decode("utf-8", "replace"))
        return tuple(values)

    def pids(self) -> list[str]:
        """The numbers of all processes that this user is shown."""
        try:
            return [name for name in os.listdir(self._proc) if name.isdigit()]  # noqa: PTH208 - as above
        except OSError:
            return []
