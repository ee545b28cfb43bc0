"""What follows from readings and reports of a process: its activity, a start of its engine, whether it is an orphan."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from gpumem_client.wire.protocol import EngineState
from gpumem_exporter.core.readings import DeviceReading, LostLauncher, NodeReading, ProcessFacts
from gpumem_exporter.core.samples import Snapshot
from gpumem_exporter.core.starting_engines import (
    GROWTH_BYTES,
    GROWTH_PAUSE_SECONDS,
    REPORTED_START_SECONDS,
    TITLED_START_SECONDS,
)
from gpumem_exporter.core.store import Store
from gpumem_exporter.features.orphans.orphan_search import ENDING_SECONDS, QUIET_SECONDS, OrphanSearch
from tests.support.builders.builders import MIB, UUIDS, device, node, report, sample

PID, TICKS = 7, 1000


class Bench:
    """A store whose clock only the test advances."""

    def __init__(self, *facts: ProcessFacts) -> None:
        self.now = 1001.0
        self.store = Store(report_expiry_seconds=1e9, reading_expiry_seconds=5.0, max_processes=10)
        self.store.find_orphans = OrphanSearch().find
        self.facts = {each.pid: each for each in facts}
        self.sequence = 0

    def put(self, reading: NodeReading) -> None:
        self.store.put_reading(dataclasses.replace(reading, facts=dict(self.facts)))

    def reports(self, pid: int = PID, *, owner_uid: int | None = 1000, **changes: Any) -> None:
        self.sequence += 1
        changes = {"devices": (sample(),), "start_time_ticks": TICKS, **changes}
        sent = report(pid, sequence=self.sequence, **changes)
        self.store.put_report(sent, host_pid=pid, owner_uid=owner_uid, now_seconds=self.now, now_unix_seconds=self.now)

    def snapshot(self, after: float = 0.0) -> Snapshot:
        self.now += after
        return self.store.snapshot(self.now)


class Used(Bench):
    """One device, which processes may use."""

    def read(self, active: set[int] | None, *pids: int, seconds: float = 1.0, **changes: Any) -> None:
        self.now += seconds
        self.put(node(reading(active, *pids, **changes), taken=self.now))

    def last(self, pid: int) -> float | None:
        snapshot = self.snapshot()
        reporter = next((process for process in snapshot.processes if process.host_pid == pid), None)
        return snapshot.last_active_seconds(reporter, pid)


def reading(
    active: set[int] | None, *pids: int, utilization: float | None = None, uuid: str = UUIDS[0]
) -> DeviceReading:
    listed = device(uuid, processes=dict.fromkeys(pids, 1 << 30))
    active_pids = None if active is None else frozenset(active)
    return dataclasses.replace(listed, utilization_ratio=utilization, active_pids=active_pids)


def test_the_driver_shows_the_last_use_of_a_process_that_does_not_report() -> None:
    bench = Used()
    bench.read({7}, 7, 8)
    first = bench.now
    bench.read(set(), 7, 8, seconds=500)
    assert (bench.last(7), bench.last(8)) == (first, first), "pid 8 has been seen since then"
    bench.read({8}, 7, 8, seconds=500)
    assert (bench.last(7), bench.last(8)) == (first, bench.now)
    bench.facts = {7: ProcessFacts(7, 1, started_seconds=bench.now)}
    bench.read(set(), 7, 8)
    assert bench.last(7) == bench.now - 1, "another process has the pid"


def test_what_the_driver_does_not_show_is_unknown() -> None:
    bench = Used()
    bench.read(None, 7, 8, utilization=0.0)
    assert bench.last(7) is None
    bench.read(set(), 7, 8)
    bench.read(None, 7, 8, seconds=900)
    assert bench.last(7) is None
    assert bench.last(9) is None
    bench.store.put_reading(node(reading(set(), 7), reading(None, 7, 8, uuid=UUIDS[1]), taken=bench.now))
    assert bench.last(7) is None, "it may use the other device"


def test_a_process_that_is_alone_is_active_while_its_device_is() -> None:
    bench = Used()
    bench.read(None, 7, utilization=0.0)
    bench.read(None, 7, utilization=0.2, seconds=100)
    active = bench.now
    bench.read(None, 7, utilization=0.0, seconds=100)
    assert bench.last(7) == active


def test_all_clients_of_mps_are_active_while_its_server_is() -> None:
    bench = Used()
    bench.facts = {5: ProcessFacts(5, 1, "nvidia-cuda-mps-server")}
    bench.read({5}, 5, 7)
    bench.read({5}, 5, 7, seconds=100)
    assert bench.last(7) == bench.now


def test_a_reporter_knows_more_than_the_first_reading_and_less_than_a_use() -> None:
    bench = Used()
    bench.read(set(), 7, 8)
    bench.reports(7, inactive_seconds=900.0)
    assert bench.last(7) == bench.now - 900
    bench.read({7}, 7, 8)
    assert bench.last(7) == bench.now, "a CUDA graph allocates nothing"
    bench.reports(7, inactive_seconds=None)
    assert bench.last(7) == bench.now
    bench.reports(9, inactive_seconds=5.0)
    assert bench.last(9) == bench.now - 5


def test_the_time_on_the_way_does_not_change_the_last_activity() -> None:
    bench = Used()
    bench.reports(7, inactive_seconds=100.0)
    first = bench.last(7)
    for sequence, late in enumerate((0.0, 0.7, 0.2), start=2):
        bench.now += 1
        bench.reports(7, inactive_seconds=100.0 + sequence - 1 - late)
        assert bench.last(7) == first
    bench.now += 1
    bench.reports(7, inactive_seconds=0.0)
    assert bench.last(7) == bench.now


class Start(Bench):
    """A store on whose device 0 the driver lists one process, which started at 1000 s."""

    def __init__(self, title: str = "VLLM::EngineCore", **facts: Any) -> None:
        super().__init__(ProcessFacts(PID, TICKS, title, **{"uid": 1000, "started_seconds": 1000.0, **facts}))

    def reads(self, used_bytes: int | None, after: float = 0.0) -> None:
        self.now += after
        self.put(node(device(processes={PID: used_bytes}, used=used_bytes or 0), taken=self.now))

    def starting(self, after: float = 0.0) -> set[tuple[int | None, str]]:
        return {(engine.host_pid, engine.uuid) for engine in self.snapshot(after).starting}


STARTS = {(PID, UUIDS[0])}


@pytest.mark.parametrize("title", ["VLLM::EngineCore", "VLLM::Worker_TP0", "sglang::scheduler_TP0"])
def test_a_young_process_with_an_engines_title_starts(title: str) -> None:
    bench = Start(title)
    bench.reads(512 * MIB)
    (engine,) = bench.snapshot().starting
    assert (engine.host_pid, engine.uuid, engine.title, engine.owner_uid) == (PID, UUIDS[0], title, 1000)
    assert engine.until_seconds == 1000.0 + TITLED_START_SECONDS


@pytest.mark.parametrize(
    ("title", "facts"),
    [
        ("python train.py", {}),
        ("python VLLM::EngineCore", {}),
        ("VLLM::EngineCore", {"started_seconds": 1000.0 - TITLED_START_SECONDS}),
        ("VLLM::EngineCore", {"started_seconds": None}),
    ],
)
def test_other_and_older_processes_do_not_start(title: str, facts: dict[str, Any]) -> None:
    bench = Start(title, **facts)
    bench.reads(512 * MIB)
    assert not bench.starting()


def test_an_engine_that_does_not_grow_any_more_has_started() -> None:
    bench = Start()
    bench.reads(512 * MIB)
    bench.reads(512 * MIB, after=GROWTH_PAUSE_SECONDS - 1)  # reads shards into the memory that it has
    assert bench.starting() == STARTS
    bench.reads(512 * MIB + GROWTH_BYTES)
    bench.reads(512 * MIB + GROWTH_BYTES, after=GROWTH_PAUSE_SECONDS - 1)
    assert bench.starting() == STARTS
    bench.reads(512 * MIB)  # the trial run has released its activations
    bench.reads(512 * MIB + GROWTH_BYTES, after=0.5)
    assert bench.starting(after=GROWTH_PAUSE_SECONDS - 1) == STARTS
    bench.reads(512 * MIB + 2 * GROWTH_BYTES - MIB)  # the first requests load kernels
    assert not bench.starting(after=2)


def test_an_engine_without_a_size_starts_for_the_pause_only() -> None:
    bench = Start()
    bench.reads(None)
    bench.reads(None, after=GROWTH_PAUSE_SECONDS - 1)
    assert bench.starting() == STARTS
    assert not bench.starting(after=1)


def test_a_start_outlives_a_driver_that_does_not_answer_and_ends_with_the_process() -> None:
    bench = Start()
    bench.reads(512 * MIB)
    bench.put(node(up=False, taken=bench.now))
    assert bench.starting(after=20) == STARTS
    bench.put(node(device(processes=None), taken=bench.now))
    assert bench.starting() == STARTS
    bench.store.put_reading(node(device(processes={PID: 512 * MIB}), taken=bench.now))
    assert bench.starting() == STARTS, "the reading has no description of the process"
    bench.put(node(device(processes={}), taken=bench.now))
    assert not bench.starting()


def test_a_later_process_with_the_pid_is_another_engine() -> None:
    bench = Start()
    bench.reads(512 * MIB)
    bench.facts[PID] = dataclasses.replace(bench.facts[PID], start_time_ticks=TICKS + 1, started_seconds=1200.0)
    bench.reads(512 * MIB, after=GROWTH_PAUSE_SECONDS + 20)
    assert bench.starting() == STARTS


def test_what_the_reporter_knows_outranks_the_title() -> None:
    bench = Start()
    bench.reads(512 * MIB)
    bench.reports(engine_starting=False, owner_uid=None)
    assert bench.starting() == STARTS, "the report is not attested"
    bench.reports(engine_starting=False)
    assert not bench.starting()
    bench.reports(engine_starting=True)
    assert bench.starting() == STARTS
    bench.reports(engine_starting=None)
    assert bench.starting() == STARTS  # by its title again
    bench.reports(engine_starting=True, devices=())
    assert bench.starting() == STARTS, "it has no sample yet"


def test_a_process_without_a_title_starts_if_it_reports_so() -> None:
    bench = Start("python notebook.py", started_seconds=-1e6)
    bench.reads(512 * MIB)
    bench.reports(engine_starting=True)
    (engine,) = bench.snapshot(after=TITLED_START_SECONDS).starting
    assert engine.reporter is not None
    assert engine.until_seconds == 1001.0 + REPORTED_START_SECONDS
    bench.reports(engine_starting=True)
    assert not bench.starting(after=REPORTED_START_SECONDS), "the first report of this start counts"


def test_a_process_that_the_exporter_cannot_see_starts_no_engine_where_the_driver_lists_processes() -> None:
    bench = Start(title="python")
    bench.reads(0)
    sent = report(99, engine_starting=True, devices=(sample(),))
    bench.store.put_report(sent, host_pid=None, owner_uid=1001, now_seconds=bench.now, now_unix_seconds=bench.now)
    assert not bench.starting()
    bench.put(node(device(processes=None), taken=bench.now))
    assert bench.starting() == {(None, UUIDS[0])}


LOST = LostLauncher("launcher_ended", "python torchrun", 6, ended_seconds=900.0, computed_seconds=0.0)
QUIET = 900.0 + QUIET_SECONDS


class Lost(Bench):
    """A store on whose device 0 the driver lists one process, whose launcher ended at 900 s."""

    def __init__(self, command: str = "python train.py", **lost: Any) -> None:
        super().__init__(ProcessFacts(PID, TICKS, command, lost=dataclasses.replace(LOST, **lost)))

    def reads(self, at: float, *, utilization: float | None = 0.0) -> None:
        self.now = at
        busy = dataclasses.replace(device(processes={PID: MIB}, used=MIB), utilization_ratio=utilization)
        self.put(node(busy, taken=at))

    def reports_at(self, at: float, **changes: Any) -> None:
        self.now = at
        self.reports(**changes)

    def orphans(self, at: float) -> set[int]:
        self.reads(at)
        return set(self.snapshot().orphans)


def test_a_process_that_used_no_cpu_is_an_orphan_soon_after_the_end_of_its_launcher() -> None:
    bench = Lost()
    assert bench.orphans(900.0 + ENDING_SECONDS - 1) == set()
    assert bench.orphans(900.0 + ENDING_SECONDS) == {PID}


def test_a_process_that_uses_the_cpu_is_no_orphan_until_it_stops() -> None:
    bench = Lost(computed_seconds=1000.0)
    assert bench.orphans(1000.0 + QUIET_SECONDS - 1) == set()
    assert bench.orphans(1000.0 + QUIET_SECONDS) == {PID}


@pytest.mark.parametrize(
    ("utilization", "expected"), [(0.0, {PID}), (0.4, set()), (None, set())], ids=["idle", "busy", "unknown"]
)
def test_an_engine_that_spins_is_an_orphan_if_its_device_is_idle(utilization: float | None, expected: set[int]) -> None:
    bench = Lost("VLLM::Worker_TP0", computed_seconds=QUIET)
    for at in (0.0, QUIET):
        bench.reads(at, utilization=0.0)
    bench.reads(QUIET, utilization=utilization)
    assert set(bench.snapshot().orphans) == expected
    assert Lost("python train.py", computed_seconds=QUIET).orphans(QUIET) == set()


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ({"step": 1}, {"step": 2}),
        ({}, {"devices": (sample(allocated=MIB),)}),
        ({}, {"engine": EngineState("vllm", state="serving")}),
        ({}, {"engine": EngineState("vllm", state="idle", idle_seconds=10.0)}),
        ({}, {"engine_starting": True}),
    ],
    ids=["step", "allocation", "serves", "request", "starts"],
)
def test_a_process_whose_report_shows_work_is_no_orphan(before: dict[str, Any], now: dict[str, Any]) -> None:
    bench = Lost()
    bench.reports_at(0.0, **before)
    bench.reports_at(QUIET - 1, **before)
    assert bench.orphans(QUIET - 1) == {PID}
    bench.reports_at(QUIET, **now)
    assert bench.orphans(QUIET) == set()


def test_an_engine_that_reports_no_request_is_an_orphan_whatever_its_threads_use() -> None:
    bench = Lost("VLLM::EngineCore", computed_seconds=QUIET)
    for at in (0.0, QUIET):
        bench.reports_at(at, engine=EngineState("vllm", state="idle", idle_seconds=QUIET_SECONDS))
    bench.reads(QUIET, utilization=0.9)  # of another process on the device
    assert set(bench.snapshot().orphans) == {PID}


def test_a_report_of_an_earlier_process_with_the_pid_does_not_count() -> None:
    bench = Lost()
    bench.reports_at(QUIET, start_time_ticks=TICKS - 1)
    assert bench.orphans(QUIET) == {PID}
