"""The processes of a Linux host, from /proc."""

from __future__ import annotations

import os
import pwd
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from gpumem_client.wire.procfs import (
    describe_command,
    known_ray_job_id,
    parse_stat,
    parse_stat_program,
    pid_namespace,
    runs_python,
    split_cmdline,
    started_by_multiprocessing,
)
from gpumem_client.wire.protocol import MAX_LABEL_LENGTH, ProcessIdentity
from gpumem_exporter.core.container import Place
from gpumem_exporter.core.readings import ProcessFacts
from gpumem_exporter.node.containers import Places, container_id, pod_uid, slurm_job, user_of_slice
from gpumem_exporter.node.launchers import Launchers
from gpumem_exporter.node.pid_namespaces import PidTranslator
from gpumem_exporter.node.proc_entries import HiddenError, ProcEntries

_READ_AGAIN_SECONDS = 60.0
_ANCESTORS_MAX = 4
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_JOB_VARIABLES = ("SLURM_JOB_ID", "SLURM_JOB_ACCOUNT", "RAY_JOB_ID")


@dataclass(frozen=True, slots=True)
class _Known:
    facts: ProcessFacts
    program: tuple[int, str, int]
    """The result of `parse_stat_program`, which changes when the pid is reused and after an exec."""
    read_seconds: float


class LinuxHost:
    """Describes processes from /proc. Thread-safe.

    If a file is not readable (another user's process, `hidepid`), only the facts from that file are missing.
    """

    def __init__(self, proc: Path = Path("/proc"), *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._entries = ProcEntries(proc)
        self._own_namespace = pid_namespace(self._entries.path("self"))
        self._places = Places(proc)
        self._translator = PidTranslator(self._entries, self._own_namespace, clock)
        self._launchers = Launchers(self._entries, self._own_namespace)  # only `facts` uses it
        # Threads use the caches without a lock, so their operations are atomic; a lost one costs another look-up.
        self._known: dict[int, _Known] = {}
        # The name of each uid, and until when it is valid.
        self._users: dict[int, tuple[str, float]] = {}
        self._swept_seconds = clock()
        # Whether slurmstepd makes cgroups here. Then every process of a job is in one, unless it is in a container.
        self._has_slurm_jobs = False

    def facts(self, pid: int) -> ProcessFacts | None:
        """Return the description of a process; None if it does not exist. Facts that cannot be read are empty.

        Only one thread may call it.
        """
        now = self._clock()
        self._sweep(now)
        program, stat = self._read_program(pid)
        known = self._known.get(pid)
        # After a minute again, because a process may rename itself.
        if known is None or known.program != program or now - known.read_seconds >= _READ_AGAIN_SECONDS:
            facts = None if program is None else self._read_facts(pid, program[0])
            # If the process exited or started another program meanwhile, the facts may be a mixture of both.
            if facts is None or program is None or self._read_program(pid)[0] != program:
                self._known.pop(pid, None)
                return None
            known = self._known[pid] = _Known(facts, program, now)
        lost = self._launchers.lost(pid, stat, now) if stat else None
        return known.facts if lost is None else replace(known.facts, lost=lost)

    def host_pid(self, identity: ProcessIdentity, peer_pid: int | None) -> int | None:
        """Return the pid of a reporter in the driver's list; None if it cannot be known."""
        return self._translator.host_pid(identity, peer_pid)

    def owner_uid(self, identity: ProcessIdentity, host_pid: int | None) -> int | None:
        """Return the effective uid of the process that a reporter names; see `Host.owner_uid`."""
        if host_pid is not None:
            return self._entries.uid(host_pid)
        return self._entries.uid(identity.pid) if identity.pid_namespace == self._own_namespace != 0 else None

    def place(self, host_pid: int) -> Place:
        """Return where a process runs; unknown if the exporter cannot see it."""
        return self._places.of(host_pid)

    def slurm_job(self, pid: int | None) -> str | None:
        """Return the Slurm job of a process; see `Host.slurm_job`."""
        if pid is None:  # each report asks this
            return "" if self._has_slurm_jobs else None
        return self._slurm_job(self._entries.text(pid, "cgroup"))

    def _slurm_job(self, cgroup: str) -> str | None:
        if job := slurm_job(cgroup):
            self._has_slurm_jobs = True
            return job
        # A container may run in a job, in a cgroup elsewhere. A user's own one, in its slice, would be in the job's.
        in_container = container_id(cgroup) and user_of_slice(cgroup) is None
        return "" if self._has_slurm_jobs and not in_container else None

    def program(self, host_pid: int) -> int | None:
        """Return the stack address, which every exec changes; None unless this user may trace the process."""
        program, _ = self._read_program(host_pid)
        return program[2] or None if program is not None else None

    def alive(self, host_pid: int, start_time_ticks: int) -> bool:
        """Return whether this process still runs. A process whose `stat` is not readable counts as running."""
        try:
            return self._entries.start_time_ticks(host_pid) == start_time_ticks
        except HiddenError:
            return True

    def _sweep(self, now: float) -> None:
        """Drop cached facts that were not requested since they expired."""
        if now - self._swept_seconds < _READ_AGAIN_SECONDS:
            return
        # The last poll may be long ago: a process that it looked at is kept.
        self._launchers.sweep(self._swept_seconds)
        self._swept_seconds = now
        for pid, known in list(self._known.items()):
            if now - known.read_seconds >= 2 * _READ_AGAIN_SECONDS:
                self._known.pop(pid, None)

    def _read_program(self, pid: int) -> tuple[tuple[int, str, int] | None, str]:
        """Read the identity of the running program, and /proc/PID/stat.

        The identity is None if the process does not exist or has exited; the text is empty if it is hidden.
        """
        try:
            stat = self._entries.read(pid, "stat")
        except HiddenError:
            folder = self._entries.owner(pid)  # the inode is new for each process
            return (None if folder is None else (0, f"{folder.st_ino} {folder.st_ctime_ns}", 0)), ""
        text = (stat or b"").decode("utf-8", "replace")
        return (parse_stat_program(text) if text else None), text

    def _read_facts(self, pid: int, start_time_ticks: int) -> ProcessFacts | None:
        folder = self._entries.owner(pid)
        if folder is None:
            return None
        cgroup = self._entries.text(pid, "cgroup")
        slurm_job_id, slurm_account, ray_job_id = self._jobs(pid)
        of_cgroup = self._slurm_job(cgroup)
        # Root owns the folder of a process that is not dumpable, so `status` comes first.
        known_uid = self._entries.uid(pid)
        return ProcessFacts(
            pid=pid,
            start_time_ticks=start_time_ticks,
            command=self._command(pid),
            user=self._user_name(pid, folder.st_uid if known_uid is None else known_uid),
            uid=known_uid,
            started_seconds=self._started_seconds(start_time_ticks),
            container_id=container_id(cgroup),
            k8s_pod_uid=pod_uid(cgroup),
            slurm_job_id=slurm_job_id if of_cgroup is None else of_cgroup,
            slurm_account=slurm_account,
            ray_job_id=ray_job_id,
        )

    def _jobs(self, pid: int) -> tuple[str, str, str]:
        """Return job and account of Slurm, and the job of Ray, as the process' environment has them."""
        try:
            job, account, ray_job = self._entries.variables(pid, _JOB_VARIABLES)
        except HiddenError:
            return ("", "", "")
        return job[:MAX_LABEL_LENGTH], account[:MAX_LABEL_LENGTH], known_ray_job_id(ray_job)[:MAX_LABEL_LENGTH]

    def _command(self, pid: int) -> str:
        try:
            argv = split_cmdline(self._entries.read(pid, "cmdline") or b"")
            described = describe_command(self._script_of_worker(pid, argv) or argv)
        except HiddenError:
            described = ""
        # A process that cleared its command line still has the kernel's short name.
        return described or describe_command([self._entries.text(pid, "comm").strip()])

    def _script_of_worker(self, pid: int, argv: list[str]) -> list[str] | None:
        """Return the command line of the script that started a worker of `multiprocessing`; None if it is unknown.

        The parent of a spawned worker is the script. A fork server is between the script and its workers.
        """
        for _ in range(_ANCESTORS_MAX):
            if not started_by_multiprocessing(argv):
                return argv
            try:
                pid = parse_stat(self._entries.text(pid, "stat")).parent_pid
                argv = split_cmdline(self._entries.read(pid, "cmdline") or b"")
            except (HiddenError, ValueError):
                return None
            if not runs_python(argv):  # the script has exited: this process has adopted its workers
                return None
        return None

    def _started_seconds(self, start_time_ticks: int) -> float | None:
        """Return the start of a process on this object's clock; None if it is unknown."""
        if start_time_ticks <= 0:
            return None
        return self._clock() - (time.clock_gettime(time.CLOCK_BOOTTIME) - start_time_ticks / _TICKS_PER_SECOND)

    def _user_name(self, pid: int, uid: int) -> str:
        """Return the name of the user whom this machine knows as the owner of a process; empty if there is none.

        The uid of a process in a container is a user of the container's image, such as root, and no person. A container
        that a user of this machine has started (podman, Apptainer) is that user's.
        """
        place = self._places.of(pid)
        owner = place.user if place.container else uid
        return "" if owner is None else self._user(owner)

    def _user(self, uid: int) -> str:
        now = self._clock()
        name, until_seconds = self._users.get(uid, ("", now))
        if now < until_seconds:
            return name
        try:
            name, until_seconds = pwd.getpwuid(uid).pw_name[:MAX_LABEL_LENGTH], float("inf")
        except (KeyError, OSError):  # a directory service may be temporarily unavailable
            name, until_seconds = str(uid), now + _READ_AGAIN_SECONDS
        self._users[uid] = (name, until_seconds)
        return name
