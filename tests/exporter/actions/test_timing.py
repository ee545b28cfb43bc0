from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpumem_client.wire.protocol import MODES
from gpumem_exporter.actions.action_options import ActionRequest, Target
from gpumem_exporter.actions.results import command_results, expected_result
from gpumem_exporter.actions.selection import SelectedProcess, processes_of, select
from gpumem_exporter.actions.timing import GROUP_LEAD_SECONDS, Turn, plan, step_of_group
from gpumem_exporter.core.caller import Caller, CallerKind, Rights
from gpumem_exporter.core.samples import ReportingProcess, Snapshot
from tests.support.builders.builders import MIB, UUIDS, device, node, reporting, sample

EVERYTHING = Target(all=True)
OPERATOR = Caller(CallerKind.POLICY, Rights.ALL)


def trains(pid: int, workload: str = "", *, step: int = 100, step_seconds: float | None = 1.0, **changes: Any) -> Any:
    devices = (sample(UUIDS[pid % 2], MIB, MIB),)
    return reporting(
        pid, workload=workload, step=step, step_seconds=step_seconds, modes=MODES, devices=devices, **changes
    )


def idles(pid: int, **changes: Any) -> ReportingProcess:
    return reporting(pid, workload="notebook", modes=MODES, devices=(sample(UUIDS[0], MIB, MIB),), **changes)


def turns(*processes: ReportingProcess, target: Target = EVERYTHING, **changes: Any) -> dict[int | str, Turn]:
    snapshot = Snapshot(0.0, node(device(UUIDS[0], gpu="0"), device(UUIDS[1], gpu="1")), processes)
    request = ActionRequest(**{"action": "empty_cache", "target": target, **changes})
    selected = select(request, OPERATOR, snapshot)
    return {one.pid: turn for one, turn in plan(request, selected, snapshot, 0.0)}


def modes(*processes: ReportingProcess, **changes: Any) -> dict[int | str, tuple[str, bool]]:
    """Return the mode of each process, and whether it acts with the other ranks of its job."""
    return {pid: (turn.mode, turn.group is not None) for pid, turn in turns(*processes, **changes).items()}


def ranks_of(size: int, *numbers: int, **changes: Any) -> list[Any]:
    return [
        trains(10 + number, **{"workload": "llm", "rank": str(number), "world_size": size, **changes})
        for number in numbers
    ]


def test_each_process_acts_when_it_harms_its_job_least() -> None:
    found = modes(idles(1), trains(2, "done", step_seconds=None), *ranks_of(2, 0, 1), trains(4, "finetune"))
    assert found == {
        1: ("now", False),
        2: ("now", False),
        4: ("step", False),
        **dict.fromkeys((10, 11), ("step", True)),
    }


def test_one_rank_stands_for_all_ranks_of_its_job() -> None:
    both = ranks_of(2, 0, 1)
    assert modes(*both, target=Target(uuid=UUIDS[0])) == dict.fromkeys((10, 11), ("step", True))
    assert modes(*both, target=Target(rank="1"), mode="step") == dict.fromkeys((10, 11), ("step", True))
    assert modes(*both, target=Target(rank="1"), mode="now") == {11: ("now", False)}
    assert modes(*both, target=Target(rank="1"), action="snapshot", mode="step") == {11: ("step", False)}
    assert modes(*both, target=Target(rank="1"), action="snapshot") == {11: ("now", False)}


@pytest.mark.parametrize(
    ("ranks", "named"),
    [
        (ranks_of(4, 0, 1), "rank 2 of 4"),
        ([*ranks_of(2, 0, 1), trains(9, "llm", rank="0")], "rank 0 runs 2 times"),
        ([*ranks_of(2, 0), trains(9, "llm", rank="1", step_seconds=None)], r"pid 9 \(rank 1\)"),
        (ranks_of(2, 0, 1, workload=""), "workload"),
    ],
)
def test_ranks_that_cannot_act_together_make_no_other_rank_wait(ranks: list[Any], named: str) -> None:
    for turn in turns(*ranks).values():
        assert (turn.mode, turn.group) == ("idle", None)
        assert re.search(named, turn.obstacle)
    for turn in turns(*ranks, mode="step").values():
        assert (turn.mode, turn.group) == ("step", None)
        assert re.search(named, turn.obstacle), "the process does not act"


@pytest.mark.parametrize("changes", [{}, {"rank": "0", "world_size": 1}])
def test_processes_with_one_name_that_wait_for_no_other_act_by_themselves(changes: dict[str, Any]) -> None:
    same = [trains(pid, "sweep", **changes) for pid in (2, 3)]
    assert set(modes(*same).values()) == set(modes(*same, mode="step").values()) == {("step", False)}


@pytest.mark.parametrize("name", ["owner_uid", "slurm_job_id"])
def test_jobs_of_two_users_or_two_tasks_of_an_array_with_one_name_are_two_jobs(name: str) -> None:
    values = (1, 2) if name == "owner_uid" else ("103", "104")

    def of_task(value: object) -> dict[str, Any]:
        return {name: value}

    ranks = [
        trains(10 * number + rank, "llm", rank=str(rank), world_size=2, **of_task(value))
        for number, value in enumerate(values, start=1)
        for rank in range(2)
    ]
    found = turns(*ranks)
    assert {turn.mode for turn in found.values()} == {"step"}
    assert found[10].group == found[11].group != found[20].group == found[21].group
    assert set(turns(*ranks, target=Target(pid=10))) == {10, 11}


@pytest.mark.parametrize(
    ("step_seconds", "given", "deadline_seconds"),
    [(0.5, None, 30.0), (20.0, None, 85.0), (2000.0, None, 3600.0), (20.0, 7.0, 7.0)],
)
def test_a_job_with_long_steps_has_time_to_end_one_unless_a_deadline_is_given(
    step_seconds: float, given: float | None, deadline_seconds: float
) -> None:
    found = turns(idles(1), trains(2, "llm", step_seconds=step_seconds), deadline_seconds=given)
    assert (found[2].mode, found[2].deadline_seconds) == ("step", deadline_seconds)
    assert found[1].deadline_seconds == (given or 30.0)


@pytest.mark.parametrize(
    ("idle", "reclaimable", "stays_free"), [(2, 8, 2), (8, 2, 2), (0, 8, 0), (None, 8, None), (2, None, None)]
)
def test_a_dry_run_expects_that_the_idle_cache_stays_free(
    idle: int | None, reclaimable: int | None, stays_free: int | None
) -> None:
    of_device = dataclasses.replace(sample(UUIDS[0], 1), idle_cache_bytes=idle, reclaimable_bytes=reclaimable)
    snapshot = Snapshot(0.0, None, (reporting(1, devices=(of_device,)),))
    (selected,) = processes_of(snapshot).values()
    request = ActionRequest("empty_cache", EVERYTHING, dry_run=True)
    (result,) = command_results(selected, expected_result(selected, request, ""), request)
    assert (result.freed_bytes, result.still_free_bytes) == (reclaimable, stays_free)


RATES = st.lists(st.tuples(st.integers(0, 10**9), st.floats(1e-4, 1e3), st.floats(0.0, 60.0)), min_size=1, max_size=8)
"""The completed steps of each rank, the seconds of a step, and the age of the report."""


@given(RATES)
@settings(max_examples=30)
def test_the_step_of_a_group_is_the_first_that_no_rank_completes_within_the_lead(
    rates: list[tuple[int, float, float]],
) -> None:
    def is_late_enough(step: int, margin: float) -> bool:
        ends = [(step - done) * seconds - age for done, seconds, age in rates]
        return min(ends) >= GROUP_LEAD_SECONDS + margin and step >= max(done for done, *_ in rates) + 2

    ranks = [trains(1, step=done, step_seconds=seconds, sample_age_seconds=age) for done, seconds, age in rates]
    selected = [SelectedProcess(1, rank) for rank in ranks]
    step, obstacle = step_of_group(selected, ActionRequest("empty_cache", EVERYTHING), float("inf"), 0.0)
    assert (step is None, obstacle) == (False, "")
    assert is_late_enough(step or 0, -1e-6)
    assert not is_late_enough((step or 0) - 1, 1e-6)
