"""What ran out of memory and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from gpumem_exporter.core.container import HERE
from gpumem_exporter.core.event import detail_json
from gpumem_exporter.core.samples import ProcessKey, ReportingProcess, Snapshot
from gpumem_exporter.page import oom
from gpumem_exporter.page.documents import Part
from gpumem_exporter.page.jobs import sums_of
from gpumem_exporter.page.live import NodeView
from gpumem_exporter.page.oom import explanation
from tests.support.builders.builders import MIB, UUIDS, Clock, device, node, reporting, sample

GIB = 1024 * MIB


def other(used: int, idle: int | None = None, **changes: Any) -> dict[str, Any]:
    return {"job": "nb~1", "workload": "nb", "user": "carol", "used_bytes": used, "idle_cache_bytes": idle, **changes}


def error(
    requested: int | None = 4 * GIB,
    free: int | None = GIB,
    *,
    limit: int = 80 * GIB,
    allocated: int = 40 * GIB,
    fragmented: int = 0,
    others: list[dict[str, Any]] | None = None,
    growth: int | None = None,
) -> dict[str, Any]:
    reserved = allocated + fragmented
    return {
        "requested_bytes": requested,
        "device_free_bytes": free,
        "limit_bytes": limit,
        "allocator": {"allocated_bytes": allocated, "reserved_bytes": reserved, "fragmented_bytes": fragmented},
        "device": {"total_bytes": 80 * GIB, "growth_bytes_per_hour": growth, "jobs": others},
    }


@pytest.mark.parametrize(
    ("detail", "cause"),
    [
        (error(None, None), "unknown"),
        (error(GIB, 2 * GIB), "passed"),
        (error(fragmented=3 * GIB), "fragmented"),
        (error(fragmented=3 * GIB - 1, allocated=75 * GIB), "too_large"),
        # A limit leaves less than the device: what others hold did not matter.
        (error(free=30 * GIB, limit=42 * GIB, others=[other(10 * GIB, 9 * GIB)]), "limit"),
        (error(free=GIB, limit=42 * GIB, others=[other(38 * GIB, 9 * GIB)]), "too_large"),
        (error(free=30 * GIB, limit=44 * GIB, fragmented=3 * GIB), "fragmented"),
        (error(free=30 * GIB, limit=42 * GIB, growth=GIB), "growth"),
        (error(others=[other(38 * GIB, 3 * GIB)]), "idle_cache"),
        (error(others=[other(38 * GIB, 2 * GIB), other(GIB, GIB)], fragmented=3 * GIB, growth=GIB), "idle_cache"),
        (error(others=[other(38 * GIB, 3 * GIB - 1)], growth=GIB), "growth"),
        (error(others=[other(38 * GIB, 3 * GIB - 1)]), "others"),
        (error(others=[other(38 * GIB)]), "others"),
        (error(others=None), "others"),
        (error(allocated=78 * GIB, others=[other(2 * GIB)]), "too_large"),
        (error(allocated=79 * GIB, others=[]), "too_large"),
        (error(allocated=79 * GIB, others=None), "too_large"),
        ({"requested_bytes": 4 * GIB, "device_free_bytes": GIB, "limit_bytes": None, "allocator": None}, "too_large"),
    ],
)
def test_the_cause_follows_from_the_values_of_the_error(detail: dict[str, Any], cause: str) -> None:
    found = explanation(detail)
    assert found["cause"] == cause
    assert found["verdict"]
    assert bool(found["advice"]) == (cause != "unknown")


def test_the_job_whose_clear_would_have_helped_is_named_with_its_user() -> None:
    small = other(GIB, GIB, workload="small", user=None)
    found = explanation(error(others=[small, other(38 * GIB, 3 * GIB)]))
    assert "nb (carol)" in found["verdict"]
    assert "nb (carol)" in found["advice"]


def test_the_parts_add_up_to_the_device() -> None:
    found = explanation(error(fragmented=GIB, others=[other(30 * GIB, GIB), other(5 * GIB, job="b~1", workload="b")]))
    parts = [(part["key"], part["job"], part["bytes"] // GIB) for part in found["parts"]]
    own = [("torch_allocated", None, 40), ("torch_fragmented", None, 1)]
    assert parts == [*own, ("job", "nb~1", 30), ("job", "b~1", 5), ("rest", None, 3), ("free", None, 1)]


@pytest.mark.parametrize("others", [None, [other(60 * GIB)]])
def test_jobs_that_are_unknown_or_do_not_fit_into_the_moment_are_left_out(others: list[dict[str, Any]] | None) -> None:
    found = explanation(error(others=others))
    assert [(part["key"], part["bytes"] // GIB) for part in found["parts"]] == [
        ("torch_allocated", 40),
        ("rest", 39),
        ("free", 1),
    ]
    assert explanation({"requested_bytes": None, "allocator": None})["parts"] == []


def of(pid: int, workload: str, allocated: int, idle: int, **changes: Any) -> ReportingProcess:
    one = dataclasses.replace(sample(UUIDS[0], allocated, idle), idle_cache_bytes=idle)
    process = reporting(pid, devices=(one,), workload=workload, session=f"session-{pid}", **changes)
    return dataclasses.replace(process, key=ProcessKey(1, pid, 1001, HERE))


def test_an_event_stores_who_else_used_the_device() -> None:
    clock = Clock()
    view = NodeView(clock=clock, wall_clock=lambda: 1e9, minima_of=lambda _: ())
    processes = (of(1, "train", 10 * GIB, 0), of(2, "train", 20 * GIB, 0), of(3, "nb", GIB, 2 * GIB))
    used = {process.key.pid: process.report.devices[0].reserved_bytes for process in processes}
    reading = node(device(used=50 * GIB, processes={**used, 99: 7 * GIB}))
    assert view.device_at_error(UUIDS[0], "1") is None
    view.notice(Snapshot(0.0, reading, processes), ())
    stored = view.device_at_error(UUIDS[0], "1")
    assert stored is not None
    assert (stored["total_bytes"], stored["jobs_left_out"]) == (80 * GIB, 0)
    named = [(each["workload"], each["pid"], each["used_bytes"], each["idle_cache_bytes"]) for each in stored["jobs"]]
    # Another rank of the job is beside the process, too.
    assert named == [("train", 2, 20 * GIB, 0), (None, 99, 7 * GIB, None), ("nb", 3, 3 * GIB, 2 * GIB)]
    assert view.device_at_error(UUIDS[1], "1") is None
    clock.now += 6.0
    assert view.device_at_error(UUIDS[0], "1") is None


def test_names_of_other_jobs_never_make_an_event_too_long_to_be_stored() -> None:
    view = NodeView(clock=Clock(), wall_clock=lambda: 1e9, minima_of=lambda _: ())
    name = "\N{GRINNING FACE}" * 125
    processes = tuple(of(pid, f"{name}{pid}", pid * MIB, 0, command=name) for pid in range(1, 101))
    view.notice(Snapshot(0.0, node(device(used=70 * GIB)), processes), ())
    stored = view.device_at_error(UUIDS[0], "101")
    assert stored is not None
    assert detail_json({"number": 1, "phase": "\N{GRINNING FACE}" * 128, "device": stored})
    pids = [each["pid"] for each in stored["jobs"]]
    assert len(pids) >= 8
    assert stored["jobs_left_out"] == 100 - len(pids)


def test_further_errors_on_a_device_do_not_read_its_processes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user may report hundreds of errors a minute, beside hundreds of processes."""
    view = NodeView(clock=Clock(), wall_clock=lambda: 1e9, minima_of=lambda _: ())
    processes = tuple(of(pid, f"job-{pid % 10}", GIB, 0) for pid in range(1, 31))
    view.notice(Snapshot(0.0, node(device(used=70 * GIB)), processes), ())
    read: list[int] = []

    def counted(parts: Sequence[Part], names: Iterable[str]) -> dict[str, int | None]:
        read.append(len(parts))
        return sums_of(parts, names)

    monkeypatch.setattr(oom, "sums_of", counted)
    stored = [view.device_at_error(UUIDS[0], str(pid)) for pid in range(1, 31)]
    assert [len(each["jobs"]) for each in stored if each is not None] == [10] * 30
    # The processes of each job once, and for each error the other two of its own job.
    assert read == [3] * 10 + [2] * 30
