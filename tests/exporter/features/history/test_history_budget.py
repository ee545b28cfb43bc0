"""The memory of a history: bounded whatever runs, and each owner loses its own rows."""

from __future__ import annotations

import gc
import tracemalloc
from array import array
from collections.abc import Iterator
from typing import Any

import pytest

from gpumem_exporter.features.history.history import MAX_BYTES
from gpumem_exporter.features.history.minima import Minima
from gpumem_exporter.features.history.series import Subject, resolutions
from tests.support.builders import MIB, UUIDS, device, node, reporting, sample
from tests.support.history_bench import DAY, START, HistoryBench

OF_HISTORY = "/gpumem_exporter/features/history/"
Saved = Iterator[tuple[Subject, list[tuple[int, bytes]]]]


class Bench(HistoryBench):
    """A bench after two days."""

    def __init__(self, **options: Any) -> None:
        super().__init__(seconds=2 * DAY, **options)

    def restore(self, *subjects: Subject, ended_seconds: float = 0.0) -> None:
        """Restore whole days of subjects that ended this time ago."""
        self.history.restore(self._days(subjects, START + self.seconds - ended_seconds))

    def _days(self, subjects: tuple[Subject, ...], end: float) -> Saved:
        for subject in subjects:
            tracks = []
            for track in resolutions(self.retention_seconds):
                row = array("I", range(track.width)).tobytes()
                tracks.append((int(end // track.step_seconds) - track.kept_steps, row * track.kept_steps))
            yield subject, tracks

    def minutes(self, key: str) -> int:
        """Return the number of minutes that the history has of a device or a job."""
        chosen: dict[str, Any] = {"jobs": [key]} if "~" in key else {"uuids": [key]}
        shown = self.document(DAY, points=2000, **{"uuids": (), "jobs": (), **chosen})
        assert shown["step_seconds"] == 60
        return sum(value is not None for series in shown["series"] for value in series["used"]["max"])

    def record_new_jobs(self, first: int, count: int) -> None:
        """Record a second in which user 1 has this number of jobs with new, long names."""
        taken = (sample(UUIDS[0], MIB),)
        names = [f"\N{PILE OF POO}{number:0>127}" for number in range(first, first + count)]
        jobs = [reporting(pid, owner_uid=1, devices=taken, workload=name) for pid, name in enumerate(names, start=1)]
        self.record(*jobs, reading=node(device()))
        self.seconds += 1


@pytest.fixture
def bench() -> Bench:
    return Bench()


def real_bytes() -> int:
    """Return the memory that Python has allocated since the start of tracemalloc.

    Without the interpreter's table of texts: it grows at any moment, in one block of 2 MiB or more.
    """
    gc.collect()
    traces = tracemalloc.take_snapshot().traces
    return sum(each.size for each in traces if each.size < MIB or OF_HISTORY in each.traceback[0].filename)


def job(number: int, owner: str, *, name: str = "") -> Subject:
    return Subject("", f"{name or owner}-{number}~0a1b2c3d", name or f"job {number}", "python train.py", owner=owner)


DEVICES = [Subject(f"GPU-{number:036}", "", "NVIDIA H100", gpu=str(number)) for number in range(16)]


def test_the_memory_is_counted_as_it_is_used() -> None:
    gc.collect()
    tracemalloc.start()
    try:
        bench = Bench()
        bench.restore(*DEVICES, *[job(number, "uid:2") for number in range(100)])
        assert real_bytes() == pytest.approx(bench.history.size_bytes, rel=0.05)
        assert bench.history.size_bytes / 116 < 80_000
        for second in range(20):
            bench.record_new_jobs(40 * second, 40)
        assert real_bytes() == pytest.approx(bench.history.size_bytes, rel=0.05)
        bench.seconds += DAY + 600
        bench.run(70)
        assert real_bytes() < 200_000
        assert bench.history.size_bytes < 100_000
    finally:
        tracemalloc.stop()


def test_jobs_of_one_user_do_not_push_out_others(bench: Bench) -> None:
    others = [job(number, "uid:2") for number in range(20)]
    bench.restore(*DEVICES, *others)
    for number in range(400):
        bench.restore(job(number, "uid:1"), ended_seconds=5000 - 10 * number)
    assert bench.history.size_bytes < MAX_BYTES
    assert {bench.minutes(subject.key) for subject in (*DEVICES, *others)} == {1440}
    keys = [job(number, "uid:1").key for number in range(400)]
    shown = {series["job"] for series in bench.document(DAY, uuids=(), jobs=keys)["series"]}
    kept = [key in shown for key in keys]
    assert 100 < sum(kept) < 400
    assert kept == sorted(kept), "the job that ended first is removed first"


def test_jobs_that_run_lose_their_oldest_rows(bench: Bench) -> None:
    few = [job(number, "uid:2") for number in range(5)]
    many = [job(number, "uid:1") for number in range(512)]
    bench.restore(*DEVICES, *few, *many)
    assert bench.history.size_bytes < MAX_BYTES
    assert {bench.minutes(subject.key) for subject in (*DEVICES, *few)} == {1440}
    assert min(bench.minutes(subject.key) for subject in many[::64]) > 120
    shown = bench.document(600, uuids=(), jobs=[subject.key for subject in many[:60]])
    assert {None in series["used"]["max"] for series in shown["series"]} == {False}


def test_invented_names_push_out_names_of_their_user_only(bench: Bench) -> None:
    devices = [Subject(f"MIG-{number:036}", "", "MIG", gpu=f"0:{number}") for number in range(100)]
    others = [job(number, "uid:2") for number in range(20)]
    bench.restore(*devices, *others)
    for second in range(26):
        bench.record_new_jobs(256 * second, 256)
        assert bench.history.size_bytes < MAX_BYTES
    assert min(bench.minutes(subject.key) for subject in (*devices[::10], *others)) >= 1439


def test_many_devices_leave_room_for_jobs() -> None:
    bench = Bench(retention_seconds=7 * DAY)
    bench.restore(*[Subject(f"MIG-{number:036}", "", "MIG", gpu=f"0:{number}") for number in range(128)])
    bench.restore(*[job(number, "uid:1") for number in range(10)])
    assert bench.history.size_bytes < MAX_BYTES
    assert all(bench.minutes(f"MIG-{number:036}") > 300 for number in range(128))
    assert all(bench.minutes(job(number, "uid:1").key) == 1440 for number in range(10))


def test_processes_of_one_user_do_not_push_out_the_minima_of_others() -> None:
    gc.collect()
    tracemalloc.start()
    try:
        minima = Minima()
        devices = tuple(sample(uuid, MIB) for uuid in UUIDS)
        many = [reporting(pid, owner_uid=1, devices=devices, session=f"{pid:016}") for pid in range(400)]
        others = [reporting(pid, owner_uid=2, devices=devices[:1], session=f"{pid:016}") for pid in range(20)]
        for minute in range(70):
            minima.add(60 * minute, [*many, *others])
        assert {len(minima.of(each.part(UUIDS[0]))) for each in others} == {60}
        assert 2000 < len(list(minima.saved())) < 2100
        assert real_bytes() < 2 * MIB
    finally:
        tracemalloc.stop()
