"""The memory of a history: bounded whatever runs, and each owner loses its own rows."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from typing import Any

import pytest

from gpumem_exporter.core.history_series import StoredRow, Subject
from gpumem_exporter.core.samples import PartKey
from gpumem_exporter.features.history.history import MAX_BYTES
from tests.support.builders.builders import MIB, UUIDS, device, node, reporting, sample
from tests.support.builders.history_bench import DAY, START, HistoryBench

Saved = Iterator[tuple[Subject, list[StoredRow]]]


class Bench(HistoryBench):
    """A bench after two days."""

    def __init__(self, **options: Any) -> None:
        super().__init__(seconds=2 * DAY, **options)

    def restore(self, *subjects: Subject, ended_seconds: float = 0.0) -> None:
        """Restore whole days of subjects that ended this time ago, each one so much later than the one before."""
        self.history.restore(self._days(subjects, ended_seconds))

    def _days(self, subjects: tuple[Subject, ...], ended_seconds: float) -> Saved:
        for number, subject in enumerate(subjects):
            end = START + self.seconds - ended_seconds * (1 - number / len(subjects))
            rows: list[StoredRow] = []
            for step, seconds in ((1, 660), (10, 7260), (60, self.retention_seconds)):
                last = int(end) // step * step
                values = [80_000_000 + number for number in range(7 if step > 1 else 4)]
                rows += [
                    (step, last - step * age, *values, *[None] * (9 - len(values)))
                    for age in range(int(seconds) // step, 0, -1)
                ]
            yield subject, rows

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


def job(number: int, owner: str, *, name: str = "") -> Subject:
    return Subject("", f"{name or owner}-{number}~0a1b2c3d", name or f"job {number}", "python train.py", owner=owner)


DEVICES = [Subject(f"GPU-{number:036}", "", "NVIDIA H100", gpu=str(number)) for number in range(16)]


def test_a_day_of_a_series_has_a_known_size_and_an_old_one_leaves_nothing() -> None:
    bench = Bench()
    empty = bench.history.size_bytes
    bench.restore(*[job(number, "uid:2") for number in range(50)])
    assert 80_000 < (bench.history.size_bytes - empty) / 50 < 160_000
    bench.seconds += DAY + 600
    bench.run(70)
    assert bench.history.size_bytes < 100_000


def test_jobs_of_one_user_do_not_push_out_others(bench: Bench) -> None:
    others = [job(number, "uid:2") for number in range(10)]
    bench.restore(*DEVICES[:8], *others)
    bench.restore(*[job(number, "uid:1") for number in range(200)], ended_seconds=80_000)
    assert bench.history.size_bytes < MAX_BYTES
    assert min(bench.minutes(subject.key) for subject in (*DEVICES[:8], *others)) >= 1439
    keys = [job(number, "uid:1").key for number in range(200)]
    shown = {series["job"] for series in bench.document(DAY, uuids=(), jobs=keys)["series"]}
    kept = [key in shown for key in keys]
    assert 50 < sum(kept) < 200
    assert kept == sorted(kept), "the oldest values are removed first"


def test_invented_names_push_out_names_of_their_user_only(bench: Bench) -> None:
    devices = [Subject(f"MIG-{number:036}", "", "MIG", gpu=f"0:{number}") for number in range(40)]
    others = [job(number, "uid:2") for number in range(10)]
    bench.restore(*devices, *others)
    for second in range(30):
        bench.record_new_jobs(256 * second, 256)
        assert bench.history.size_bytes < MAX_BYTES
    assert min(bench.minutes(subject.key) for subject in (*devices[::10], *others)) >= 1439


def test_a_large_history_is_restored_where_no_temporary_file_can_be_created(bench: Bench) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        bench.restore(*[job(number, f"uid:{number}") for number in range(60)])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert bench.minutes(job(59, "uid:59").key) >= 1439


def test_many_devices_leave_room_for_jobs() -> None:
    bench = Bench(retention_seconds=7 * DAY)
    bench.restore(*[Subject(f"MIG-{number:036}", "", "MIG", gpu=f"0:{number}") for number in range(64)])
    bench.restore(*[job(number, "uid:1") for number in range(10)])
    assert bench.history.size_bytes < MAX_BYTES
    assert all(bench.minutes(f"MIG-{number:036}") > 300 for number in range(64))
    assert all(bench.minutes(job(number, "uid:1").key) == 1440 for number in range(10))


def test_processes_of_one_user_do_not_push_out_the_minima_of_others() -> None:
    bench = Bench()
    for minute in range(60):
        rows = [(60, START + bench.seconds - 60 * (60 - minute), None, minute, *[None] * 7)]
        sessions = [("uid:1", f"{minute}-{number}") for number in range(800)]
        parts = [PartKey(owner, session, UUIDS[0]) for owner, session in (*sessions, ("uid:2", "one"))]
        bench.history.restore((Subject.of_minima(part), rows) for part in parts)
        assert bench.history.size_bytes < MAX_BYTES
    bench.seconds += 1
    assert len(bench.history.minima(parts[-1])) == 60
