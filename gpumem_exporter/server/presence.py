"""Which reporting processes are still there: a process that has gone is forgotten, with its series, at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from gpumem_exporter.actions.dispatcher import Dispatcher
from gpumem_exporter.core.samples import ProcessKey, ReportingProcess
from gpumem_exporter.core.store import Store
from gpumem_exporter.host import Host
from gpumem_exporter.protocol import ProcessIdentity

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


class Presence:
    """Knows reporters by their host pid and notices when they go. For the event loop.

    Args:
        store: where a process that has gone is forgotten.
        dispatcher: where its actions end.
        host: what the operating system says.
        clock: monotonic seconds.
        report_interval_seconds: a process that reported within two of these is not asked after.
    """

    def __init__(
        self,
        store: Store,
        dispatcher: Dispatcher,
        host: Host,
        *,
        clock: Callable[[], float],
        report_interval_seconds: float,
    ) -> None:
        self._store = store
        self._dispatcher = dispatcher
        self._host = host
        self._clock = clock
        self._quiet_seconds = 2 * report_interval_seconds
        self._host_pids: dict[ProcessKey, _Known] = {}
        self._watches: set[asyncio.Task[None]] = set()

    async def host_pid(self, identity: ProcessIdentity, peer_pid: int | None) -> int | None:
        """The reporter's pid as the driver sees it, looked up in a thread: that may mean a search of /proc."""
        key = ProcessKey(identity.pid_namespace, identity.pid)
        who = (identity.start_time_ticks, peer_pid)
        known = self._host_pids.get(key)
        now = self._clock()
        if (
            known is not None
            and known.who == who
            and (known.host_pid is not None or now - known.asked_seconds < _ASK_AGAIN_SECONDS)
        ):
            return known.host_pid
        host_pid = await asyncio.to_thread(self._host.host_pid, identity, peer_pid)
        while len(self._host_pids) > 2 * self._store.max_processes:
            del self._host_pids[next(iter(self._host_pids))]
        self._host_pids[key] = _Known(who, host_pid, now)
        return host_pid

    def forget(self, key: ProcessKey, reason: str) -> None:
        """Drop a process that has gone."""
        self._store.forget(key)
        self._dispatcher.process_gone(key, reason)
        self._host_pids.pop(key, None)

    def sweep(self) -> None:
        """Forget every quiet process that the host no longer has; called once a second."""
        now = self._clock()
        snapshot = self._store.snapshot(now)
        for process in snapshot.processes:
            if now - process.received_seconds > self._quiet_seconds:
                self._forget_if_dead(process.key, process.host_pid, process.report.process.start_time_ticks)
        for silent in snapshot.silent:
            self._forget_if_dead(silent.key, silent.host_pid, silent.start_time_ticks)

    def connection_lost(self, process: ReportingProcess) -> None:
        """A reporter's held request broke: find out soon whether the process went with it."""
        if process.host_pid is not None:
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
        if host_pid is None or self._host.alive(host_pid, start_time_ticks):
            return False
        self.forget(key, "the process has gone")
        return True
