"""Finds the HTTP interface of the engine of a process, as the kernel shows it, and speaks with it.

The interface is a port of loopback on which the process itself or one of its ancestors listens. Ancestors count as long
as they have the same user and are in the same place.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from gpumem_client.wire.procfs import parse_stat, split_cmdline
from gpumem_client.wire.reason_codes import ReasonCode
from gpumem_exporter.actions.engines import EngineRefusedError, no_engine
from gpumem_exporter.actions.selection import OutsideTarget
from gpumem_exporter.core.place import Place
from gpumem_exporter.engines.adapter import Engine, Program
from gpumem_exporter.engines.listeners import Listener, Listeners
from gpumem_exporter.engines.llama_cpp import LlamaCpp
from gpumem_exporter.engines.ollama import Ollama
from gpumem_exporter.engines.sglang import Sglang
from gpumem_exporter.engines.tensorrt_llm import TensorRtLlm
from gpumem_exporter.engines.vllm import Vllm
from gpumem_exporter.host.places import Places
from gpumem_exporter.host.proc_entries import HiddenError, ProcEntries
from gpumem_exporter.host.sockets import SocketHolders

ENGINES: tuple[type[Engine], ...] = (Vllm, Sglang, TensorRtLlm, Ollama, LlamaCpp)
_MAX_ANCESTORS = 8
_MAX_ARGV_BYTES = 1 << 16


class EngineControl:
    """Finds engines in the proc file system of this machine. Thread-safe."""

    def __init__(self) -> None:
        proc = Path("/proc")
        self._entries = ProcEntries(proc)
        self._places = Places(proc)
        self._holders = SocketHolders(self._places)

    def is_engine(self, target: OutsideTarget) -> bool:
        """Return whether the name in a report, or the title of the process, is of a known engine."""
        return _engine_of(target) is not None

    def find(self, target: OutsideTarget) -> Engine:
        """Find the engine of a process; raise EngineRefusedError if the exporter cannot speak with it."""
        engine = _engine_of(target)
        if engine is None:
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
        worker = programs[0][0]
        for program, started in (*programs[1:], programs[0]):
            listener = _chosen(engine, program)
            if listener is None:
                continue
            key = (program.pid, started, worker.pid if engine.alone else None)
            found = engine(program, worker, listener, target.reporter, key)
            # Compared again, after everything was read: no later process with the same pid is taken for one of them.
            if self._started(target.host_pid) != target.start_time_ticks or self._started(program.pid) != started:
                break
            return found
        reason = (
            f"{engine.name}: neither the process nor a parent of the same user listens on a port of loopback that the "
            "exporter reaches. In a container, the engine has a network of its own"
        )
        raise EngineRefusedError(ReasonCode.ENGINE_UNREACHABLE, reason, outcome="unsupported")

    def _programs(self, target: OutsideTarget) -> Iterator[tuple[Program, int]]:
        """Yield a process and its ancestors of the same user and place, each with its start time."""
        pid = target.host_pid or 0
        uid, place = self._entries.uid(pid), self._places.of(pid)
        started: int | None = self._started(pid)
        if uid is None or not place.known or started != target.start_time_ticks:
            return
        listeners = Listeners(self._holders)
        for _ in range(_MAX_ANCESTORS):
            if started is None or (self._entries.uid(pid), self._places.of(pid)) != (uid, place):
                return
            yield self._program(pid, uid, place, listeners), started
            try:
                pid = parse_stat(self._entries.text(pid, "stat")).parent_pid
            except ValueError:
                return
            if pid <= 1:
                return
            started = self._started(pid)

    def _program(self, pid: int, uid: int, place: Place, listeners: Listeners) -> Program:
        try:
            argv = tuple(split_cmdline(self._entries.read(pid, "cmdline", _MAX_ARGV_BYTES) or b""))
        except HiddenError:
            argv = ()
        return Program(pid, argv, listeners.of(pid, uid, place), lambda name: self._variable(pid, name))

    def _variable(self, pid: int, name: str) -> str:
        try:
            return self._entries.variables(pid, [name])[0]
        except HiddenError:
            return ""

    def _started(self, pid: int) -> int | None:
        try:
            return self._entries.start_time_ticks(pid)
        except HiddenError:
            return None


def _engine_of(target: OutsideTarget) -> type[Engine] | None:
    reported = target.reporter.report.engine if target.reporter is not None else None
    named = [each for each in ENGINES if reported is not None and reported.name.lower() == each.name.lower()]
    return next(iter([*named, *(each for each in ENGINES if _is_titled(each, target.title))]), None)


def _is_titled(engine: type[Engine], text: str) -> bool:
    """Return whether a word of a title or a command starts with one of the engine's."""
    return any(re.search(rf"(?:^|[\s/]){re.escape(title)}", text) for title in engine.titles)


def _chosen(engine: type[Engine], program: Program) -> Listener | None:
    """Return the port of the engine's interface: as on the command line, the default one, or the only one."""
    by_port = {str(listener.address[1]): listener for listener in program.listeners}
    title = " ".join(program.argv)
    if not by_port or not _is_titled(engine, title):
        return None
    found = by_port.get(program.option("--port")) or by_port.get(str(engine.port))
    # Workers may listen for each other, so the only port of a worker does not count.
    alone = len(by_port) == 1 and not title.startswith(engine.workers)
    return found or (next(iter(by_port.values())) if alone else None)
