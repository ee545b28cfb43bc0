"""The memory of a history, as tracemalloc measures it: bounded whatever runs, and each owner loses its own rows."""

from __future__ import annotations

import gc
import tracemalloc
from array import array
from collections.abc import Iterator
from typing import Any

import pytest

from gpumem_exporter.history.history import MAX_BYTES
from gpumem_exporter.history.series import Subject, resolutions
from tests.support.builders import MIB, UUIDS, device, node, reporting, sample
from tests.support.history_bench import DAY, START, HistoryBench

OF_HISTORY = "/gpumem_exporter/history/"
Saved = Iterator[tuple[Subject, list[tuple[int, bytes]]]]


class Measured(HistoryBench):
    """A bench that knows the memory of its history."""

    def __init__(self, **options: Any) -> None:
        gc.collect()
        tracemalloc.start()
        super().__init__(seconds=2 * DAY, **options)

    def real_bytes(self) -> int:
        """Return the memory that Python has allocated since the start.

        Without the interpreter's table of texts: it grows at any moment, in one block of 2 MiB or more.
        """
        gc.collect()
        traces = tracemalloc.take_snapshot().traces
        return sum(each.size for each in traces if each.size < MIB or OF_HISTORY in each.traceback[0].filename)

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


@pytest.fixture
def bench() -> Iterator[Measured]:
    yield Measured()
    tracemalloc.stop()


def job(number: int, owner: str, *, name: str = "") -> Subject:
    return Subject("", f"{name or owner}-{number}~0a1b2c3d", name or f"job {number}", "python train.py", owner=owner)


DEVICES = [Subject(f"GPU-{number:036}", "", "NVIDIA H100", gpu=str(number)) for number in range(16)]


def test_the_memory_is_counted_as_it_is_used(bench: Measured) -> None:
    bench.restore(*DEVICES, *[job(number, "uid:1") for number in range(100)])
    assert bench.real_bytes() == pytest.approx(bench.history.size_bytes, rel=0.05)
    assert bench.real_bytes() / 116 < 80_000
    for number in range(700):
        short = reporting(100 + number, owner_uid=2, workload=f"short {number}", devices=(sample(UUIDS[0], MIB),))
        bench.record(short, reading=node(device()))
        bench.seconds += 1
    bench.seconds += 7400
    bench.run(20)
    assert bench.real_bytes() == pytest.approx(bench.history.size_bytes, rel=0.05)


def test_jobs_of_one_user_do_not_push_out_others(bench: Measured) -> None:
    others = [job(number, "uid:2") for number in range(20)]
    bench.restore(*DEVICES, *others)
    for number in range(400):
        bench.restore(job(number, "uid:1"), ended_seconds=5000 - 10 * number)
    assert bench.real_bytes() < MAX_BYTES
    assert {bench.minutes(subject.key) for subject in (*DEVICES, *others)} == {1440}
    keys = [job(number, "uid:1").key for number in range(400)]
    shown = {series["job"] for series in bench.document(DAY, uuids=(), jobs=keys)["series"]}
    kept = [key in shown for key in keys]
    assert 100 < sum(kept) < 400
    assert kept == sorted(kept), "the job that ended first is removed first"


def test_jobs_that_run_lose_their_oldest_rows(bench: Measured) -> None:
    few = [job(number, "uid:2") for number in range(5)]
    many = [job(number, "uid:1") for number in range(512)]
    bench.restore(*DEVICES, *few, *many)
    assert bench.real_bytes() < MAX_BYTES
    assert {bench.minutes(subject.key) for subject in (*DEVICES, *few)} == {1440}
    assert min(bench.minutes(subject.key) for subject in many[::64]) > 120
    shown = bench.document(600, uuids=(), jobs=[subject.key for subject in many[:60]])
    assert {None in series["used"]["max"] for series in shown["series"]} == {False}


def test_invented_names_push_out_names_of_their_user_only(bench: Measured) -> None:
    others = [job(number, "uid:2") for number in range(20)]
    bench.restore(*DEVICES, *others)
    names, peak = 0, 0
    taken = (sample(UUIDS[0], MIB),)
    for second in range(32):
        invented = [
            reporting(pid, owner_uid=1, devices=taken, workload=f"\N{PILE OF POO}{names + pid:0>127}")
            for pid in range(1, 257)
        ]
        names += 1000
        bench.record(*invented, reading=node(device()))
        bench.seconds += 1
        del invented
        if second % 8 == 7:
            peak = max(peak, bench.real_bytes())
    assert peak < MAX_BYTES
    assert min(bench.minutes(subject.key) for subject in (*DEVICES, *others)) >= 1439


def test_many_devices_leave_room_for_jobs() -> None:
    bench = Measured(retention_seconds=7 * DAY)
    try:
        bench.restore(*[Subject(f"MIG-{number:036}", "", "MIG", gpu=f"0:{number}") for number in range(128)])
        bench.restore(*[job(number, "uid:1") for number in range(10)])
        assert bench.real_bytes() < MAX_BYTES
        assert all(bench.minutes(f"MIG-{number:036}") > 300 for number in range(128))
        assert all(bench.minutes(job(number, "uid:1").key) == 1440 for number in range(10))
    finally:
        tracemalloc.stop()


def test_rows_of_an_ended_job_expire(bench: Measured) -> None:
    before = bench.real_bytes()
    bench.restore(*[job(number, "uid:1") for number in range(50)], ended_seconds=DAY - 300)
    assert bench.history.size_bytes > 0
    bench.seconds += 600
    bench.run(70)
    assert bench.document(DAY, uuids=(), jobs=[job(1, "uid:1").key])["series"] == []
    assert bench.real_bytes() - before < 100_000
