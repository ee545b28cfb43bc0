from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from gpumem_client.wire.protocol import CommandResult, ProcessIdentity
from gpumem_exporter.actions.action import Action
from gpumem_exporter.actions.action_options import ActionRequest, Target
from gpumem_exporter.core.caller import Caller
from gpumem_exporter.core.samples import ReportingProcess
from gpumem_exporter.core.store import Store
from gpumem_exporter.reports.process_liveness import SILENT_SECONDS, Presence
from tests.support.builders.builders import NobodyHost, report
from tests.support.builders.dispatching import build_dispatcher
from tests.support.waiting import wait_until_equal


@dataclass
class ScriptedHost(NobodyHost):
    """A host whose processes the test sets."""

    living: set[int] = field(default_factory=set)
    runs: int | None = None

    def owner_uid(self, identity: ProcessIdentity, host_pid: int | None) -> int | None:
        return 0

    def program(self, host_pid: int) -> int | None:
        return self.runs

    def alive(self, host_pid: int, start_time_ticks: int) -> bool:
        return host_pid in self.living


class Bench:
    """A presence with its store and dispatcher, and a clock that only the test advances."""

    def __init__(self) -> None:
        self.now = 100.0
        self.host = ScriptedHost()
        self.finished: list[Action] = []
        self.store = Store(report_expiry_seconds=15, reading_expiry_seconds=5, max_processes=4)
        self.dispatcher = build_dispatcher(self.store, self.clock, self.finished)
        self.presence = Presence(self.store, self.dispatcher, self.host, clock=self.clock, report_interval_seconds=1.0)

    def clock(self) -> float:
        return self.now

    def take_report(self, pid: int, host_pid: int | None, **changes: Any) -> ReportingProcess:
        sent = report(pid, **changes)
        return self.store.put_report(sent, host_pid=host_pid, now_seconds=self.now, now_unix_seconds=self.now)

    def pids(self) -> list[int]:
        return [process.key.pid for process in self.store.snapshot(self.now).processes]


def test_an_expired_reporter_without_a_host_pid_is_removed_only_if_its_connection_broke() -> None:
    bench = Bench()
    broken, stopped, again = (bench.take_report(pid, host_pid=None) for pid in (1, 2, 3))
    for process in (broken, again):
        bench.presence.connection_lost(process)

    bench.now += 10
    bench.take_report(3, host_pid=None, sequence=2)
    bench.presence.sweep()
    assert bench.pids() == [1, 2, 3], "no report has expired"
    bench.now += 16
    bench.presence.sweep()
    assert [silent.key for silent in bench.store.snapshot(bench.now).silent] == [stopped.key, again.key]


def test_a_silent_reporter_that_the_exporter_cannot_see_has_ended_after_ten_minutes() -> None:
    bench = Bench()
    bench.host.living = {2}
    bench.take_report(1, host_pid=None)
    bench.take_report(2, host_pid=2)
    for _ in range(2):
        assert bench.now < 100.0 + SILENT_SECONDS
        bench.now += SILENT_SECONDS - 1
        bench.presence.sweep()
        silent = bench.store.snapshot(bench.now).silent
        if bench.now < 100.0 + SILENT_SECONDS:
            assert len(silent) == 2
    assert [each.key.pid for each in silent] == [2]


async def test_a_quiet_process_that_runs_another_program_is_removed_and_its_actions_end() -> None:
    bench = Bench()
    bench.host.living, bench.host.runs = {1}, 77

    for session in ("first", "second"):
        bench.host.runs = 77 if session == "first" else 78
        bench.presence.started(bench.take_report(1, host_pid=1, session=session))
        bench.now += 2.1
        bench.presence.sweep()
        assert bench.pids() == [1], "it runs the program of its first report"
    bench.dispatcher.submit(ActionRequest("empty_cache", Target(all=True)), requested_by=Caller.policy("t"))
    bench.host.runs = None
    bench.presence.sweep()
    assert bench.pids() == [1], "its program is unknown"
    bench.host.runs = 79
    bench.presence.sweep()
    assert bench.pids() == []
    (action,) = bench.finished
    assert [(result.outcome, "exec" in result.reason) for result in action.results] == [("gone", True)]


async def test_a_process_that_dies_with_a_held_report_is_removed_at_once_and_one_that_reports_again_is_not() -> None:
    bench = Bench()
    result = CommandResult("c-1", "done")
    ended, again = (bench.take_report(pid, host_pid=pid, results=(result,)) for pid in (1, 2))
    bench.now += 0.1
    bench.take_report(2, host_pid=2, sequence=2)
    for process in (ended, again):
        bench.presence.connection_lost(process)
    await asyncio.to_thread(wait_until_equal, bench.pids, [2], "the processes that report")
