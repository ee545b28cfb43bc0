"""Finds the HTTP interface of the vLLM of a process, as the kernel shows it.

The interface is a port of loopback on which the process itself or one of its ancestors listens. Ancestors count as long
as they have the same user and are in the same place.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from gpumem_client.wire.procfs import parse_stat, split_cmdline
from gpumem_client.wire.reason_codes import ReasonCode
from gpumem_exporter.actions.selection import SelectedProcess
from gpumem_exporter.features.engines.engine_listeners import Listener, Listeners
from gpumem_exporter.features.engines.vllm import EngineRefusedError, Vllm
from gpumem_exporter.node.containers import Places
from gpumem_exporter.node.proc_entries import HiddenError, ProcEntries
from gpumem_exporter.node.sockets import SocketHolders

_DEFAULT_PORT = "8000"
_WORKERS = ("VLLM::EngineCore", "VLLM::Worker")
"""The starts of the titles of processes that are not the server."""
_TITLE = re.compile(r"(?:^|[\s/])(?:VLLM::|vllm)")
_MAX_ANCESTORS = 8
_MAX_ARGV_BYTES = 1 << 16


class _Program(NamedTuple):
    """The process on the device, or one of its ancestors."""

    pid: int
    started: int
    argv: tuple[str, ...]
    """Empty or a title, if the program has replaced it."""
    listeners: tuple[Listener, ...]

    @property
    def listener(self) -> Listener | None:
        """The port of vLLM's interface: as on the command line, the default one, or the only one."""
        by_port = {str(listener.address[1]): listener for listener in self.listeners}
        title = " ".join(self.argv)
        if not by_port or _TITLE.search(title) is None:
            return None
        found = by_port.get(self._port()) or by_port.get(_DEFAULT_PORT)
        # Workers may listen for each other, so the only port of a worker does not count.
        alone = len(by_port) == 1 and not title.startswith(_WORKERS)
        return found or (next(iter(by_port.values())) if alone else None)

    def _port(self) -> str:
        """Return the value of `--port`; empty without it."""
        for position, argument in enumerate(self.argv):
            name, equals, value = argument.partition("=")
            if name == "--port":
                return value if equals else "".join(self.argv[position + 1 : position + 2])
        return ""


def no_engine(target: SelectedProcess) -> EngineRefusedError:
    """Return the error for a process that does not belong to vLLM."""
    reason = f"{target.title or target} is not vLLM, and sleep and wake act on no other engine"
    return EngineRefusedError(ReasonCode.NO_ENGINE, reason, outcome="unsupported")


class EngineControl:
    """Finds the servers of vLLM in the proc file system of this machine. Thread-safe."""

    def __init__(self) -> None:
        proc = Path("/proc")
        self._entries = ProcEntries(proc)
        self._places = Places(proc)
        self._holders = SocketHolders(self._places)

    def is_engine(self, target: SelectedProcess) -> bool:
        """Return whether a process belongs to vLLM, by the name in its report, otherwise by its title."""
        reported = target.reporter.report.engine if target.reporter is not None else None
        return reported.name.lower() == "vllm" if reported is not None else _TITLE.search(target.title) is not None

    def find(self, target: SelectedProcess) -> Vllm:
        """Find the vLLM of a process; raise EngineRefusedError if the exporter cannot speak with it."""
        if not self.is_engine(target):
            raise no_engine(target)
        if not target.attested:
            reason = "its report is not attested: the kernel has not named the sender"
            raise EngineRefusedError(ReasonCode.NOT_ATTESTED, reason)
        if target.host_pid is None or target.start_time_ticks <= 0:
            reason = "the exporter does not see its process on this host"
            raise EngineRefusedError(ReasonCode.UNKNOWN_HOST_PID, reason)
        programs = list(self._programs(target))
        if not programs:
            raise EngineRefusedError(ReasonCode.PROCESS_EXITED, "it has exited", outcome="gone")
        for program in (*programs[1:], programs[0]):
            listener = program.listener
            if listener is None:
                continue
            # Compared again, after everything was read: no later process with the same pid is taken for one of them.
            same = self._started(program.pid) == program.started
            if self._started(target.host_pid) != target.start_time_ticks or not same:
                break
            return Vllm(program.argv, listener, (program.pid, program.started))
        reason = (
            "vLLM: neither the process nor a parent of the same user listens on a port of loopback that the exporter "
            "reaches. In a container, the engine has a network of its own"
        )
        raise EngineRefusedError(ReasonCode.ENGINE_UNREACHABLE, reason, outcome="unsupported")

    def _programs(self, target: SelectedProcess) -> Iterator[_Program]:
        """Yield a process and its ancestors of the same user and place."""
        pid = target.host_pid or 0
        uid, place = self._entries.uid(pid), self._places.of(pid)
        started: int | None = self._started(pid)
        if uid is None or not place.known or started != target.start_time_ticks:
            return
        listeners = Listeners(self._holders)
        for _ in range(_MAX_ANCESTORS):
            if started is None or (self._entries.uid(pid), self._places.of(pid)) != (uid, place):
                return
            yield _Program(pid, started, self._argv(pid), listeners.of(pid, uid, place))
            try:
                pid = parse_stat(self._entries.text(pid, "stat")).parent_pid
            except ValueError:
                return
            if pid <= 1:
                return
            started = self._started(pid)

    def _argv(self, pid: int) -> tuple[str, ...]:
        try:
            return tuple(split_cmdline(self._entries.read(pid, "cmdline", _MAX_ARGV_BYTES) or b""))
        except HiddenError:
            return ()

    def _started(self, pid: int) -> int | None:
        try:
            return self._entries.start_time_ticks(pid)
        except HiddenError:
            return None
