"""Which engines start: by their title and the driver's readings, and by their own reports."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from gpumem_exporter.core.samples import NodeReading, ProcessFacts, Snapshot
from gpumem_exporter.core.starting_engines import (
    GROWTH_BYTES,
    GROWTH_PAUSE_SECONDS,
    REPORTED_START_SECONDS,
    TITLED_START_SECONDS,
)
from gpumem_exporter.core.store import Store
from tests.support.builders import MIB, UUIDS, device, node, report, sample

ENGINE = 7
TICKS = 1000


class Bench:
    """A store on whose device 0 the driver lists one process, which started at 1000 s."""

    def __init__(self, title: str = "VLLM::EngineCore", **facts: Any) -> None:
        self.now = 1001.0
        self.store = Store(report_expiry_seconds=1e9, reading_expiry_seconds=5.0, max_processes=10)
        self.facts = ProcessFacts(ENGINE, TICKS, title, **{"uid": 1000, "started_seconds": 1000.0, **facts})
        self.sequence = 0

    def reads(self, used_bytes: int | None, after: float = 0.0, **changes: Any) -> None:
        self.now += after
        self.put(node(device(processes={ENGINE: used_bytes}, used=used_bytes or 0), taken=self.now, **changes))

    def put(self, reading: NodeReading) -> None:
        self.store.put_reading(dataclasses.replace(reading, facts={ENGINE: self.facts}))

    def reports(self, starting: bool | None, *, owner_uid: int | None = 1000, **changes: Any) -> None:
        self.sequence += 1
        changes = {"devices": (sample(),), **changes}
        sent = report(ENGINE, sequence=self.sequence, start_time_ticks=TICKS, engine_starting=starting, **changes)
        self.store.put_report(
            sent, host_pid=ENGINE, owner_uid=owner_uid, now_seconds=self.now, now_unix_seconds=self.now
        )

    def snapshot(self, after: float = 0.0) -> Snapshot:
        self.now += after
        return self.store.snapshot(self.now)

    def starting(self, after: float = 0.0) -> set[tuple[int | None, str]]:
        return {(engine.host_pid, engine.uuid) for engine in self.snapshot(after).starting}


STARTS = {(ENGINE, UUIDS[0])}


@pytest.mark.parametrize("title", ["VLLM::EngineCore", "VLLM::Worker_TP0", "sglang::scheduler_TP0"])
def test_a_young_process_with_an_engines_title_starts(title: str) -> None:
    bench = Bench(title)
    bench.reads(512 * MIB)
    (engine,) = bench.snapshot().starting
    assert (engine.host_pid, engine.uuid, engine.title, engine.owner_uid) == (ENGINE, UUIDS[0], title, 1000)
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
    bench = Bench(title, **facts)
    bench.reads(512 * MIB)
    assert not bench.starting()


def test_an_engine_that_does_not_grow_any_more_has_started() -> None:
    bench = Bench()
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
    bench = Bench()
    bench.reads(None)
    bench.reads(None, after=GROWTH_PAUSE_SECONDS - 1)
    assert bench.starting() == STARTS
    assert not bench.starting(after=1)


def test_a_start_outlives_a_driver_that_does_not_answer_and_ends_with_the_process() -> None:
    bench = Bench()
    bench.reads(512 * MIB)
    bench.put(node(up=False, taken=bench.now))
    assert bench.starting(after=20) == STARTS
    bench.put(node(device(processes=None), taken=bench.now))
    assert bench.starting() == STARTS
    bench.store.put_reading(node(device(processes={ENGINE: 512 * MIB}), taken=bench.now))
    assert bench.starting() == STARTS, "the reading has no description of the process"
    bench.put(node(device(processes={}), taken=bench.now))
    assert not bench.starting()


def test_a_later_process_with_the_pid_is_another_engine() -> None:
    bench = Bench()
    bench.reads(512 * MIB)
    bench.facts = dataclasses.replace(bench.facts, start_time_ticks=TICKS + 1, started_seconds=1200.0)
    bench.reads(512 * MIB, after=GROWTH_PAUSE_SECONDS + 20)
    assert bench.starting() == STARTS


def test_what_the_reporter_knows_outranks_the_title() -> None:
    bench = Bench()
    bench.reads(512 * MIB)
    bench.reports(False, owner_uid=None)
    assert bench.starting() == STARTS, "the report is not attested"
    bench.reports(False)
    assert not bench.starting()
    bench.reports(True)
    assert bench.starting() == STARTS
    bench.reports(None)
    assert bench.starting() == STARTS  # by its title again
    bench.reports(True, devices=())
    assert bench.starting() == STARTS, "it has no sample yet"


def test_a_process_without_a_title_starts_if_it_reports_so() -> None:
    bench = Bench("python notebook.py", started_seconds=-1e6)
    bench.reads(512 * MIB)
    bench.reports(True)
    (engine,) = bench.snapshot(after=TITLED_START_SECONDS).starting
    assert engine.reporter is not None
    assert engine.until_seconds == 1001.0 + REPORTED_START_SECONDS
    bench.reports(True)
    assert not bench.starting(after=REPORTED_START_SECONDS), "the first report of this start counts"


def test_a_process_that_the_exporter_cannot_see_starts_no_engine_where_the_driver_lists_processes() -> None:
    bench = Bench(title="python")
    bench.reads(0)
    sent = report(99, engine_starting=True, devices=(sample(),))
    bench.store.put_report(sent, host_pid=None, owner_uid=1001, now_seconds=bench.now, now_unix_seconds=bench.now)
    assert not bench.starting()
    bench.put(node(device(processes=None), taken=bench.now))
    assert bench.starting() == {(None, UUIDS[0])}
