"""The processes of a Linux host, from /proc."""

from __future__ import annotations

import os
import pwd
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gpumem_client.wire.procfs import (
    describe_command,
    known_ray_job_id,
    parse_stat_parent,
    parse_stat_program,
    pid_namespace,
    runs_python,
    split_cmdline,
    started_by_multiprocessing,
)
from gpumem_client.wire.protocol import MAX_LABEL_LENGTH, ProcessIdentity
from gpumem_exporter.core.place import Place
from gpumem_exporter.core.samples import ProcessFacts
from gpumem_exporter.host.containers import container_id, pod_uid
from gpumem_exporter.host.entries import HiddenError, ProcEntries
from gpumem_exporter.host.namespaces import PidTranslator
from gpumem_exporter.host.places import Places

__all__ = ["LinuxHost"]

_READ_AGAIN_SECONDS = 60.0
_ANCESTORS_MAX = 4
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_JOB_VARIABLES = ("SLURM_JOB_ID", "RAY_JOB_ID")


@dataclass(frozen=True, slots=True)
class _Known:
    facts: ProcessFacts
    program: tuple[int, str, int]
    """The result of `parse_stat_program`, which changes when the pid is reused and after an exec."""
    read_seconds: float


class LinuxHost:
    """Describes processes from /proc. Thread-safe.

    If a file is not readable (another user's process, `hidepid`), only the facts from that file are missing. Facts are
    cached until the process runs another program, at most for a minute, because a process may rename itself.

    Args:
        proc: the mount point of the proc file system.
        clock: monotonic seconds.
    """

    def __init__(self, proc: Path = Path("/proc"), *, clock: Callable[[], float] = time.monotonic) -> None:
        self._proc = str(proc)
        self._clock = clock
        self._entries = ProcEntries(proc)
        self._own_namespace = pid_namespace(f"{proc}/self")
        self._places = Places(proc)
        self._translator = PidTranslator(self._entries, self._own_namespace, clock)
        self._lock = threading.Lock()
        """Protects the caches below; files and the directory service are read without it."""
        self._known: dict[int, _Known] = {}
        self._users: dict[int, str] = {}
        self._nameless: dict[int, float] = {}
        """Uids without a name, and when that was found; a directory service may be temporarily unavailable."""
        self._swept_seconds = clock()

    def facts(self, pid: int) -> ProcessFacts | None:
        """Return the description of a process; None if it does not exist. Facts that cannot be read are empty."""
        now = self._clock()
        program = self._program(pid)
        with self._lock:
            self._sweep(now)
            known = self._known.get(pid)
        if known is not None and known.program == program and now - known.read_seconds < _READ_AGAIN_SECONDS:
            return known.facts
        facts = None if program is None else self._read_facts(pid, program[0])
        # If the process exited or started another program meanwhile, the facts may be a mixture of both.
        if facts is None or program is None or self._program(pid) != program:
            with self._lock:
                self._known.pop(pid, None)
            return None
        with self._lock:
            self._known[pid] = _Known(facts, program, now)
        return facts

    def host_pid(self, identity: ProcessIdentity, peer_pid: int | None) -> int | None:
        """Return the pid of a reporter in the driver's list; None if it cannot be known.

        The candidates, in this order, are the socket's peer pid, the reporter's own pid if it shares this PID
        namespace, and a process in /proc that has this pid in the reporter's namespace. The start time and the own pid
        of a candidate must be equal.
        """
        return self._translator.host_pid(identity, peer_pid)

    def owner_uid(self, identity: ProcessIdentity, host_pid: int | None) -> int | None:
        """Return the effective uid of the process that a reporter names; None if the exporter cannot see the process.

        If `host_pid` is None, it is the process that has the reporter's pid in this PID namespace.
        """
        if host_pid is not None:
            return self._uid(host_pid)
        return self._uid(identity.pid) if identity.pid_namespace == self._own_namespace != 0 else None

    def place(self, host_pid: int) -> Place:
        """Return where a process runs; unknown if the exporter cannot see it."""
        return self._places.of(host_pid)

    def program(self, host_pid: int) -> int | None:
        """Return the stack address, which every exec changes; None unless this user may trace the process."""
        program = self._program(host_pid)
        return program[2] or None if program is not None else None

    def alive(self, host_pid: int, start_time_ticks: int) -> bool:
        """Return whether this process still runs. A process whose `stat` is not readable counts as running."""
        try:
            return self._entries.start_time_ticks(host_pid) == start_time_ticks
        except HiddenError:
            return True

    def _sweep(self, now: float) -> None:
        """Drop cached facts that were not requested since they expired. The caller holds the lock."""
        if now - self._swept_seconds < _READ_AGAIN_SECONDS:
            return
        self._swept_seconds = now
        stale = [pid for pid, known in self._known.items() if now - known.read_seconds >= 2 * _READ_AGAIN_SECONDS]
        for pid in stale:
            del self._known[pid]

    def _program(self, pid: int) -> tuple[int, str, int] | None:
        """Read the identity of the running program; None if the process does not exist or has exited."""
        try:
            stat = self._entries.read(pid, "stat")
        except HiddenError:
            try:
                entry = os.stat(f"{self._proc}/{pid}")  # noqa: PTH116 - pathlib costs ten times as much
            except OSError:
                return None
            return (0, f"{entry.st_ino} {entry.st_ctime_ns}", 0)  # the inode is new for each process
        return None if stat is None else parse_stat_program(stat.decode("utf-8", "replace"))

    def _read_facts(self, pid: int, start_time_ticks: int) -> ProcessFacts | None:
        try:
            owner_uid = os.stat(f"{self._proc}/{pid}").st_uid  # noqa: PTH116 - pathlib costs ten times as much
        except OSError:
            return None
        cgroup = self._text(pid, "cgroup")
        slurm_job_id, ray_job_id = self._jobs(pid)
        # Root owns the directory of a process that is not dumpable, so `status` comes first.
        known_uid = self._uid(pid)
        return ProcessFacts(
            pid=pid,
            start_time_ticks=start_time_ticks,
            command=self._command(pid),
            user=self._user(owner_uid if known_uid is None else known_uid),
            uid=known_uid,
            started_seconds=self._started_seconds(start_time_ticks),
            container_id=container_id(cgroup),
            k8s_pod_uid=pod_uid(cgroup),
            slurm_job_id=slurm_job_id,
            ray_job_id=ray_job_id,
        )

    def _jobs(self, pid: int) -> tuple[str, str]:
        try:
            slurm_job_id, ray_job_id = self._entries.variables(pid, _JOB_VARIABLES)
        except HiddenError:
            return ("", "")
        return (slurm_job_id[:MAX_LABEL_LENGTH], known_ray_job_id(ray_job_id)[:MAX_LABEL_LENGTH])

    def _text(self, pid: int, name: str) -> str:
        try:
            return (self._entries.read(pid, name) or b"").decode("utf-8", "replace")
        except HiddenError:
            return ""

    def _command(self, pid: int) -> str:
        try:
            argv = split_cmdline(self._entries.read(pid, "cmdline") or b"")
            described = describe_command(self._script_of_worker(pid, argv) or argv)
        except HiddenError:
            described = ""
        # A process that cleared its command line still has the kernel's short name.
        return described or describe_command([self._text(pid, "comm").strip()])

    def _script_of_worker(self, pid: int, argv: list[str]) -> list[str] | None:
        """Return the command line of the script that started a worker of `multiprocessing`; None if it is unknown.

        The parent of a spawned worker is the script. A fork server is between the script and its workers.
        """
        for _ in range(_ANCESTORS_MAX):
            if not started_by_multiprocessing(argv):
                return argv
            try:
                pid = parse_stat_parent(self._text(pid, "stat"))
                argv = split_cmdline(self._entries.read(pid, "cmdline") or b"")
            except (HiddenError, ValueError):
                return None
            if not runs_python(argv):  # the script has exited: this process has adopted its workers
                return None
        return None

    def _uid(self, pid: int) -> int | None:
        """Return the effective uid; None if the process does not exist or its `status` is not readable."""
        for line in self._text(pid, "status").splitlines():
            if line.startswith("Uid:"):
                return int(line.split()[2])
        return None

    def _started_seconds(self, start_time_ticks: int) -> float | None:
        """Return the start of a process on this object's clock; None if it is unknown."""
        if start_time_ticks <= 0:
            return None
        return self._clock() - (time.clock_gettime(time.CLOCK_BOOTTIME) - start_time_ticks / _TICKS_PER_SECOND)

    def _user(self, uid: int) -> str:
        now = self._clock()
        with self._lock:
            name = self._users.get(uid)
            asked_seconds = self._nameless.get(uid, float("-inf"))
        if name is not None:
            return name
        if now - asked_seconds < _READ_AGAIN_SECONDS:
            return str(uid)
        try:
            name = pwd.getpwuid(uid).pw_name[:MAX_LABEL_LENGTH]  # may wait for a directory service: without the lock
        except (KeyError, OSError):
            name = None
        with self._lock:
            if name is None:
                self._nameless[uid] = now
            else:
                self._nameless.pop(uid, None)
                self._users[uid] = name
        return str(uid) if name is None else name
