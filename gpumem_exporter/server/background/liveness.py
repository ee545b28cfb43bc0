"""Which reporting processes are still there: a process that has gone is forgotten, with its series, at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from gpumem_exporter.actions.dispatcher import Dispatcher
from gpumem_exporter.core.samples import ProcessKey, ReportingProcess
from gpumem_exporter.core.store import Store
from gpumem_exporter.host import Host
from gpumem_exporter.wire.protocol import ProcessIdentity

__all__ = ["Presence"]

_LAST_BREATH_SECONDS = (0.0, 0.05, 0.2, 0.5)
"""A killed process' sockets close before it is gone, and a large one takes its time: looked again after each."""

_ASK_AGAIN_SECONDS = 10.0
"""For a reporter whose host pid was not to be found."""


@dataclass(frozen=True, slots=True)
class _Known:
    who: tuple[int, int | None]
    host_pid: int | None
    asked_seconds: float
    session: str
    program: int | None
    """What it ran when this session was first heard."""


class Presence:
    """Knows reporters by their host pid and notices when they go. For the event loop.

    Args:
        store: where a process that has gone is forgotten.
        dispatcher: where its actions end.
        host: what the operating system says.
        clock: monotonic seconds.
        report_interval_seconds: a process that reported within two of these is not asked after.
        on_gone: told of each process that is forgotten, and why.
    """

    def __init__(
        self,
        store: Store,
        dispatcher: Dispatcher,
        host: Host,
        *,
        clock: Callable[[], float],
        report_interval_seconds: float,
        on_gone: Callable[[ProcessKey, str], None] = lambda *_: None,
    ) -> None:
        self._store = store
        self._dispatcher = dispatcher
        self._host = host
        self._clock = clock
        self._on_gone = on_gone
        self._quiet_seconds = 2 * report_interval_seconds
        self._host_pids: dict[ProcessKey, _Known] = {}
        self._watches: set[asyncio.Task[None]] = set()
        self._disconnected: set[ProcessKey] = set()
        """Reporters without a known host pid whose connection broke after their last report."""

    async def host_pid(self, identity: ProcessIdentity, peer_pid: int | None) -> int | None:
        """The reporter's pid as the driver sees it, looked up in a thread: that may mean a search of /proc."""
        key = ProcessKey(identity.pid_namespace, identity.pid)
        self._disconnected.discard(key)
        who = (identity.start_time_ticks, peer_pid)
        known = self._host_pids.get(key)
        now = self._clock()
        if (
            known is not None
            and known.who == who
            and (known.host_pid is not None or now - known.asked_seconds < _ASK_AGAIN_SECONDS)
        ):
            if known.session == identity.session:
                return known.host_pid
            host_pid, now = known.host_pid, known.asked_seconds
        else:
            host_pid = await asyncio.to_thread(self._host.host_pid, identity, peer_pid)
        program = self._host.program(host_pid) if host_pid is not None else None
        while len(self._host_pids) > 2 * self._store.max_processes:
            del self._host_pids[next(iter(self._host_pids))]
        self._host_pids[key] = _Known(who, host_pid, now, identity.session, program)
        return host_pid

    def forget(self, key: ProcessKey, reason: str) -> None:
        """Drop a process that has gone."""
        self._on_gone(key, reason)
        self._store.forget(key)
        self._dispatcher.process_gone(key, reason)
        self._host_pids.pop(key, None)

    def replaced(self, before: ReportingProcess, now: ReportingProcess) -> None:
        """Another reporter fills a process' place: what waited for the one before must not reach it."""
        if before.start_time_ticks != now.start_time_ticks:
            reason = "the process has gone, and its pid has been used again"
            self._on_gone(before.key, reason)
        else:
            reason = "another reporter speaks for the process since: it runs another program, or has started anew"
        self._dispatcher.process_gone(before.key, reason)

    def sweep(self) -> None:
        """Forget every quiet process that has gone, or that runs another program since; called once a second."""
        now = self._clock()
        snapshot = self._store.snapshot(now)
        for process in snapshot.processes:
            if now - process.received_seconds > self._quiet_seconds:
                self._forget_if_dead(process.key, process.host_pid, process.report.process.start_time_ticks)
        self._disconnected &= {process.key for process in snapshot.processes} | {one.key for one in snapshot.silent}
        for silent in snapshot.silent:
            if silent.key in self._disconnected:
                self.forget(silent.key, "its connection broke, and it has not reported since")
            else:
                self._forget_if_dead(silent.key, silent.host_pid, silent.start_time_ticks)

    def connection_lost(self, process: ReportingProcess) -> None:
        """Find out soon whether a process has exited whose held request broke.

        If its host pid is not known, /proc cannot tell: the process is forgotten when its report expires. One that
        lives reports again before, and a stopped one keeps its connection.
        """
        if process.host_pid is None:
            self._disconnected.add(process.key)
        else:
            watch = asyncio.ensure_future(self._watch(process, process.host_pid))
            self._watches.add(watch)
            watch.add_done_callback(self._watches.discard)

    def close(self) -> None:
        """End what `connection_lost` began."""
        for watch in self._watches:
            watch.cancel()

    async def _watch(self, process: ReportingProcess, host_pid: int) -> None:
        for seconds in _LAST_BREATH_SECONDS:
            await asyncio.sleep(seconds)
            known = self._store.find(process.key)
            if known is None or known.report is not process.report:
                return
            if self._forget_if_dead(process.key, host_pid, process.report.process.start_time_ticks):
                return

    def _forget_if_dead(self, key: ProcessKey, host_pid: int | None, start_time_ticks: int) -> bool:
        if host_pid is None:
            return False
        if not self._host.alive(host_pid, start_time_ticks):
            self.forget(key, "the process has gone")
        elif self._runs_another_program(key, host_pid):
            self.forget(key, "the process runs another program since (exec)")
        else:
            return False
        return True

    def _runs_another_program(self, key: ProcessKey, host_pid: int) -> bool:
        known = self._host_pids.get(key)
        if known is None or known.program is None or known.host_pid != host_pid:
            return False
        program = self._host.program(host_pid)
        return program is not None and program != known.program
