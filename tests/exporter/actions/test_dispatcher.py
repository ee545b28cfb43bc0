from __future__ import annotations

import asyncio
import dataclasses
from typing import Any, ClassVar

import pytest

from gpumem_client.wire.protocol import COMMAND_ACTIONS, ENGINE_ACTIONS, CommandResult, StillFree
from gpumem_client.wire.reason_codes import ReasonCode
from gpumem_exporter.actions.action import Action
from gpumem_exporter.actions.action_options import ANSWER_GRACE_SECONDS, Target
from gpumem_exporter.actions.dispatcher import SILENT_GRACE_SECONDS
from gpumem_exporter.actions.engines import Engines
from gpumem_exporter.actions.lifecycle import SETTLING_GRACE_SECONDS, ActionRegistry, RunningAction
from gpumem_exporter.actions.rate_limits import RateLimits
from gpumem_exporter.actions.selection import SelectedProcess
from gpumem_exporter.actions.terminate import Terminator
from gpumem_exporter.core.caller import Caller, CallerKind, Rights
from gpumem_exporter.core.samples import ReportingProcess
from gpumem_exporter.errors import TooManyActionsError
from tests.support.builders.builders import MIB, UUIDS, NobodyHost, sample
from tests.support.builders.dispatching import Bench


@pytest.fixture
def bench() -> Bench:
    return Bench()


async def test_an_action_is_done_when_every_process_has_answered(bench: Bench) -> None:
    action = bench.ask()
    assert action.state == "queued"
    assert bench.woken == [bench.first.key, bench.second.key]
    for process in (bench.first, bench.second):
        (command,) = bench.dispatcher.commands(process)
        assert (command.id, command.action) == (action.id, "empty_cache")
    running = bench.current(action)
    assert running.state == "running"
    bench.answer(bench.first, action, freed=3)
    bench.answer(bench.second, action, freed=4)
    done = bench.current(action)
    assert (done.state, done.freed_bytes) == ("done", 3 + 3 + 4)
    assert {(row.pid, row.gpu) for row in done.results} == {(1, "0"), (1, "1"), (2, "1")}
    assert bench.finished == [done]
    assert bench.woken[2:] == [action.id], "the requests that wait for its end"


async def test_a_command_does_not_reach_a_later_process_with_the_same_pid(bench: Bench) -> None:
    bench.ask(target=Target(pid=1))
    later = bench.put(1, start_time_ticks=2000, session="later", session_started_seconds=9.0)
    assert bench.dispatcher.commands(later) == ()


def test_the_result_of_a_process_that_was_replaced_has_its_own_names(bench: Bench) -> None:
    first = bench.put(3, workload="first", devices=(sample(UUIDS[0], MIB),))
    bench.ask(target=Target(pid=3))
    bench.dispatcher.commands(first)
    bench.put(3, workload="later", rank="7", session="later", session_started_seconds=9.0)
    bench.dispatcher.process_gone(first.key, "it runs another program")
    (row,) = bench.finished[0].results
    assert (row.outcome, row.workload, row.rank, row.job) == ("gone", "first", "", "first")


def test_results_of_another_process_or_of_an_unknown_command_are_ignored(bench: Bench) -> None:
    action = bench.ask(target=Target(pid=1))
    bench.answer(bench.second, action, freed=99)
    bench.answer(bench.first, dataclasses.replace(action, id="unknown"), freed=99)
    current = bench.current(action)
    assert (current.state, current.results) == ("queued", ())


def test_a_command_that_was_not_fetched_before_the_deadline_expires(bench: Bench) -> None:
    action = bench.ask(target=Target(pid=1), deadline_seconds=30.0)
    bench.now += 29.9
    bench.dispatcher.expire()
    assert not bench.finished
    bench.now += 0.1
    assert bench.dispatcher.commands(bench.first) == ()
    bench.dispatcher.expire()
    (expired,) = bench.finished
    assert (expired.id, expired.state) == (action.id, "expired")
    assert {(row.outcome, row.reason_code) for row in expired.results} == {("expired", ReasonCode.NOT_FETCHED)}


async def test_the_result_of_a_delivered_command_may_arrive_shortly_after_the_deadline(bench: Bench) -> None:
    action = bench.ask(target=Target(pid=1), deadline_seconds=30.0)
    (command,) = bench.dispatcher.commands(bench.first)
    assert command.deadline_seconds == 30.0
    bench.now += 30.0
    bench.put(1)  # it runs the command in a training thread, and reports meanwhile
    bench.now += ANSWER_GRACE_SECONDS - 0.1
    bench.dispatcher.expire()
    assert not bench.finished
    bench.answer(bench.first, action, freed=7)
    assert bench.finished[0].state == "done"


@pytest.mark.parametrize("step_seconds", [0.0, -86_400.0, 86_400.0])
def test_a_delivered_command_without_a_result_expires_whatever_time_the_wall_clock_is_set_to(
    bench: Bench, step_seconds: float
) -> None:
    wall_seconds = 1e9
    bench.dispatcher = bench.build(wall_clock=lambda: wall_seconds)
    bench.ask(target=Target(pid=1), deadline_seconds=30.0)
    bench.dispatcher.commands(bench.first)
    wall_seconds += step_seconds
    bench.now += 30.0
    bench.dispatcher.expire()
    assert not bench.finished
    bench.now += SILENT_GRACE_SECONDS
    bench.dispatcher.expire()
    (finished,) = bench.finished
    assert finished.duration_seconds == 30.0 + SILENT_GRACE_SECONDS
    assert {(row.outcome, row.reason_code) for row in finished.results} == {("expired", ReasonCode.NO_RESULT)}


def still_free(bench: Bench, process: ReportingProcess, action: Action, *sizes: int) -> None:
    """Let a process report what stayed free of the action on its devices."""
    values = tuple(
        StillFree(action.id, each.uuid, size) for each, size in zip(process.report.devices, sizes, strict=False)
    )
    bench.dispatcher.take_results(
        dataclasses.replace(process, report=dataclasses.replace(process.report, still_free=values))
    )


@pytest.mark.parametrize("ends", ["expired", "gone"])
def test_a_process_that_does_not_report_what_stayed_free_leaves_it_unknown(bench: Bench, ends: str) -> None:
    action = bench.ask(settle_seconds=10.0)
    bench.answer(bench.first, action, freed=3)
    bench.answer(bench.second, action, freed=4)
    still_free(bench, bench.second, action, 2)
    still_free(bench, bench.second, dataclasses.replace(action, id="unknown"), 4)
    if ends == "gone":
        bench.dispatcher.process_gone(bench.first.key, "it ended")
    else:
        bench.now += 10.0 + SETTLING_GRACE_SECONDS - 0.1
        bench.dispatcher.expire()
        assert bench.current(action).settling
        bench.now += 0.1
        bench.dispatcher.expire()
    settled = bench.current(action)
    assert (settled.settling, settled.still_free_bytes) == (False, 2)
    assert [row.still_free_bytes for row in settled.results] == [None, None, 2]


def test_a_dry_run_shows_what_would_be_freed_and_sends_no_command(bench: Bench) -> None:
    action = bench.ask(dry_run=True)
    assert {row.mode for row in action.results} == {"now"}
    assert (action.state, action.freed_bytes) == ("done", 4 * MIB + MIB + 16 * MIB)
    row = action.results[0]
    assert (row.reserved_before_bytes, row.reserved_after_bytes, row.freed_bytes) == (12 * MIB, 8 * MIB, 4 * MIB)
    assert bench.dispatcher.commands(bench.first) == ()


def test_a_dry_run_answers_unsupported_and_refused_as_the_action_would(bench: Bench) -> None:
    bench.put(3, devices=(sample(UUIDS[0], 10 * MIB),), actions=("empty_cache",))
    for dry_run in (True, False):
        (row,) = bench.ask("reset_peak", Target(pid=3), dry_run=dry_run).results
        assert (row.outcome, row.reason_code) == ("unsupported", "unknown_action")
    fraction = 9 / (80 * 1024)  # of the 80 GiB of a device: 9 MiB
    rows = bench.ask("set_memory_fraction", Target(gpu="0"), fraction=fraction, dry_run=True).results
    outcomes = {row.pid: (row.outcome, row.reason_code) for row in rows}
    assert outcomes == {1: ("refused", "reserved_exceeds_fraction"), 3: ("unsupported", "unknown_action")}
    forced = bench.ask("set_memory_fraction", Target(pid=1), fraction=fraction, force=True, dry_run=True)
    assert {(row.outcome, row.limit_bytes is None) for row in forced.results} == {("would_set", False)}


def done(bench: Bench, caller: Caller | None = None, **changes: Any) -> Action:
    """Request an action of one process, and answer it."""
    action = bench.ask(target=Target(pid=1), caller=caller, **changes)
    bench.answer(bench.first, action)
    return action


def test_a_caller_with_many_actions_displaces_only_its_own(bench: Bench) -> None:
    bench.dispatcher = bench.build(actions=ActionRegistry(4))
    flooder, other = (Caller(CallerKind.UNIX, Rights.ALL, uid=uid) for uid in (1001, 1002))
    first = done(bench, other, idempotency_key="k")
    flood = [done(bench, flooder, idempotency_key=f"k{number}") for number in range(20)]
    assert done(bench, other, idempotency_key="k").id == first.id
    assert bench.dispatcher.get(first.id) is not None
    assert [bench.dispatcher.get(one.id) is not None for one in flood[-4:]] == [False, True, True, True]


async def test_no_process_gets_a_command_before_the_action_is_recorded(bench: Bench) -> None:
    recorded = asyncio.Event()
    asked: list[str] = []

    async def record(running: RunningAction) -> None:
        asked.append(running.action.id)
        await recorded.wait()

    bench.dispatcher = bench.build(record=record)
    action = bench.ask()
    await asyncio.sleep(0)
    assert bench.dispatcher.commands(bench.second) == ()
    recorded.set()
    while not bench.woken:
        await asyncio.sleep(0)
    assert bench.woken == [bench.first.key, bench.second.key]
    assert [command.id for command in bench.dispatcher.commands(bench.first)] == [action.id]
    assert [command.id for command in bench.dispatcher.commands(bench.second)] == [action.id]
    assert asked == [action.id]


def test_a_dry_run_does_not_count_for_its_processes(bench: Bench) -> None:
    bench.dispatcher = bench.build(limits=RateLimits(per_caller=100, per_process=1, clock=lambda: bench.now))
    for _ in range(3):
        bench.ask(dry_run=True)
    bench.ask()
    with pytest.raises(TooManyActionsError):
        bench.ask()


@pytest.mark.parametrize(
    ("action", "target", "uuids"),
    [
        ("empty_cache", Target(pid=1, gpu="1"), ()),
        ("reset_peak", Target(pid=1), ()),
        ("reset_peak", Target(pid=1, gpu="1"), (UUIDS[1],)),
    ],
)
def test_only_an_action_on_devices_is_of_the_devices_of_its_target(
    bench: Bench, action: str, target: Target, uuids: tuple[str, ...]
) -> None:
    would = bench.ask(action, target, dry_run=True)
    assert {row.uuid for row in would.results} == set(uuids or UUIDS[:2])
    bench.ask(action, target)
    (command,) = bench.dispatcher.commands(bench.first)
    assert command.uuids == uuids


@pytest.mark.parametrize("outcome", ["refused", "expired"])
async def test_a_termination_that_is_cancelled_or_late_before_it_is_recorded_does_not_happen(
    bench: Bench, outcome: str
) -> None:
    class Deadly(Terminator):
        ended: ClassVar[list[int | str]] = []

        def refusal(self, target: SelectedProcess) -> None:
            return None

        async def end(self, target: SelectedProcess, grace_seconds: float) -> CommandResult:
            self.ended.append(target.pid)
            return CommandResult("", "done")

    recorded = asyncio.Event()
    bench.dispatcher = bench.build(
        allowed=frozenset(("terminate",)), terminator=Deadly(NobodyHost()), record=lambda _: recorded.wait()
    )
    action = bench.ask("terminate", Target(pid=1))
    if outcome == "refused":
        bench.dispatcher.cancel(action.id, requested_by=Caller.policy("me"))
    else:
        bench.now += 30.0
    recorded.set()
    while action.id not in bench.woken:
        await asyncio.sleep(0)
    (finished,) = bench.finished
    assert {row.outcome for row in finished.results} == {outcome}
    assert Deadly.ended == []


def test_a_restored_action_does_not_displace_one_of_this_run(bench: Bench) -> None:
    bench.dispatcher = bench.build(actions=ActionRegistry(2))
    old = dataclasses.replace(done(bench), id="before")
    new = done(bench, idempotency_key="k")
    bench.dispatcher.actions.restore(old)
    assert bench.dispatcher.get("before") is None
    assert bench.dispatcher.get(new.id) is not None


def test_what_the_owner_of_a_process_does_not_allow_is_refused_at_once(bench: Bench) -> None:
    denied = ("collect_garbage", "profile", "release_memory")
    process = bench.put(3, devices=(sample(UUIDS[0], 10 * MIB),), actions=("empty_cache",), denied_actions=denied)
    for dry_run in (True, False):
        for action, options in (("profile", {}), ("empty_cache", {"collect_garbage": True})):
            (row,) = bench.ask(action, Target(pid=3), dry_run=dry_run, **options).results
            assert (row.outcome, row.reason_code) == ("refused", "denied_by_owner"), action
    assert bench.dispatcher.commands(process) == ()
    bench.ask("empty_cache", Target(pid=3))
    assert len(bench.dispatcher.commands(process)) == 1
    # An old reporter, which supports all actions, lists none in its reports.
    nothing = bench.put(3, devices=(sample(UUIDS[0], 10 * MIB),), denied_actions=COMMAND_ACTIONS)
    assert not nothing.clears
    assert bench.ask("empty_cache", Target(pid=3)).results[0].reason_code == "denied_by_owner"


@pytest.mark.parametrize("dry_run", [False, True])
def test_without_the_feature_of_engines_no_engine_acts(bench: Bench, dry_run: bool) -> None:
    bench.dispatcher = bench.build(allowed=frozenset(ENGINE_ACTIONS))
    bench.dispatcher.engines = Engines()
    process = bench.put(1, devices=(sample(UUIDS[0], 10 * MIB),), actions=ENGINE_ACTIONS)
    for action in ENGINE_ACTIONS:
        results = bench.ask(action, dry_run=dry_run).results
        assert {(row.pid, row.reason_code) for row in results} == {(pid, ReasonCode.NO_ENGINE) for pid in (1, 2)}
    assert bench.dispatcher.commands(process) == ()
