"""The document of the node."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpumem_exporter.core.caller import Caller, CallerKind, Rights
from gpumem_exporter.core.container import HERE
from gpumem_exporter.core.ledger import CATEGORIES
from gpumem_exporter.core.samples import ProcessKey, ReportingProcess, Snapshot
from gpumem_exporter.page.live import NodeView
from tests.support.builders.builders import MIB, UUIDS, device, node, reporting, sample
from tests.support.builders.random_snapshots import SNAPSHOTS

GIB = 1024 * MIB


def of(pid: int, idle: int | None, reclaimable: int, **changes: Any) -> ReportingProcess:
    one = dataclasses.replace(sample(UUIDS[0], 10 * GIB, reclaimable), idle_cache_bytes=idle)
    process = reporting(pid, **{"devices": (one,), "modes": ("now", "step"), "rank": str(pid), **changes})
    return dataclasses.replace(process, key=ProcessKey(1, pid, 1001, HERE))


def node_view() -> NodeView:
    return NodeView(clock=lambda: 100.0, wall_clock=lambda: 1e9)


def document(*processes: ReportingProcess, others: int = 0) -> Any:
    used = {process.key.pid: process.report.devices[0].reserved_bytes for process in processes}
    reading = node(device(used=sum(map(int, filter(None, used.values()))) + others, processes={**used, 99: others}))
    return node_view().document(Snapshot(100.0, reading, processes), {"failed_checks": []}, 1e9)


def test_a_clear_says_what_stays_free_and_what_the_next_step_reserves_again() -> None:
    (job, *_) = document(of(1, 2 * GIB, 20 * GIB), of(2, GIB, GIB))["jobs"]
    assert job["clear"] == {
        "stays_free_bytes": 3 * GIB,
        "again_bytes": 18 * GIB,
        "at_least": False,
        "sentence": "Stays free 3.0 GiB; 18.0 GiB more would be reserved again.",
        "target": {"pid": [1, 2]},
        "mode": "now",
    }


@pytest.mark.parametrize("step_seconds", [0.5, 600.0])
def test_a_clear_of_a_job_that_trains_is_at_a_step(step_seconds: float) -> None:
    training = {"step": 5, "step_seconds": step_seconds, "world_size": 2}
    ranks = [of(rank, idle, GIB, rank=str(rank), **training) for rank, idle in ((0, GIB), (1, None))]
    (job, *_) = document(*ranks)["jobs"]
    assert (job["clear"]["mode"], job["clear"]["at_least"]) == ("step", True)
    (alone, *_) = document(of(1, GIB, GIB, **{**training, "world_size": 1}))["jobs"]
    assert (alone["clear"]["mode"], alone["clear"]["target"]) == ("step", {"pid": 1})
    (half, *_) = document(of(1, GIB, GIB, rank="0", **training))["jobs"]
    assert half["clear"]["mode"] == "idle", "the other rank is not here"


def test_a_job_of_which_nothing_stays_free_has_no_clear() -> None:
    for idle in (0, None):
        (job, *_) = document(of(1, idle, 20 * GIB))["jobs"]
        assert job["clear"] is None
    (unable, *_) = document(of(1, GIB, GIB, actions=("snapshot",)))["jobs"]
    assert unable["clear"] is None


def test_coverage_is_the_share_of_the_use_of_processes_that_report() -> None:
    totals = document(of(1, 0, 0), others=30 * GIB)["node"]["totals"]
    assert (totals["reported_bytes"], totals["coverage_ratio"]) == (10 * GIB, 0.25)
    assert document(others=30 * GIB)["node"]["totals"]["coverage_ratio"] == 0
    for lists in ({1: 10 * GIB, 99: None}, None):
        reading = node(device(used=20 * GIB, processes=lists))
        partly = node_view().document(Snapshot(1.0, reading, (of(1, 0, 0),)), {"failed_checks": []}, 1e9)
        assert partly["node"]["totals"]["coverage_ratio"] is None
    nothing = node_view().document(Snapshot(1.0, None, (of(1, 0, 0),)), {"failed_checks": []}, 1e9)
    assert nothing["node"]["totals"]["coverage_ratio"] is None
    assert nothing["node"]["totals"]["free_bytes"] is None
    assert nothing["node"]["totals"]["jobs"] == 1


@settings(max_examples=30)
@given(SNAPSHOTS, st.sampled_from([None, Caller(CallerKind.TCP, Rights.NONE)]))
def test_the_document_agrees_with_itself_on_any_node(snapshot: Snapshot, viewer: Caller | None) -> None:
    view = node_view()
    live = view.document(snapshot, {"failed_checks": []}, 1e9, details="all", viewer=viewer)
    assert live["node"]["totals"]["processes"] == sum(job["process_count"] for job in live["jobs"])
    pids = [process["pid"] for job in live["jobs"] for process in job["processes"]]
    assert len(set(pids)) == len(pids)
    known = {job["id"] for job in live["jobs"]}
    assert len(known) == len(live["jobs"])
    for each in live["devices"]:
        assert {used["job"] for used in each["jobs"]} <= known
        if each["ledger"] is not None:
            assert sum(each["ledger"].values()) == each["memory"]["total_bytes"]
            assert set(each["ledger"]) <= set(CATEGORIES)
    for finding in live["findings"]:
        assert finding["job"] is None or finding["job"] in known
        assert finding["sentence"].endswith(".")
    short = view.document(snapshot, {"failed_checks": []}, 1e9, viewer=viewer)
    for job, whole in zip(short["jobs"], live["jobs"], strict=True):
        for process, details in zip(job["processes"], whole["processes"], strict=True):
            on_devices = zip(process.pop("devices"), details["devices"], strict=True)
            assert process.items() <= details.items()
            assert all(shown.items() <= known.items() for shown, known in on_devices)
