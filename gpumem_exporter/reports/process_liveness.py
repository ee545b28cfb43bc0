"""Detects the end of reporting processes, so that their series are removed at once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field

from gpumem_exporter.actions.dispatcher import Dispatcher
from gpumem_exporter.core.samples import ProcessKey, ReportingProcess, SilentReporter
from gpumem_exporter.core.store import Store
from gpumem_exporter.node.host import Host

_log = logging.getLogger(__name__)

SILENT_SECONDS = 600.0
"""A reporter whose process the exporter cannot see counts as ended after this time without a report.

Nothing else shows the end of such a process: the reporter runs in another PID namespace or on another machine."""
# The pauses before the checks of a process whose connection broke. The sockets of a killed process close before it
# ends, and a large process takes time to end.
_EXIT_CHECK_DELAYS_SECONDS = (0.0, 0.05, 0.2, 0.5)


@dataclass(eq=False)
class Presence:
    """Removes reporters whose processes have ended. Used on the event loop only.

    A process is not checked within two report intervals after its last report.
    """

    store: Store
    dispatcher: Dispatcher
    host: Host
    _: KW_ONLY
    clock: Callable[[], float]
    report_interval_seconds: float
    on_ended: Callable[[Sequence[tuple[ProcessKey, str]]], None] = lambda _: None
    """Receives the key of each process before it is removed, and the reason."""
    _programs: dict[ProcessKey, tuple[int, int | None]] = field(default_factory=dict)
    """The host pid and the program (None if it is unknown) of each process at the first report of a session."""
    _watches: set[asyncio.Task[None]] = field(default_factory=set)
    _disconnected: dict[ProcessKey, float] = field(default_factory=dict)
    """The last report's time of reporters without a known host pid whose connection broke after it."""

    def started(self, process: ReportingProcess) -> None:
        """Note the program of a process at the first report of a session."""
        self._programs.pop(process.key, None)
        if process.host_pid is not None:
            while len(self._programs) > 2 * self.store.max_processes:
                del self._programs[next(iter(self._programs))]
            self._programs[process.key] = process.host_pid, self.host.program(process.host_pid)

    def forget(self, *ended: tuple[ProcessKey, str]) -> None:
        """Remove processes that have ended, each for a reason."""
        self.on_ended(ended)
        for key, reason in ended:
            _log.debug("a process is removed: pid %d of uid %s: %s", key.pid, key.owner_uid, reason)
            self.store.forget(key)
            self.dispatcher.process_gone(key, reason)
            self._programs.pop(key, None)

    def replaced(self, before: ReportingProcess, now: ReportingProcess) -> None:
        """End the actions of a reporter that another one has replaced, so that they do not reach the new one."""
        if before.start_time_ticks != now.start_time_ticks:
            reason = "the process exited, and its pid was reused"
            self.on_ended([(before.key, reason)])
        else:
            reason = "another reporter represents the process: it runs another program, or its reporter was restarted"
        self.dispatcher.process_gone(before.key, reason)

    def sweep(self) -> None:
        """Remove the quiet processes that exited or run another program; called once a second."""
        now = self.clock()
        snapshot = self.store.snapshot(now)
        quiet: list[ReportingProcess | SilentReporter] = [
            process
            for process in snapshot.processes
            if now - process.received_seconds > 2 * self.report_interval_seconds
        ]
        silent = {reporter.key for reporter in snapshot.silent}
        ended = [
            (key, "its connection broke, and it has not reported since") for key in self._disconnected.keys() & silent
        ]
        last_seconds = {process.key: process.received_seconds for process in snapshot.processes}
        self._disconnected = {
            key: seconds for key, seconds in self._disconnected.items() if last_seconds.get(key) == seconds
        }
        for reporter in (*quiet, *snapshot.silent):
            reason = self._end(reporter)
            if reason:
                ended.append((reporter.key, reason))
        ended += [
            (reporter.key, f"no report for {SILENT_SECONDS:g} s, and the exporter cannot see the process")
            for reporter in snapshot.silent
            if reporter.host_pid is None and now - reporter.last_report_seconds >= SILENT_SECONDS
        ]
        self.forget(*ended)

    def connection_lost(self, process: ReportingProcess) -> None:
        """Check soon whether a process whose held request broke has exited."""
        # Without a host pid, /proc does not show it: the process is removed when its report expires. A running process
        # reports again before, and a stopped process keeps its connection.
        if process.host_pid is None:
            self._disconnected[process.key] = process.received_seconds
        else:
            watch = asyncio.ensure_future(self._watch(process))
            self._watches.add(watch)
            watch.add_done_callback(self._watches.discard)

    def close(self) -> None:
        """Cancel the checks that `connection_lost` started."""
        for watch in self._watches:
            watch.cancel()

    async def _watch(self, process: ReportingProcess) -> None:
        for seconds in _EXIT_CHECK_DELAYS_SECONDS:
            await asyncio.sleep(seconds)
            known = self.store.find(process.key)
            # Compared by time: the stored process has no results and errors, so its report is another object.
            if known is None or known.received_seconds > process.received_seconds:
                return
            reason = self._end(process)
            if reason:
                self.forget((process.key, reason))
                return

    def _end(self, reporter: ReportingProcess | SilentReporter) -> str:
        """Return why a reporter has ended; empty if it runs, or if its host pid is unknown."""
        host_pid = reporter.host_pid
        if host_pid is None:
            return ""
        if not self.host.alive(host_pid, reporter.start_time_ticks):
            return "the process exited"
        known_pid, known = self._programs.get(reporter.key, (None, None))
        if known is None or known_pid != host_pid or self.host.program(host_pid) in (None, known):
            return ""
        return "the process runs another program (exec)"
