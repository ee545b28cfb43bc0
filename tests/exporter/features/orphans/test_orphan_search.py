"""Which of the processes that lost their launcher are orphans: only those that do not compute any more."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from gpumem_client.wire.protocol import EngineState
from gpumem_exporter.core.samples import LostLauncher, NodeReading, ProcessFacts
from gpumem_exporter.core.store import Store
from gpumem_exporter.features.orphans.orphan_search import ENDING_SECONDS, QUIET_SECONDS, OrphanSearch
from tests.support.builders import MIB, device, node, report, sample

PID, TICKS = 7, 1000
LOST = LostLauncher("launcher_ended", "python torchrun", 6, ended_seconds=900.0, computed_seconds=0.0)
QUIET = 900.0 + QUIET_SECONDS


class Bench:
    """A store on whose device 0 the driver lists one process, whose launcher ended at 900 s."""

    def __init__(self, command: str = "python train.py", **lost: Any) -> None:
        self.store = Store(report_expiry_seconds=1e9, reading_expiry_seconds=1e9, max_processes=10)
        self.store.find_orphans = OrphanSearch().find
        self.facts = ProcessFacts(PID, TICKS, command, lost=dataclasses.replace(LOST, **lost))
        self.sequence = 0

    def reads(self, at: float, *, utilization: float | None = 0.0) -> None:
        busy = dataclasses.replace(device(processes={PID: MIB}, used=MIB), utilization_ratio=utilization)
        self.put(node(busy, taken=at))

    def put(self, reading: NodeReading) -> None:
        self.store.put_reading(dataclasses.replace(reading, facts={PID: self.facts}))

    def reports(self, at: float, **changes: Any) -> None:
        self.sequence += 1
        changes = {"devices": (sample(),), "start_time_ticks": TICKS, **changes}
        sent = report(PID, sequence=self.sequence, **changes)
        self.store.put_report(sent, host_pid=PID, owner_uid=1000, now_seconds=at, now_unix_seconds=at)

    def orphans(self, at: float) -> set[int]:
        self.reads(at)
        return set(self.store.snapshot(at).orphans)


def test_a_process_that_used_no_cpu_is_an_orphan_soon_after_the_end_of_its_launcher() -> None:
    bench = Bench()
    assert bench.orphans(900.0 + ENDING_SECONDS - 1) == set()
    assert bench.orphans(900.0 + ENDING_SECONDS) == {PID}


def test_a_process_that_uses_the_cpu_is_no_orphan_until_it_stops() -> None:
    bench = Bench(computed_seconds=1000.0)
    assert bench.orphans(1000.0 + QUIET_SECONDS - 1) == set()
    assert bench.orphans(1000.0 + QUIET_SECONDS) == {PID}


@pytest.mark.parametrize(
    ("utilization", "expected"), [(0.0, {PID}), (0.4, set()), (None, set())], ids=["idle", "busy", "unknown"]
)
def test_an_engine_that_spins_is_an_orphan_if_its_device_is_idle(utilization: float | None, expected: set[int]) -> None:
    bench = Bench("VLLM::Worker_TP0", computed_seconds=QUIET)
    for at in (0.0, QUIET):
        bench.reads(at, utilization=0.0)
    bench.reads(QUIET, utilization=utilization)
    assert set(bench.store.snapshot(QUIET).orphans) == expected
    assert Bench("python train.py", computed_seconds=QUIET).orphans(QUIET) == set()


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
    bench = Bench()
    bench.reports(0.0, **before)
    bench.reports(QUIET - 1, **before)
    assert bench.orphans(QUIET - 1) == {PID}
    bench.reports(QUIET, **now)
    assert bench.orphans(QUIET) == set()


def test_an_engine_that_reports_no_request_is_an_orphan_whatever_its_threads_use() -> None:
    bench = Bench("VLLM::EngineCore", computed_seconds=QUIET)
    for at in (0.0, QUIET):
        bench.reports(at, engine=EngineState("vllm", state="idle", idle_seconds=QUIET_SECONDS))
    bench.reads(QUIET, utilization=0.9)  # of another process on the device
    assert set(bench.store.snapshot(QUIET).orphans) == {PID}


def test_a_report_of_an_earlier_process_with_the_pid_does_not_count() -> None:
    bench = Bench()
    bench.reports(QUIET, start_time_ticks=TICKS - 1)
    assert bench.orphans(QUIET) == {PID}
