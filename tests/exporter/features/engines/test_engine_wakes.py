"""Several actions on engines at a time: a stand-in with vLLM's rules, which counts what a device has room for.

As vLLM 0.33 (`v1/executor/abstract.py`, `device_allocator/cumem.py`): a second sleep, and a wake of an engine that does
not sleep, are answered as done and change nothing. A wake that finds no memory ends the engine.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from gpumem_client.wire.reason_codes import ReasonCode
from gpumem_exporter.actions.action import Action
from gpumem_exporter.actions.action_options import ACTIONS, Target
from gpumem_exporter.actions.selection import SelectedProcess
from gpumem_exporter.core.caller import Caller, CallerKind, Rights
from gpumem_exporter.core.readings import ProcessFacts, ProcessMemory
from gpumem_exporter.core.samples import ReportingProcess
from gpumem_exporter.features.engines.vllm import Activity
from tests.support.builders.builders import MIB, UUIDS, device, node, sample
from tests.support.builders.dispatching import Bench

GIB = 1024 * MIB
TOTAL, RESIDENT, NEEDED = 80 * GIB, 1 * GIB, 40 * GIB
ROOT = Caller(CallerKind.UNIX, Rights.ALL, uid=0)
COMMANDED = ("empty_cache", "release_memory", "resume_memory")
SHORT = ReasonCode.DEVICE_MEMORY_SHORT
NEIGHBOR, STARTING = 60, 50
BOTH = Target(pid=(1, 2))


class FakeVllm:
    """The server of one process."""

    name = "vLLM"

    def __init__(self, pid: int, node: FakeNode) -> None:
        self.pid, self.key, self._node = pid, pid, node
        self.asleep, self.dead = True, False
        self.calls: list[str] = []
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.acts = threading.Event()

    def activity(self) -> Activity:
        return Activity(self.asleep, 0)

    def cache_use(self) -> None:
        return None

    def release(self, _keep: str | None, _force: bool) -> None:
        self._act("release")
        self.asleep = True

    def resume(self) -> None:
        self._act("resume")
        if self.asleep and self._node.free < NEEDED:
            self.dead = True
            raise RuntimeError("CUDA Error: out of memory at cumem_allocator.cpp")
        self.asleep = False

    def _act(self, call: str) -> None:
        self.calls.append(call)
        self.acts.set()
        assert self.goes_on.wait(30)


class FakeNode:
    """A device with two engines and a neighbor."""

    def __init__(self) -> None:
        self.neighbor = 0
        self.engines = {pid: FakeVllm(pid, self) for pid in (1, 2)}

    @property
    def used(self) -> dict[int, int]:
        return {
            **{pid: RESIDENT + (0 if engine.asleep else NEEDED) for pid, engine in self.engines.items()},
            NEIGHBOR: self.neighbor,
        }

    @property
    def free(self) -> int:
        return TOTAL - sum(self.used.values())

    def is_engine(self, target: SelectedProcess) -> bool:
        return target.pid in self.engines

    def find(self, target: SelectedProcess) -> FakeVllm:
        return self.engines[target.pid]  # type: ignore[index]


class WakeBench(Bench):
    """Two engines that sleep on one device, with room for one. Their reporters run actions if `commanded`."""

    def __init__(self, commanded: bool) -> None:
        super().__init__()
        self.node = FakeNode()
        self.node.neighbor = 18 * GIB  # 60 GiB are free
        self.starting = False
        self.processes = {pid: self.report(pid, commanded) for pid in (1, 2)}
        self.poll()
        self.dispatcher = self.build(allowed=frozenset(ACTIONS), engines=self.node, poll_soon=self.poll)

    def report(self, pid: int, commanded: bool, unmapped: int = NEEDED) -> ReportingProcess:
        sleeping = replace(sample(UUIDS[0], 0, 0), unmapped_bytes=unmapped)
        actions = COMMANDED if commanded else ("empty_cache",)
        return self.put(pid, rank=str(pid), devices=(sleeping,), actions=actions, modes=("now", "idle"))

    def poll(self) -> None:
        used = {**self.node.used, **({STARTING: GIB} if self.starting else {})}
        listed = tuple(ProcessMemory(pid, size) for pid, size in used.items())
        reading = replace(device(UUIDS[0], gpu="0", total=TOTAL, used=sum(used.values())), processes=listed)
        engine = ProcessFacts(STARTING, 1000, "VLLM::EngineCore", uid=0, started_seconds=self.now - 1.0)
        facts = {STARTING: engine} if self.starting else {}
        self.store.put_reading(replace(node(reading, taken=self.now), facts=facts, duration_seconds=0.0))

    def later(self, seconds: float) -> None:
        self.now += seconds
        self.poll()
        self.dispatcher.expire()

    def request(self, action: str = "resume_memory", target: Target = BOTH, **changes: Any) -> Action:
        return self.ask(action, target, caller=ROOT, **changes)

    def fetched(self) -> list[int]:
        """Let both processes report, and return which got a command."""
        return [pid for pid, process in self.processes.items() if self.dispatcher.commands(process)]

    def codes(self, action: Action) -> dict[Any, str | None]:
        return {row.pid: row.reason_code for row in self.current(action).results}

    async def ended(self, action: Action) -> dict[Any, str | None]:
        while not self.current(action).finished:
            await asyncio.sleep(0.01)
        return self.codes(action)


@pytest.fixture
def bench() -> Iterator[WakeBench]:
    """Engines that the exporter itself speaks with."""
    bench = WakeBench(commanded=False)
    yield bench
    for engine in bench.node.engines.values():
        engine.goes_on.set()


async def begun(engine: FakeVllm) -> None:
    while not engine.acts.is_set():
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("second", ["release_memory", "resume_memory"])
async def test_the_second_action_on_an_engine_asks_when_the_first_has_ended(bench: WakeBench, second: str) -> None:
    engine = bench.node.engines[1]
    engine.asleep = False
    bench.report(1, commanded=False, unmapped=0)
    engine.goes_on.clear()
    first = bench.request("release_memory", Target(pid=1))
    await begun(engine)
    other = bench.ask(second, Target(pid=1), caller=Caller.policy("night"), force=True)
    await asyncio.sleep(0.05)
    assert engine.calls == ["release"]
    engine.goes_on.set()
    assert await asyncio.wait_for(bench.ended(first), 30) == {1: None}
    found = await asyncio.wait_for(bench.ended(other), 30)
    wakes = second == "resume_memory"
    assert found == {1: None if wakes else ReasonCode.ENGINE_ASLEEP}
    assert engine.calls == (["release", "resume"] if wakes else ["release"])


@pytest.mark.parametrize("dry_run", [True, False])
async def test_of_two_wakes_with_room_for_one_the_second_is_refused(bench: WakeBench, dry_run: bool) -> None:
    asked = bench.request(dry_run=dry_run)
    assert await asyncio.wait_for(bench.ended(asked), 30) == {1: None, 2: SHORT}
    assert [engine.dead for engine in bench.node.engines.values()] == [False, False]


async def test_a_wake_beside_one_that_runs_counts_what_that_takes(bench: WakeBench) -> None:
    engine = bench.node.engines[1]
    engine.goes_on.clear()
    first = bench.request(target=Target(pid=1))
    await begun(engine)
    second = bench.request(target=Target(pid=2))
    assert await asyncio.wait_for(bench.ended(second), 30) == {2: SHORT}
    again = bench.request(target=Target(pid=1))  # its own memory is not counted twice
    engine.goes_on.set()
    assert await asyncio.wait_for(bench.ended(first), 30) == {1: None}
    assert await asyncio.wait_for(bench.ended(again), 30) == {1: ReasonCode.ENGINE_AWAKE}
    assert bench.node.engines[2].calls == []


async def test_a_wake_counts_what_a_process_takes_that_is_found_after_its_engine_wakes(
    bench: WakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = bench.node.engines[1]
    engine.goes_on.clear()

    def find(target: SelectedProcess) -> FakeVllm:
        if target.pid == 2:
            assert engine.acts.wait(30)
        return bench.node.engines[3] if target.pid == 3 else engine

    monkeypatch.setattr(bench.node, "find", find)
    bench.node.engines[3] = FakeVllm(3, bench.node)
    bench.poll()  # 59 GiB are free
    for pid in (1, 2, 3):
        bench.report(pid, commanded=False, unmapped=20 * GIB)
    woken = bench.request()

    async def refused() -> None:
        while await bench.ended(bench.request(target=Target(pid=3), dry_run=True)) != {3: SHORT}:
            pass

    await asyncio.wait_for(refused(), 10)
    engine.goes_on.set()
    assert await asyncio.wait_for(bench.ended(woken), 30) == {1: None, 2: None}
    assert engine.calls == ["resume"]


def test_commands_of_two_actions_count_each_other_when_they_are_delivered() -> None:
    bench = WakeBench(commanded=True)
    first, second = (bench.request(target=Target(pid=pid)) for pid in (1, 2))
    assert bench.fetched() == [1]
    assert bench.codes(second) == {2: SHORT}
    bench.node.engines[1].asleep = False  # it has woken, and its result is on the way
    bench.node.neighbor = 0
    bench.processes[2] = bench.report(2, commanded=True, unmapped=30 * GIB)
    bench.poll()
    bench.request(target=Target(pid=2))
    assert 2 in bench.fetched(), "what the driver lists already is not counted again"
    assert bench.codes(first) == {}


@pytest.mark.parametrize("commanded", [True, False])
async def test_a_wake_that_waits_for_a_starting_engine_asks_again(commanded: bool) -> None:
    bench = WakeBench(commanded)
    bench.starting = True
    bench.poll()
    asked = bench.request(target=Target(pid=1), deadline_seconds=600.0)
    assert [wait.pid for wait in asked.waits_for] == [STARTING]
    assert bench.fetched() == []
    bench.starting = False
    bench.node.neighbor = 70 * GIB  # what the engine that has started takes
    bench.later(5.0)
    assert bench.fetched() == []
    assert await asyncio.wait_for(bench.ended(asked), 30) == {1: SHORT}
    assert bench.node.engines[1].calls == []


def test_a_command_to_wake_waits_for_a_reading_of_the_driver() -> None:
    bench = WakeBench(commanded=True)
    polls: list[Callable[[], None]] = [lambda: None]  # the driver takes its time
    bench.dispatcher = bench.build(allowed=frozenset(ACTIONS), poll_soon=lambda: polls[0]())
    asked, late = bench.request(target=Target(pid=1)), bench.request(target=Target(pid=2))
    bench.now += 1.0
    assert bench.fetched() == []
    bench.node.neighbor = 70 * GIB
    bench.poll()
    assert bench.fetched() == []
    assert bench.codes(asked) == {1: SHORT}
    bench.node.neighbor = 0
    bench.poll()
    bench.request(target=Target(pid=2))
    bench.now += 1.0
    assert bench.fetched() == []
    bench.now += 5.0  # the driver hangs: what it has shown last counts
    assert bench.fetched() == [2]
    assert bench.codes(late) == {2: SHORT}
