"""Read /proc/PID of processes that may exit at any time or belong to another user."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from gpumem_client.wire.procfs import parse_stat

_ENDED = "ZXx"
_LONGEST_READ = 1 << 16
_LONGEST_ENVIRONMENT = 1 << 22


class HiddenError(Exception):
    """The process exists, but this user may not read the file."""


class ProcStatus(NamedTuple):
    """Lines of /proc/PID/status."""

    uid: int
    """The effective uid."""
    pids: tuple[int, ...]
    """In the PID namespace of /proc, and in each namespace below it that the process is in; its own one last."""


class ProcEntries:
    """The files of /proc/PID. Thread-safe, without state. None needs the right to trace the process, except `environ`.

    A method raises HiddenError if the process exists, but this user may not read the file.
    """

    def __init__(self, proc: Path) -> None:
        self._proc = str(proc)

    def path(self, pid: int | str, name: str = "") -> str:
        """Return the path of a file of a process, or of its folder."""
        return f"{self._proc}/{pid}/{name}" if name else f"{self._proc}/{pid}"

    def read(self, pid: int | str, name: str, longest_bytes: int = _LONGEST_READ) -> bytes | None:
        """Return the first `longest_bytes` of a file; None if the process does not exist."""
        try:
            # Fast, without buffering and pathlib, because this runs each second for every process on every device.
            descriptor = os.open(self.path(pid, name), os.O_RDONLY | os.O_CLOEXEC)
            try:
                # One read returns at most a page of a file with many lines, such as mountinfo.
                parts, left = [], longest_bytes
                while left > 0 and (part := os.read(descriptor, left)):
                    parts.append(part)
                    left -= len(part)
                return b"".join(parts)
            finally:
                os.close(descriptor)
        except (FileNotFoundError, NotADirectoryError, ProcessLookupError):
            return None
        except OSError as error:
            raise HiddenError(str(error)) from error

    def text(self, pid: int | str, name: str, longest_bytes: int = _LONGEST_READ) -> str:
        """Return a file as text, like `read`; empty if it is hidden or the process does not exist."""
        try:
            return (self.read(pid, name, longest_bytes) or b"").decode("utf-8", "replace")
        except HiddenError:
            return ""

    def status(self, pid: int | str) -> ProcStatus | None:
        """Return the status of a process; None if it is hidden or the process does not exist."""
        # A process chooses its name, the first line, in which the kernel escapes nothing but "\n" and "\\". In it,
        # splitlines() would find other lines, such as the uid of another user.
        rows = {row[0]: row for row in map(str.split, self.text(pid, "status").split("\n")) if row}
        uids, pids = rows.get("Uid:", []), rows.get("NSpid:", [])
        return ProcStatus(int(uids[2]), tuple(map(int, pids[1:]))) if len(uids) > 2 else None

    def uid(self, pid: int | str) -> int | None:
        """Return the effective uid; None if it is hidden or the process does not exist."""
        status = self.status(pid)
        return status.uid if status is not None else None

    def owner(self, pid: int | str) -> os.stat_result | None:
        """Return the status of the folder; None if the process does not exist.

        Root owns the folder of a process that is not dumpable, such as a process of sshd for its user.
        """
        try:
            return os.stat(self.path(pid))  # noqa: PTH116 - pathlib costs ten times as much
        except OSError:
            return None

    def start_time_ticks(self, pid: int | str) -> int | None:
        """Return the start time in clock ticks after boot; None if the process does not exist or has exited."""
        # A zombie counts as exited, because it uses no resources.
        stat = self.read(pid, "stat")
        if stat is None:
            return None
        try:
            parsed = parse_stat(stat.decode("utf-8", "replace"))
        except ValueError:
            return None
        return None if parsed.state in _ENDED else parsed.start_time_ticks

    def variables(self, pid: int | str, names: Sequence[str]) -> tuple[str, ...]:
        """Return variables of the initial environment of a process; empty if they are not set."""
        # Other variables are neither decoded nor stored, because an environment may contain secrets.
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
