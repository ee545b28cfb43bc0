"""Read /proc/PID of processes that may exit at any time or belong to another user."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from gpumem_client.wire.procfs import parse_stat_start_time, parse_stat_state

__all__ = ["HiddenError", "ProcEntries"]

_ENDED = "ZXx"
_LONGEST_READ = 1 << 16
_LONGEST_ENVIRONMENT = 1 << 22


class HiddenError(Exception):
    """The process exists, but this user may not read the file."""


class ProcEntries:
    """The files of /proc/PID. Thread-safe, without state.

    Args:
        proc: the mount point of the proc file system.
    """

    def __init__(self, proc: Path) -> None:
        self._proc = str(proc)

    def path(self, pid: int | str, name: str) -> str:
        """Return the path of a file of a process."""
        return f"{self._proc}/{pid}/{name}"

    def read(self, pid: int | str, name: str, longest_bytes: int = _LONGEST_READ) -> bytes | None:
        """Return the first `longest_bytes` of a file; None if the process does not exist.

        Raises:
            HiddenError: the process exists, but this user may not read the file.
        """
        try:
            # Fast, without buffering and pathlib, because this runs each second for every process on every device.
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
        """Return the start time in clock ticks after boot; None if the process does not exist or has exited.

        A zombie counts as exited, because it uses no resources.

        Raises:
            HiddenError: the process exists, but this user may not read its `stat`.
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
        """Return variables of the initial environment of a process; empty if they are not set.

        Other variables are neither decoded nor stored, because an environment may contain secrets.

        Raises:
            HiddenError: the process exists, but this user may not read its environment.
        """
        environment = b"\0" + (self.read(pid, "environ", _LONGEST_ENVIRONMENT) or b"")
        values = []
        for name in names:
            _, _, found = environment.partition(b"\0" + name.encode() + b"=")
            values.append(found.partition(b"\0")[0].decode("utf-8", "replace"))
        return tuple(values)

    def pids(self) -> list[str]:
        """Return the pids of all processes that are visible to this user."""
        try:
            return [name for name in os.listdir(self._proc) if name.isdigit()]  # noqa: PTH208 - as above
        except OSError:
            return []
