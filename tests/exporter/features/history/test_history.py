"""What a history keeps: its resolutions, extremes, gaps and times."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

from gpumem_exporter.core.readings import ProcessFacts
from gpumem_exporter.core.samples import Snapshot
from gpumem_exporter.page.growth import growth
from gpumem_exporter.page.jobs import jobs_of
from tests.support.builders.builders import MIB, UUIDS, device, node, reporting, sample
from tests.support.builders.history_bench import DAY, START, HistoryBench, used


def allocating(mib: int, *, pid: int = 7, peak_mib: int | None = None, **changes: Any) -> Any:
    """Return a reporting process of user 1000 with this memory in tensors."""
    taken = dataclasses.replace(sample(UUIDS[0], mib * MIB), idle_cache_bytes=2 * MIB)
    if peak_mib is not None:
        taken = dataclasses.replace(taken, allocated_peak_bytes=peak_mib * MIB)
    return reporting(pid, owner_uid=1000, devices=(taken,), **changes)


def job_of(*processes: Any, reading: Any = None) -> str:
    (job,) = jobs_of(Snapshot(0.0, reading, processes))
    return job.id


@pytest.fixture(scope="module")
def day() -> HistoryBench:
    """25 hours: the use in MiB is the number of the minute, with a spike of one second after two hours."""
    bench = HistoryBench()
    readings = [node(used(minute)) for minute in range(25 * 60)]
    while bench.seconds < 25 * 3600:
        minute = int(bench.seconds // 60)
        is_spike = minute == 120 and bench.seconds % 60 < 7
        bench.record(reading=node(used(70_000)) if is_spike else readings[minute])
        bench.seconds = int(bench.seconds) + 7
    bench.seconds = 25 * 3600.0
    return bench


@pytest.mark.parametrize(
    ("seconds", "points", "step"),
    [
        (600, 600, 1),
        (600, 599, 10),
        (720, 2000, 10),
        (7200, 719, 60),
        (7400, 2000, 60),
        (DAY, 600, 180),
        (DAY, 1, DAY),
        (40 * DAY, 2000, 60),
    ],
)
def test_the_finest_steps_that_reach_back_and_fit_are_sent(
    day: HistoryBench, seconds: int, points: int, step: int
) -> None:
    document = day.document(seconds, points=points)
    ends = document["unix_seconds"]
    assert document["step_seconds"] == step
    assert len(ends) <= points
    assert all(later - earlier == step for earlier, later in itertools.pairwise(ends[:-1]))
    assert document["from_unix_seconds"] < ends[0]
    assert ends[-1] <= document["to_unix_seconds"] == day.unix_seconds
    assert ends[-1] > day.unix_seconds - min(step, 60)
    (series,) = document["series"]
    assert {len(line) for line in series["used"].values()} == {len(ends)}
    assert (set(series["used"]) == {"max"}) == (step == 1)


@pytest.mark.parametrize(("seconds", "points"), [(600, 60), (7200, 720), (7200, 120), (DAY, 1440), (DAY, 480)])
def test_each_step_has_the_values_of_its_time(day: HistoryBench, seconds: int, points: int) -> None:
    document = day.document(seconds, points=points)
    step = document["step_seconds"]
    (series,) = document["series"]
    lows, highs = series["used"]["min"], series["used"]["max"]
    assert None not in lows
    for end, low, high in zip(document["unix_seconds"], lows, highs, strict=True):
        assert low // MIB == (end - START - step) // 60
        assert high // MIB in ((end - START - 1) // 60, 70_000)
    assert highs.count(70_000 * MIB) == (seconds == DAY), "a spike of one second stays in the maximum"


def test_seconds_without_a_snapshot_are_a_gap_at_every_resolution() -> None:
    bench = HistoryBench()
    bench.run(120)
    bench.seconds += 120
    bench.run(120)
    for points in (600, 60, 10):
        shown = bench.values("used", points=points)
        known = [age for age, value in shown.items() if value is not None]
        assert [age for age, value in shown.items() if value is None and age < 360] == [
            age for age in shown if 120 <= age < 240
        ]
        assert max(known) < 360


def test_a_device_that_does_not_answer_has_a_gap() -> None:
    bench = HistoryBench()
    bench.run(5, reading=node(dataclasses.replace(used(100), gpu="10")))
    lost = dataclasses.replace(device(UUIDS[0], gpu="10"), memory=None, processes=None, error="lost")
    others = [dataclasses.replace(used(50), gpu=gpu, uuid=uuid) for gpu, uuid in (("1", UUIDS[1]), ("0:1", UUIDS[2]))]
    bench.run(5, reading=node(lost, *others))
    assert list(bench.values("used", seconds=10, uuids=UUIDS[:1]).values()) == [100] * 5 + [None] * 5
    assert [series["gpu"] for series in bench.document()["series"]] == ["0:1", "1", "10"], "in the order of the indexes"
    assert bench.document()["series"][1]["used"]["max"][-5:] == [50 * MIB] * 5


@pytest.mark.parametrize(("jump", "known"), [(3600.0, 50), (-7200.0, 50), (-30.0, 70), (0.4, 100)])
def test_after_a_step_of_the_wall_clock_rows_stay_unless_they_would_be_later(jump: float, known: int) -> None:
    bench = HistoryBench()
    for second in range(100):
        bench.record(used_mib=second)
        bench.seconds = second + 1
        bench.jumped = jump if second >= 49 else 0.0
    shown = bench.document(600 if jump < 0 else 100)
    values = [value // MIB for value in shown["series"][0]["used"]["max"] if value is not None]
    assert values == [*range(known - 50), *range(50, 100)][-len(values) :]
    assert len(values) >= known - 1
    assert abs(bench.unix_seconds - shown["unix_seconds"][-1]) < 1.5
    bench.run(100)
    assert None not in bench.values("used", seconds=140, points=14).values(), "each fold has the rows that stay"


def test_a_second_with_a_wrong_clock_costs_no_history() -> None:
    bench = HistoryBench()
    bench.run(600)
    bench.jumped = 30 * DAY
    bench.run(1)
    bench.jumped = 0.0
    bench.run(60)
    known = [value for value in bench.values("used", seconds=600).values() if value is not None]
    assert len(known) >= 598


@pytest.mark.parametrize("jump", [1800.0, -240.0])
def test_a_load_of_five_minutes_is_no_growth_when_the_clock_is_set(jump: float) -> None:
    bench = HistoryBench()
    for second in range(1500):
        bench.record(allocating(1000 + 100 * min(300, max(0, second - 600))))
        bench.seconds = second + 1
        bench.jumped = jump if second >= 750 else 0.0
        if second % 60 == 5:
            assert growth(bench.history.minima(allocating(1).part(UUIDS[0]))) is None
    times = [time for time, _ in bench.history.minima(allocating(1).part(UUIDS[0]))]
    assert times == sorted(set(times))
    assert times[-1] <= bench.unix_seconds


def test_a_job_has_the_sum_of_its_ranks_and_is_unknown_while_one_is_silent() -> None:
    bench = HistoryBench()
    ranks = [allocating(30, pid=7, rank="0"), allocating(40, pid=8, rank="1", session="other")]
    both = node(used(100, p7=50, p8=60))
    bench.run(3, *ranks, reading=both)
    job = job_of(*ranks)
    document = bench.document(3, uuids=(), jobs=[job, "unknown~1"])
    (series,) = document["series"]
    assert (series["job"], series["device"], series["name"], series["gpu"]) == (job, None, "train", None)
    assert [series[name]["max"][-1] // MIB for name in ("used", "allocated", "idle_cache", "in_use_peak")] == [
        *(110, 70, 4, 70)
    ]
    bench.run(1, dataclasses.replace(ranks[0], report=dataclasses.replace(ranks[0].report, devices=())), reading=both)
    shown = bench.values("used", seconds=1, uuids=(), jobs=[job])
    assert list(shown.values()) == [50]
    silent = dataclasses.replace(ranks[1].report.devices[0], allocated_bytes=None)
    unknown = dataclasses.replace(ranks[1], report=dataclasses.replace(ranks[1].report, devices=(silent,)))
    bench.run(1, ranks[0], unknown, reading=both)
    assert list(bench.values("used", seconds=1, uuids=(), jobs=[job]).values()) == [110]
    assert list(bench.values("allocated", seconds=1, uuids=(), jobs=[job]).values()) == [None]


def test_a_device_without_a_sample_adds_no_tensors() -> None:
    """A rank with a context on another device, which its report does not have, keeps the job's other values known."""
    bench = HistoryBench()
    rank = allocating(30)
    other = dataclasses.replace(used(9, p7=5), uuid=UUIDS[1], gpu="1")
    bench.run(1, rank, reading=node(used(100, p7=50), other))
    for name, value in (("used", 55), ("allocated", 30), ("idle_cache", 2)):
        assert list(bench.values(name, seconds=1, uuids=(), jobs=[job_of(rank)]).values()) == [value]


@pytest.mark.parametrize(("idle_mib", "other_mib"), [(2, 18), (None, 20)])
def test_the_cache_that_is_not_idle_is_other_cache(idle_mib: int | None, other_mib: int) -> None:
    bench = HistoryBench()
    idle_bytes = None if idle_mib is None else idle_mib * MIB
    memory = sample(UUIDS[0], 30 * MIB, reclaimable=15 * MIB, fragmented=5 * MIB)
    process = reporting(7, owner_uid=1000, devices=(dataclasses.replace(memory, idle_cache_bytes=idle_bytes),))
    bench.run(20, process, reading=node(used(100, p7=60)))
    for of in ({}, {"uuids": (), "jobs": [job_of(process)]}):
        (value,) = set(bench.values("other_cache", "min", seconds=20, points=2, **of).values())
        assert value == other_mib


def test_a_peak_counts_in_the_second_in_which_it_is_new() -> None:
    bench = HistoryBench()
    reading = node(used(100, p7=50))
    peaks = [(10, 60), (20, 60), (10, 90), (10, 90), (10, 10), (12, 40)]
    for mib, peak in peaks:
        bench.run(1, allocating(mib, peak_mib=peak), reading=reading)
    device_peaks = list(bench.values("in_use_peak", seconds=6).values())
    assert device_peaks == [10, 20, 90, 10, 10, 40]
    job: dict[str, Any] = {"uuids": (), "jobs": [job_of(allocating(1))]}
    assert list(bench.values("in_use_peak", seconds=6, **job).values()) == device_peaks
    bench.run(1, allocating(10, peak_mib=80, session="second"), reading=reading)
    assert bench.values("in_use_peak", seconds=1) == {0.0: 10}, "the peak of another session is not new"
    bench.run(53)
    assert max(value or 0 for value in bench.values("in_use_peak", seconds=60, points=1).values()) == 90


def test_the_history_of_a_pid_ends_with_its_process() -> None:
    bench = HistoryBench()
    first = dataclasses.replace(
        node(used(100, p7=50)), facts={7: ProcessFacts(7, start_time_ticks=1, command="python a.py")}
    )
    second = dataclasses.replace(first, facts={7: ProcessFacts(7, start_time_ticks=2, command="python b.py")})
    bench.run(5, reading=first)
    job = job_of(reading=first)
    (series,) = bench.document(10, uuids=(), jobs=[job])["series"]
    assert series["name"] == "python a.py"
    bench.run(5, reading=second)
    (series,) = bench.document(10, uuids=(), jobs=[job])["series"]
    assert series["name"] == "python b.py"
    assert series["used"]["max"] == [None] * 5 + [50 * MIB] * 5


def test_the_minima_of_a_process_are_those_of_whole_minutes() -> None:
    bench = HistoryBench()
    for minute in range(5):
        for second in range(60):
            bench.record(allocating(100 * minute + (30 if second else 10)))
            bench.seconds = int(bench.seconds) + 1
    bench.run(30, allocating(1))
    part = allocating(1).part(UUIDS[0])
    minima = bench.history.minima(part)
    assert [(time - START, size // MIB) for time, size in minima] == [(60 * (n + 1), 100 * n + 10) for n in range(5)]
    assert bench.history.minima(part._replace(session="another")) == []
    assert bench.history.minima(part._replace(uuid=UUIDS[1])) == []
    bench.seconds += 240
    bench.run(60, allocating(1))
    assert len(bench.history.minima(part)) == 7, "minutes without a report are left out"
    bench.seconds += 3600
    bench.run(1)
    assert bench.history.minima(part) == []


def test_values_are_whole_kib_and_too_large_ones_are_unknown() -> None:
    bench = HistoryBench()
    bench.run(1, reading=node(device(UUIDS[0], total=1 << 50, used=5000)))
    bench.run(1, reading=node(device(UUIDS[0], total=1 << 50, used=1 << 42)))
    bench.run(1, reading=node(device(UUIDS[0], total=1 << 50, used=(1 << 42) - 2048)))
    assert bench.document(3)["series"][0]["used"]["max"] == [4096, None, (1 << 42) - 2048]


def serving(used_mib: int | None, *, pid: int = 7, **changes: Any) -> Any:
    """Return a reporting process with a key-value cache of 1000 MiB of which requests use this."""
    cache = {} if used_mib is None else {"used": used_mib * MIB, "evictable": 0, "free": (1000 - used_mib) * MIB}
    taken = dataclasses.replace(sample(UUIDS[0], 2000 * MIB), kv_cache_bytes=cache)
    return reporting(pid, owner_uid=1000, devices=(taken,), **changes)


def peaks(bench: HistoryBench, pid: str = "7") -> dict[str, tuple[int, int]]:
    """Return the highest use in MiB and the minutes in which it was known, by window."""
    found = bench.history.kv_cache_peaks.get((pid, UUIDS[0]), {})
    return {window: (peak.used_bytes // MIB, peak.observed_seconds // 60) for window, peak in found.items()}


def test_the_highest_use_of_a_cache_is_of_the_last_hour_and_day_and_says_how_much_of_them_is_known() -> None:
    bench = HistoryBench()
    bench.record(serving(700))
    bench.run(300, serving(100))
    assert peaks(bench) == {"1h": (700, 5), "24h": (700, 5)}
    bench.run(1800, serving(None), step=10)  # asleep
    assert peaks(bench) == {}
    bench.run(3600, serving(200), step=10)
    assert peaks(bench) == {"1h": (200, 59), "24h": (700, 64)}
    bench.run(86400 + 120, serving(50), step=60)
    assert {window: peak for window, (peak, _) in peaks(bench).items()} == {"1h": 50, "24h": 50}


def test_the_peak_of_a_cache_is_of_one_process_and_each_rank_has_its_own() -> None:
    bench = HistoryBench()
    bench.run(30, serving(700), serving(100, pid=8))
    assert peaks(bench)["24h"][0] == 700
    assert peaks(bench, "8")["24h"][0] == 100
    bench.run(30, serving(10, start_time_ticks=2000))
    assert peaks(bench)["24h"][0] == 10
    assert peaks(bench, "8") == {}


def test_the_series_of_a_cache_is_no_series_of_a_job() -> None:
    bench = HistoryBench()
    bench.run(30, serving(700))
    assert [series["device"] for series in bench.document()["series"]] == [UUIDS[0]]
    cache = f"{job_of(serving(700))} 7 {UUIDS[0]}"
    assert bench.document(uuids=(), jobs=(cache,))["series"] == []
