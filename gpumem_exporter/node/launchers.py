"""Finds the processes on the devices whose launcher has ended, although it should have ended them. Reads /proc.

A process depends on its parent if

- its title or command line shows that it is a child: an engine's worker (`VLLM::EngineCore`, `sglang::scheduler`) or a
  process that `multiprocessing` has spawned;
- or its parent is a launcher that ends its workers: torchrun, accelerate, deepspeed, or Ray's raylet.

A container is gone if the shim of its runtime has ended, which was seen above the container's processes before.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto

from gpumem_client.wire.procfs import (
    INITIAL_PID_NAMESPACE,
    describe_command,
    parse_stat,
    split_cmdline,
    started_by_multiprocessing,
)
from gpumem_exporter.core.readings import LostLauncher
from gpumem_exporter.node.containers import container_id
from gpumem_exporter.node.proc_entries import HiddenError, ProcEntries

LAUNCHER_ENDED, CONTAINER_GONE = "launcher_ended", "container_gone"
_CHILD_TITLES = ("VLLM::EngineCore", "VLLM::Worker", "sglang::scheduler", "sglang::data_parallel")
# As `describe_command` shows them.
_LAUNCHERS = re.compile(
    r"raylet|(?:python\S* (?:-m )?)?"
    r"(?:torchrun|torch\.distributed\.(?:run|launch)|accelerate|accelerate\.commands\.(?:launch|accelerate_cli)"
    r"|accelerate-launch|deepspeed|deepspeed\.launcher\.(?:launch|runner))"
)
# Programs that adopt processes and start no such child themselves: inits, commands as pid 1 of a container, and the
# daemon of a Slurm step.
_INITS = (
    *("systemd", "init", "tini", "docker-init", "dumb-init", "catatonit", "s6-svscan", "pause"),
    *("slurmstepd", "sh", "bash"),
)
_SHIMS = ("containerd-shim", "conmon")
# An argument of the conmon of `podman exec`, which ends before the container.
_OF_EXEC = "--exec-attach"
# The ancestors that are followed: an engine's worker, its core and its server; in a container also shells.
_LEVELS = 8
_DESCRIBE_AGAIN_SECONDS = 60.0
# A process computes if it uses this share of a core over this time. The reporter and the idle threads of a vLLM engine
# without a server took 0.02.
_CPU_SECONDS, _CPU_SHARE = 10.0, 0.05
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


class _Role(Enum):
    """What a parent is for its process."""

    OTHER = auto()
    LAUNCHER = auto()
    """It ends its workers."""
    SHIM = auto()
    """It supervises the container."""
    STRANGER = auto()
    """An init or a process of another user: it has not started the process, or the process does not depend on it."""


@dataclass(slots=True)
class _Followed:
    """A process on a device, or an ancestor of one."""

    start_time_ticks: int
    cpu_ticks: int
    cpu_seconds: float
    """When `cpu_ticks` were read."""
    computed_seconds: float
    looked_seconds: float
    described_seconds: float = 0.0
    parent_pid: int = 0
    parent_command: str = ""
    role: _Role = _Role.STRANGER
    """Of the parent, as it was seen last."""
    is_child: bool = False
    """Its title or its command line shows that it depends on its parent."""
    in_container: bool = False
    lost: LostLauncher | None = None

    @property
    def depends(self) -> bool:
        return self.role is _Role.LAUNCHER or (self.is_child and self.role is _Role.OTHER)


class Launchers:
    """Follows processes from their first sight to their end. Used by one thread.

    It keeps a few hundred bytes for each process; `sweep` forgets processes that have ended.
    """

    def __init__(self, entries: ProcEntries, own_namespace: int) -> None:
        self._entries = entries
        self._in_host_namespace = own_namespace == INITIAL_PID_NAMESPACE
        self._followed: dict[int, _Followed] = {}

    def lost(self, pid: int, stat_text: str, now: float) -> LostLauncher | None:
        """Return what a process on a device has lost; None if it has its launcher, never had one, or may outlive it.

        `stat_text` is /proc/PID/stat, which the caller has just read. Takes a comparison for most processes; reads the
        `stat` of each ancestor that is followed, and once a minute the command lines of process and parent.
        """
        lost = self._look(pid, stat_text, now, _LEVELS)
        if lost is None:
            return None
        return replace(lost, computed_seconds=self._followed[pid].computed_seconds)

    def sweep(self, before_seconds: float) -> None:
        """Forget the processes that were not looked at since this time."""
        self._followed = {pid: each for pid, each in self._followed.items() if each.looked_seconds >= before_seconds}

    def _look(self, pid: int, stat_text: str, now: float, levels: int) -> LostLauncher | None:
        try:
            _, parent_pid, cpu_ticks, start_time_ticks = parse_stat(stat_text)
        except ValueError:
            return None
        known = self._followed.get(pid)
        if known is None or known.start_time_ticks != start_time_ticks:
            known = self._followed[pid] = _Followed(start_time_ticks, cpu_ticks, now, now, now)
            self._describe(pid, known, parent_pid, now)
        elif known.parent_pid != parent_pid:
            self._reparented(pid, known, parent_pid, now)
        elif now - known.described_seconds >= _DESCRIBE_AGAIN_SECONDS:
            self._describe(pid, known, parent_pid, now)
        known.looked_seconds = now
        elapsed_seconds = now - known.cpu_seconds
        if elapsed_seconds >= _CPU_SECONDS:
            if cpu_ticks - known.cpu_ticks >= _CPU_SHARE * elapsed_seconds * _TICKS_PER_SECOND:
                known.computed_seconds = now
            known.cpu_ticks, known.cpu_seconds = cpu_ticks, now
        return known.lost or (self._lost_above(known, now, levels) if levels else None)

    def _lost_above(self, known: _Followed, now: float, levels: int) -> LostLauncher | None:
        """Return what the parent has lost, if the process depends on it or is in the same container."""
        if known.role is _Role.SHIM or not (known.depends or known.in_container):
            return None
        above = self._look(known.parent_pid, self._entries.text(known.parent_pid, "stat"), now, levels - 1)
        return above if above is not None and (known.depends or above.reason == CONTAINER_GONE) else None

    def _reparented(self, pid: int, known: _Followed, parent_pid: int, now: float) -> None:
        """Note that the parent has ended."""
        # The kernel gives a process another parent exactly when its parent ends.
        before = replace(known)
        self._describe(pid, known, parent_pid, now)
        before.is_child = known.is_child
        if before.role is _Role.SHIM or before.depends:
            reason = CONTAINER_GONE if before.role is _Role.SHIM else LAUNCHER_ENDED
            known.lost = LostLauncher(reason, before.parent_command, before.parent_pid, now)

    def _describe(self, pid: int, known: _Followed, parent_pid: int, now: float) -> None:
        """Read who the process and its parent are: both may change their titles."""
        argv, parent_argv = self._argv(pid), self._argv(parent_pid)
        known.described_seconds = now
        known.is_child = bool(argv) and (argv[0].startswith(_CHILD_TITLES) or started_by_multiprocessing(argv))
        known.in_container = bool(container_id(self._entries.text(pid, "cgroup")))
        command = describe_command(parent_argv)
        program = command.partition(" ")[0].lstrip("-")
        role = _Role.STRANGER
        if known.in_container and program.startswith(_SHIMS) and _OF_EXEC not in parent_argv:
            role = _Role.SHIM
        elif program in _INITS or (parent_pid == 1 and self._in_host_namespace):
            # An init has adopted the process, or started it. One without such a title may outlive its parent: it was
            # started with nohup, in tmux, by a service manager, or as a daemon.
            if known.is_child and known.lost is None:
                known.lost = LostLauncher(LAUNCHER_ENDED)
        elif command and self._of_one_user(pid, parent_pid):
            role = _Role.LAUNCHER if _LAUNCHERS.fullmatch(command) else _Role.OTHER
        known.parent_pid, known.parent_command, known.role = parent_pid, command, role

    def _argv(self, pid: int) -> Sequence[str]:
        try:
            return split_cmdline(self._entries.read(pid, "cmdline") or b"") if pid else ()
        except HiddenError:
            return ()

    def _of_one_user(self, pid: int, parent_pid: int) -> bool:
        """Return whether both processes have one user."""
        # Otherwise a user could make the process of another one an orphan.
        own, parents = self._entries.owner(pid), self._entries.owner(parent_pid)
        return own is not None and parents is not None and own.st_uid == parents.st_uid
