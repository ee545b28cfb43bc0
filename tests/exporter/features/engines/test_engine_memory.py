"""The dispatcher's part in actions on engines: who acts, what is refused, and what the driver lists afterwards."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from gpumem_client.wire.protocol import COMMAND_ACTIONS, CommandResult, DeviceResult, EngineState
from gpumem_client.wire.reason_codes import ReasonCode
from gpumem_exporter.actions.action import Action
from gpumem_exporter.actions.action_options import ACTIONS, ENGINE_ANSWER_SECONDS, Target
from gpumem_exporter.actions.action_routes import action_document
from gpumem_exporter.actions.engines import MIN_IDLE_SECONDS
from gpumem_exporter.actions.selection import SelectedProcess
from gpumem_exporter.core.caller import Caller, CallerKind, Rights
from gpumem_exporter.core.container import HERE, Place
from gpumem_exporter.core.readings import DeviceReading, ProcessFacts, ProcessMemory
from gpumem_exporter.errors import ActionForbiddenError
from gpumem_exporter.features.engines import engine_memory
from gpumem_exporter.features.engines.vllm import Activity, EngineRefusedError
from tests.support.builders.builders import MIB, UUIDS, device, node, sample
from tests.support.builders.dispatching import Bench

ROOT = Caller(CallerKind.UNIX, Rights.ALL, uid=0)
ADA = Caller(CallerKind.UNIX, Rights.OWN, uid=1001)
RELEASE = ("empty_cache", "release_memory", "resume_memory")
TITLED, UNTITLED, STARTING = 7, 8, 50
"""Processes that only the driver lists."""


class FakeEngine:
    """An engine of processes 1 and 7 that releases 60 MiB of each."""

    name, key = "Fake", "server"

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.asleep = False
        self.requests: list[int | None] = [0]
        self.thread: int | None = None
        self.asked = False

    def is_engine(self, target: SelectedProcess) -> bool:
        return target.pid in (1, TITLED)

    def find(self, _target: SelectedProcess) -> FakeEngine:
        self.thread = threading.get_ident()
        return self

    def activity(self) -> Activity:
        self.asked = True
        return Activity(self.asleep, self.requests.pop(0) if len(self.requests) > 1 else self.requests[0])

    def release(self, keep: str | None, force: bool) -> None:
        self.calls.append(("release", keep, force))
        self.asleep = True

    def resume(self) -> None:
        self.calls.append("resume")
        self.asleep = False


class EngineBench(Bench):
    """Two reporting processes of root, and two of user 1001 that only the driver lists."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = FakeEngine()
        self.released: set[int] = set()
        self.poll()
        self.dispatcher = self.build(allowed=frozenset(ACTIONS), engines=self.engine, poll_soon=self.poll)

    def poll(self) -> None:
        """Read the driver: a process whose engine sleeps has 60 MiB less."""
        used = {1: 100, 2: 100, TITLED: 100, UNTITLED: 5}
        asleep = (1, TITLED) if self.engine.asleep else self.released
        listed = tuple(ProcessMemory(pid, (size - (60 if pid in asleep else 0)) * MIB) for pid, size in used.items())
        first: DeviceReading = replace(device(UUIDS[0], gpu="0"), processes=listed)
        facts = {pid: ProcessFacts(pid, 1000, command="VLLM::EngineCore", uid=1001) for pid in (TITLED, UNTITLED)}
        self.store.put_reading(
            replace(node(first, device(UUIDS[1], gpu="1"), taken=self.now), facts=facts, duration_seconds=0.0)
        )

    def request(self, action: str = "release_memory", **changes: Any) -> Action:
        return self.ask(action, **{"target": Target(pid=1), "caller": ROOT, **changes})

    async def ended(self, action: Action) -> Action:
        while not self.current(action).finished:
            await asyncio.sleep(0.01)
        return self.current(action)


@pytest.fixture
def bench() -> EngineBench:
    return EngineBench()


@pytest.fixture
def ended(bench: EngineBench) -> Callable[..., Awaitable[Action]]:
    async def run(action: str = "release_memory", **changes: Any) -> Action:
        return await asyncio.wait_for(bench.ended(bench.request(action, **changes)), 30)

    return run


async def test_the_processes_of_an_engine_sleep_together_and_the_result_is_what_the_driver_lists(
    bench: EngineBench, ended: Any
) -> None:
    action = await ended(target=Target(pid=["1", str(TITLED)]), keep="weights", settle_seconds=5.0)
    (first, second, listed) = action.results
    assert (first.outcome, first.driver_before_bytes, first.driver_after_bytes) == ("done", 100 * MIB, 40 * MIB)
    assert (first.freed_bytes, second.freed_bytes) == (60 * MIB, None)  # no list on the second device
    assert (listed.pid, listed.job, listed.freed_bytes) == (TITLED, "VLLM::EngineCore", 60 * MIB)
    assert bench.engine.calls == [("release", "weights", False)]
    assert bench.engine.thread != threading.get_ident()
    assert action.settling
    woken = await ended("resume_memory")
    assert (woken.results[0].driver_after_bytes, woken.freed_bytes) == (100 * MIB, None)


@pytest.mark.parametrize("reading", ["none", "no list", "no size", "not listed"])
async def test_what_no_reading_shows_is_not_known(bench: EngineBench, ended: Any, reading: str) -> None:
    polls = []

    def poll() -> None:
        polls.append(reading)
        if len(polls) == 1:  # right before the engine acts
            bench.poll()
            return
        if reading == "none":
            bench.now += 5.0  # the driver does not answer in time
            return
        lists = {"no list": None, "no size": (ProcessMemory(1, None),), "not listed": (ProcessMemory(2, MIB),)}
        first = replace(device(UUIDS[0], gpu="0"), processes=lists[reading])
        bench.store.put_reading(replace(node(first, taken=bench.now), duration_seconds=0.0))

    components = {"kv_cache": 50 * MIB, "weights": 10 * MIB}
    bench.put(1, rank="0", devices=(replace(sample(UUIDS[0], 8 * MIB, 4 * MIB), component_bytes=components),))
    bench.dispatcher = bench.build(allowed=frozenset(ACTIONS), engines=bench.engine, poll_soon=poll)
    (row,) = (await ended()).results
    left = reading == "not listed"
    assert (row.outcome, row.driver_before_bytes) == ("done", 100 * MIB)
    assert (row.driver_after_bytes, row.freed_bytes) == ((0, 100 * MIB) if left else (None, None))


@pytest.mark.parametrize("hangs", [False, True], ids=["", "the driver hangs"])
async def test_what_stays_free_is_read_after_the_settling_time(bench: EngineBench, ended: Any, hangs: bool) -> None:
    polls: list[Callable[[], None]] = [bench.poll]
    bench.dispatcher = bench.build(
        allowed=frozenset(ACTIONS),
        engines=bench.engine,
        poll_soon=lambda: polls[0](),
    )
    action = await ended(settle_seconds=0.2)
    assert (action.freed_bytes, action.settling) == (60 * MIB, True)
    bench.now += 0.2
    bench.engine.asleep = False  # a request has woken the engine, and the driver has not been read since
    if hangs:
        polls[0] = lambda: setattr(bench, "now", bench.now + 5.0)
    while bench.current(action).settling:
        await asyncio.sleep(0.01)
    assert bench.current(action).still_free_bytes == (None if hangs else 0)


async def test_a_wait_for_idle_ends_when_another_engine_starts_beside_one_process_of_the_engine(
    bench: EngineBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def inline(function: Callable[[], Any]) -> Any:
        return function()

    def read(on_second: dict[int, int | None], facts: dict[int, ProcessFacts]) -> None:
        first, second = device(UUIDS[0], gpu="0"), device(UUIDS[1], gpu="1", processes=on_second)
        first = replace(first, processes=(ProcessMemory(1, 100 * MIB),))
        bench.store.put_reading(replace(node(first, second, taken=bench.now), facts=facts))

    monkeypatch.setattr(engine_memory, "_in_thread", inline)
    monkeypatch.setattr(engine_memory, "_ASK_AGAIN_SECONDS", 0.01)
    bench.put(1, rank="0", devices=(sample(UUIDS[0], 8 * MIB, 4 * MIB),))
    title = ProcessFacts(TITLED, 1000, "VLLM::EngineCore", uid=1001, started_seconds=-1e4)
    starting = replace(title, pid=STARTING, uid=2000, started_seconds=bench.now)
    read({TITLED: 100 * MIB}, {TITLED: title})
    bench.engine.requests = [3]
    asked = bench.request(target=Target(pid=["1", str(TITLED)]), wait_idle_seconds=600.0)
    while not bench.engine.asked:
        await asyncio.sleep(0)
    read({TITLED: 100 * MIB, STARTING: 512 * MIB}, {TITLED: title, STARTING: starting})
    bench.dispatcher.expire()
    bench.engine.requests = [0]
    results = (await asyncio.wait_for(bench.ended(asked), 30)).results
    assert {(row.pid, row.reason_code) for row in results} == {(pid, ReasonCode.ENGINE_STARTING) for pid in (1, TITLED)}
    assert bench.engine.calls == []


async def test_an_engine_without_a_known_number_of_requests_is_busy(bench: EngineBench, ended: Any) -> None:
    bench.engine.requests = [None]
    busy = await ended(wait_idle_seconds=10.0)
    assert busy.results[0].reason_code == ReasonCode.ENGINE_BUSY
    assert (await ended(force=True)).state == "done"
    assert bench.engine.calls == [("release", None, True)]


async def test_only_engines_are_meant_by_a_wide_target(bench: EngineBench, ended: Any) -> None:
    everything = await ended(target=Target(all=True), dry_run=True)
    assert {row.pid for row in everything.results} == {1, TITLED}
    alone = await ended(target=Target(pid=2))
    assert {row.reason_code for row in alone.results} == {ReasonCode.NO_ENGINE}


async def test_a_user_reaches_listed_processes_of_its_uid_only(bench: EngineBench, ended: Any) -> None:
    own = await ended(target=Target(all=True), caller=ADA)
    assert {row.pid for row in own.results} == {TITLED}
    with pytest.raises(ActionForbiddenError):
        bench.request(caller=ADA)  # process 1 is of root
    with pytest.raises(ActionForbiddenError):
        bench.request(target=Target(pid=str(TITLED)), caller=replace(ADA, uid=1002))


async def test_an_error_of_an_adapter_is_a_result(
    bench: EngineBench, ended: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_keep: str | None, _force: bool) -> None:
        raise KeyError("weights")

    def denied() -> Activity:
        raise EngineRefusedError(ReasonCode.ENGINE_DENIED, "it requires a key" * MIB)

    monkeypatch.setattr(bench.engine, "release", broken)
    failed = await ended()
    assert (failed.results[0].outcome, failed.results[0].reason_code) == ("failed", ReasonCode.EXCEPTION)
    monkeypatch.setattr(bench.engine, "activity", denied)
    (refused, *_) = (await ended()).results
    assert (refused.reason_code, 100 < len(refused.reason) < 1000) == (ReasonCode.ENGINE_DENIED, True)


async def test_the_engines_of_a_container_leave_room_for_others(
    bench: EngineBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root of a container can become every uid."""
    released, container = threading.Event(), Place(known=True, container="c" * 64)
    for uid in range(1, 5):
        bench.put(10 + uid, owner_uid=uid, place=container)

    def find(target: SelectedProcess) -> FakeEngine:
        if target.pid != TITLED:
            released.wait(60)
        return bench.engine

    monkeypatch.setattr(bench.engine, "is_engine", lambda _target: True)
    monkeypatch.setattr(bench.engine, "find", find)
    slow = [bench.request(target=Target(pid=10 + uid)) for uid in range(1, 5) for _ in range(4)]
    try:
        action = await asyncio.wait_for(bench.ended(bench.request(target=Target(pid=TITLED))), 30)
        assert action.results[0].outcome == "done"
    finally:
        released.set()
    await asyncio.wait_for(asyncio.gather(*map(bench.ended, slow)), 30)


def reporting_engine(bench: EngineBench, **changes: Any) -> None:
    bench.first = bench.put(
        1,
        rank="0",
        devices=(replace(sample(UUIDS[0], 8 * MIB, 4 * MIB), **changes.pop("sample", {})),),
        actions=RELEASE,
        modes=("now", "idle"),
        **changes,
    )


async def test_an_engine_that_can_speak_with_its_reporter_gets_a_command(bench: EngineBench) -> None:
    reporting_engine(bench)
    action = bench.request(wait_idle_seconds=60.0, keep="weights")
    (command,) = bench.dispatcher.commands(bench.first)
    assert (command.action, command.mode, command.keep) == ("release_memory", "idle", ("weights",))
    assert not command.force
    assert command.deadline_seconds == 60.0
    expected = action_document(bench.request(wait_idle_seconds=5.0, dry_run=True))
    assert "When idle, within 5 s: " in expected["sentence"]
    bench.request(wait_idle_seconds=5.0)
    assert [each.deadline_seconds for each in bench.dispatcher.commands(bench.first)] == [60.0, 5.0]
    bench.now += 26.0  # sent again, the wait ends with the action's deadline of 30 s
    assert [each.deadline_seconds for each in bench.dispatcher.commands(bench.first)] == [34.0, 4.0]
    bench.now += ENGINE_ANSWER_SECONDS  # no report arrives while it copies its weights
    bench.dispatcher.expire()
    bench.released = {1}
    result = CommandResult(action.id, "done", devices=(DeviceResult(UUIDS[0], freed_bytes=9),))
    report = replace(bench.first.report, results=(result,))
    for _ in range(2):  # a repeated result is measured once
        bench.dispatcher.take_results(replace(bench.first, report=report))
    (row,) = (await asyncio.wait_for(bench.ended(action), 30)).results
    assert (row.driver_before_bytes, row.driver_after_bytes, row.freed_bytes) == (100 * MIB, 40 * MIB, 60 * MIB)
    assert bench.engine.calls == []


@pytest.mark.parametrize(
    ("state", "permitted"),
    [
        (None, False),
        (EngineState("vllm"), False),
        (EngineState("vllm", idle_seconds=MIN_IDLE_SECONDS - 1), False),
        (EngineState("vllm", idle_seconds=MIN_IDLE_SECONDS), True),
    ],
)
def test_policies_and_alerts_let_only_idle_engines_sleep(
    bench: EngineBench, state: EngineState | None, *, permitted: bool
) -> None:
    reporting_engine(bench, engine=state)
    bench.now += 5.0  # a request may have come since its report
    for caller in (Caller.policy("r"), Caller.alert("a", ROOT)):
        asked = bench.request(caller=caller, dry_run=True)
        assert [row.reason_code for row in asked.results] == [None if permitted else ReasonCode.ENGINE_BUSY]
    assert bench.request(dry_run=True).state == "done"


def test_a_dry_run_shows_what_a_reporting_engine_would_release(bench: EngineBench) -> None:
    reporting_engine(bench, sample={"component_bytes": {"kv_cache": 5, "weights": 3, "other": 1}})
    assert bench.request(dry_run=True).freed_bytes == 8
    assert bench.request(dry_run=True, keep="weights").freed_bytes == 5


@pytest.mark.parametrize("place", [HERE, Place(known=True, container="pod")])
async def test_the_exporter_speaks_with_no_engine_of_a_process_that_denies_it(
    bench: EngineBench, ended: Any, monkeypatch: pytest.MonkeyPatch, place: Place
) -> None:
    """Also on behalf of another process of the same engine, which does not report."""
    devices = (sample(UUIDS[0], 8 * MIB, 4 * MIB),)
    bench.put(UNTITLED, owner_uid=1001, place=place, devices=devices, denied_actions=("release_memory",))
    monkeypatch.setattr(bench.engine, "is_engine", lambda target: target.pid in (UNTITLED, TITLED))
    for pid in (UNTITLED, TITLED):
        (row,) = (await ended(target=Target(pid=pid))).results
        assert (row.outcome, row.reason_code) == ("refused", "denied_by_owner")
    assert bench.engine.calls == []


async def test_what_a_process_denies_does_not_keep_its_own_user_s_kernel_from_ending_it(bench: EngineBench) -> None:
    bench.put(1, devices=(sample(UUIDS[0], 8 * MIB, 4 * MIB),), denied_actions=COMMAND_ACTIONS)
    action = await asyncio.wait_for(bench.ended(bench.request("terminate")), 30)
    assert {row.reason_code for row in action.results}.isdisjoint({"denied_by_owner"})


async def test_a_release_waits_for_the_start_of_a_selected_engine_that_takes_no_part(bench: EngineBench) -> None:
    facts = {
        TITLED: ProcessFacts(TITLED, 1000, "VLLM::EngineCore", uid=1001, started_seconds=-1e4),
        STARTING: ProcessFacts(STARTING, 1000, "sglang::scheduler", uid=1001, started_seconds=bench.now),
    }
    listed = device(UUIDS[0], gpu="0", processes={TITLED: 100 * MIB, STARTING: 512 * MIB})
    bench.store.put_reading(replace(node(listed, taken=bench.now), facts=facts))
    action = bench.request(target=Target(gpu="0"), caller=ADA)
    assert [wait.pid for wait in action.waits_for] == [STARTING]
    assert not bench.engine.asked


async def test_a_dry_run_asks_the_engine_and_changes_nothing(bench: EngineBench, ended: Any) -> None:
    action = await ended(dry_run=True)
    assert [row.outcome for row in action.results] == ["would_release", "would_release"]
    bench.engine.requests = [3]
    busy = await ended(dry_run=True)
    assert busy.results[0].reason_code == ReasonCode.ENGINE_BUSY
    assert bench.engine.calls == []


def test_an_engine_that_wakes_needs_memory_on_the_device(bench: EngineBench) -> None:
    reporting_engine(bench, sample={"unmapped_bytes": 1 << 50})
    refused = bench.request("resume_memory", dry_run=True)
    assert refused.results[0].reason_code == ReasonCode.DEVICE_MEMORY_SHORT
    assert bench.request("resume_memory", dry_run=True, force=True).state == "done"


async def test_a_process_without_an_engine_takes_no_part_whatever_it_denies(bench: EngineBench, ended: Any) -> None:
    bench.put(2, rank="1", devices=(sample(UUIDS[1], 0, 16 * MIB),), denied_actions=COMMAND_ACTIONS)
    action = await ended(target=Target(all=True))
    assert {(row.pid, row.outcome) for row in action.results} == {(1, "done"), (TITLED, "done")}
