"""What grows, and when it fails: the rule on minima, and jobs over an hour through store, history and live document."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gpumem_exporter.core.samples import ReportingProcess, Snapshot
from gpumem_exporter.core.store import Store
from gpumem_exporter.features.history.history import History
from gpumem_exporter.page.growth import GrowingPart, Growth, growing_parts, growth
from gpumem_exporter.page.jobs import jobs_of
from gpumem_exporter.page.live import NodeView
from tests.support.builders.builders import UUIDS, Clock, device, node, report, reporting, sample
from tests.support.builders.growth_tables import ACTIVATION_GIB, LEAKS, STEADY, Leak, Minutes, Sizes

GIB = 1 << 30
STEP = 10


def points(*values: float) -> list[tuple[float, int]]:
    return [(STEP * index, round(value * GIB)) for index, value in enumerate(values)]


def line(count: int, start: float = 10.0, per_hour: float = 6.0) -> list[float]:
    return [start + per_hour * STEP * index / 3600 for index in range(count)]


@pytest.mark.parametrize(
    ("values", "since_seconds"),
    [
        (line(120), 0),
        ([*line(60, 30.0), *line(90)], 60 * STEP),  # more was freed
        ([*line(6, 0.0, 600.0), *line(90)], 6 * STEP),  # a start, which ends at 10 GiB
        ([value + 9 * (index % 7 == 0) for index, value in enumerate(line(121))], 0),  # steps that free what they take
        ([10 + 0.3 * (index // 12) for index in range(121)], 0),  # an evaluation every two minutes leaves something
    ],
)
def test_a_leak_grows_by_its_rate_since_its_start(values: list[float], since_seconds: float) -> None:
    found = growth(points(*values))
    assert found is not None
    assert found.bytes_per_hour == pytest.approx((9 if values[12] == 10.3 else 6) * GIB, rel=0.05)
    assert found.since_seconds == pytest.approx(since_seconds, abs=12 * STEP)


@pytest.mark.parametrize(
    "values",
    [
        (),
        line(40),  # too short
        [10.0] * 200,
        [*line(30, 0.0, 120.0), *[10.0] * 170],  # a start, then a steady training
        [10.0 + 5 * (index % 7 == 0) for index in range(200)],  # steps
        [10.0 + 0.0001 * index for index in range(200)],  # noise
        line(120, 20.0, -6.0),  # shrinks
        [*[10.0] * 150, *[14.0] * 50],  # one evaluation
        [10.0 + 4 * (index // 60) for index in range(240)],  # the stages of a curriculum
        [*line(120), *[12.0] * 31],  # a buffer that is full
    ],
)
def test_what_does_not_last_is_no_growth(values: list[float]) -> None:
    assert growth(points(*values)) is None


# --- Rooms


def growing(*parts: tuple[float, float, float | None], free: float = 8) -> list[GrowingPart]:
    """Return parts on one device; each has GiB an hour, idle GiB and the GiB that its limit leaves."""
    processes, growths = [], {}
    for pid, (rate, idle, room) in enumerate(parts, start=1):
        taken = dataclasses.replace(sample(UUIDS[0], GIB, round(idle * GIB)), idle_cache_bytes=round(idle * GIB))
        if room is not None and taken.reserved_bytes is not None:
            taken = dataclasses.replace(taken, memory_limit_bytes=taken.reserved_bytes + round(room * GIB))
        process = reporting(pid, devices=(taken,), session=f"session-{pid}")
        processes.append(process)
        growths[process.part(UUIDS[0])] = Growth(round(rate * GIB), 0.0)
    shown = Snapshot(1.0, node(device(used=GIB)), tuple(processes))
    found = growing_parts(jobs_of(shown), growths, {UUIDS[0]: round(free * GIB)})
    return sorted((each for parts in found.values() for each in parts), key=lambda each: str(each.part.process.pid))


@pytest.mark.parametrize(
    ("parts", "hours"),
    [
        ([(8, 0, None)], [1]),
        ([(8, 4, None)], [1.5]),  # its own cache first
        ([(8, 4, 2)], [0.75]),  # the limit is closer
        ([(2, 0, None)] * 4, [1] * 4),  # all on a device share what is free
        ([(6, 0, None), (0.1, 30, None)], [8 / 6, 300]),  # a large cache of a slow one helps no other
        ([(6, 1, None), (2, 1, None)], [1.25, 1.25]),
    ],
)
def test_parts_that_grow_on_one_device_share_its_free_memory(parts: Any, hours: list[float]) -> None:
    seconds = [each.full_in_seconds for each in growing(*parts)]
    assert seconds == [pytest.approx(hour * 3600, rel=1e-3) for hour in hours]


def test_a_device_that_is_full_leaves_no_time() -> None:
    assert [each.full_in_seconds for each in growing((6, 0, None), free=0)] == [0]


# --- Jobs over time


class Node:
    """A node whose processes report every ten seconds, on a clock of its own, with its live document."""

    def __init__(self, total_gib: float) -> None:
        self.total_bytes = round(total_gib * GIB)
        self.clock = Clock(1000.0)
        self.store = Store(report_expiry_seconds=15.0, reading_expiry_seconds=30.0, max_processes=512)
        clocks: dict[str, Any] = {"clock": self.clock, "wall_clock": lambda: 1e9 + self.clock()}
        self.history = History(retention_seconds=86400, **clocks)
        self.view = NodeView(minima_of=self.history.minima, **clocks)
        self.known: dict[tuple[int, str], ReportingProcess] = {}

    def tick(self, number: int, sizes: Sizes) -> None:
        """Let ten seconds pass."""
        self.clock.sleep(10)
        now = self.clock()
        for gone in self.known.keys() - sizes.keys():
            self.store.forget(self.known.pop(gone).key)
        used: dict[str, dict[int, int | None]] = {}
        for (rank, session), (gpu, gib) in sizes.items():
            # In every third sample a step is under way.
            allocated = round((gib + (ACTIVATION_GIB if number % 3 else 0)) * GIB)
            taken = dataclasses.replace(
                sample(UUIDS[gpu], allocated, round((gib + ACTIVATION_GIB) * GIB) - allocated), idle_cache_bytes=0
            )
            pid = 100 + rank + 10 * int(session)
            used.setdefault(UUIDS[gpu], {})[pid] = taken.reserved_bytes
            sent = report(pid, devices=(taken,), sequence=number, rank=str(rank), session=session, workload="train")
            times: dict[str, Any] = {"now_seconds": now, "now_unix_seconds": 1e9 + now}
            self.known[rank, session] = self.store.put_report(sent, host_pid=pid, owner_uid=1001, **times)
        devices = [
            device(
                uuid, gpu=str(index), total=self.total_bytes, used=sum(filter(None, listed.values())), processes=listed
            )
            for index, uuid in enumerate(UUIDS)
            for listed in [used.get(uuid, {})]
        ]
        self.store.put_reading(node(*devices, taken=now))
        snapshot = self.store.snapshot(now)
        self.history.add(snapshot)

    def shown(self) -> tuple[Any, str | None]:
        """Return the job of the live document, and the sentence of its growth finding."""
        now = self.clock()
        live = self.view.document(self.store.snapshot(now), {"failed_checks": []}, 1e9 + now)
        found = [finding["sentence"] for finding in live["findings"] if finding["kind"] == "growth"]
        return next(iter(live["jobs"]), None), next(iter(found), None)


def shown_each_minute(
    bench: Node, minutes: float, sizes: Callable[[Minutes], Sizes]
) -> Iterator[tuple[Minutes, Any, str | None]]:
    """Yield each minute with what the document shows of the only job."""
    for number in range(1, round(minutes * 6) + 1):
        bench.tick(number, sizes(number / 6))
        if number % 6 == 0:
            yield number / 6, *bench.shown()


@pytest.mark.parametrize("leak", LEAKS, ids=str)
def test_a_leak_in_one_rank_is_found_and_its_end_foretold(leak: Leak) -> None:
    first = None
    for minute, job, found in shown_each_minute(Node(leak.device_gib), leak.end, leak.sizes):
        if found is None:
            assert first is None
            assert job["full_in_seconds"] is None
            continue
        first = first or minute
        who = "train rank 0" if leak.ranks > 1 else "train"
        assert found.startswith(f"{who} grows by {leak.gib_per_hour}.0 GiB an hour")
        assert job["growth_bytes_per_hour"] == pytest.approx(leak.gib_per_hour * GIB, rel=0.05)
        assert job["full_in_seconds"] / 60 == pytest.approx(leak.end - minute, rel=0.25, abs=0.5)
        assert ("out of memory" in found or "no memory left" in found) == (job["full_in_seconds"] < 3600)
    assert first is not None
    assert first < 13


@pytest.mark.parametrize("job", STEADY)
def test_no_job_grows_because_it_has_more_processes_or_stages(job: str) -> None:
    for minute, shown, found in shown_each_minute(Node(80), 75, STEADY[job]):
        assert found is None, f"after {minute:.0f} minutes"
        assert shown is None or shown["growth_bytes_per_hour"] is None
