from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from gpumem_client.wire.protocol import MODES
from gpumem_exporter.actions.caller import Caller, CallerKind, Rights
from gpumem_exporter.actions.declarations import ActionRequest, Target
from gpumem_exporter.actions.results import dry_run_results
from gpumem_exporter.actions.selection import NodeFacts, select, select_reporting
from gpumem_exporter.actions.suggestion import Suggestion, suggest_clears
from gpumem_exporter.core.samples import ReportingProcess, Snapshot
from tests.support.builders import MIB, UUIDS, device, node, reporting, sample

EVERYTHING = Target(all=True)
OPERATOR = Caller(CallerKind.POLICY, Rights.ALL)


def trains(pid: int, workload: str, *, step: int = 100, step_seconds: float | None = 1.0, **changes: Any) -> Any:
    devices = (sample(UUIDS[pid % 2], MIB, MIB),)
    return reporting(
        pid, workload=workload, step=step, step_seconds=step_seconds, modes=MODES, devices=devices, **changes
    )


def idles(pid: int, **changes: Any) -> ReportingProcess:
    return reporting(pid, workload="notebook", modes=MODES, devices=(sample(UUIDS[0], MIB, MIB),), **changes)


def suggested(
    *processes: ReportingProcess, target: Target = EVERYTHING, deadline_seconds: float | None = None
) -> Suggestion:
    snapshot = Snapshot(0.0, node(device(UUIDS[0], gpu="0"), device(UUIDS[1], gpu="1")), processes)
    request = ActionRequest("empty_cache", target, dry_run=True, deadline_seconds=deadline_seconds or 30.0)
    selected = select(request, OPERATOR, snapshot).reporting
    return suggest_clears(request, selected, snapshot, 0.0, free_deadline=deadline_seconds is None)


def parts(suggestion: Suggestion) -> list[tuple[tuple[str, ...], str, bool]]:
    return [(request.target.pid, request.mode, request.group) for request in suggestion.requests]


def test_processes_that_do_not_train_clear_at_once_with_the_given_target() -> None:
    (request,) = suggested(idles(1), trains(2, "done", step_seconds=None)).requests
    assert (request.target, request.mode, request.dry_run) == (EVERYTHING, "now", False)


def test_each_process_clears_when_it_harms_its_job_least() -> None:
    ranks = [trains(pid, "llm", rank=str(pid)) for pid in (2, 3)]
    suggestion = suggested(idles(1), *ranks, trains(4, "finetune"))
    assert parts(suggestion) == [
        (("1",), "now", False),
        (("4",), "step", False),
        (("2", "3"), "step", True),
    ]
    assert suggestion.target == EVERYTHING


def test_one_rank_stands_for_its_group() -> None:
    ranks = [trains(pid, "llm", rank=str(pid)) for pid in (2, 3)]
    suggestion = suggested(idles(1), *ranks, target=Target(uuid=UUIDS[0]))
    assert parts(suggestion) == [(("1",), "now", False), (("2", "3"), "step", True)]
    assert suggestion.target == Target(pid=[1, 2, 3])


def test_ranks_that_cannot_act_together_end_their_own_steps() -> None:
    old = trains(2, "llm", rank="0")
    stopped = trains(3, "llm", rank="1", step_seconds=None)
    assert parts(suggested(old, stopped)) == [(("3",), "now", False), (("2",), "step", False)]
    without_the_mode = dataclasses.replace(old, report=dataclasses.replace(old.report, modes=("now",)))
    assert [request.mode for request in suggested(without_the_mode).requests] == ["now"]


def test_jobs_of_two_users_with_one_name_are_two_jobs() -> None:
    own = [trains(pid, "llm", owner_uid=1) for pid in (2, 3)]
    others = [trains(pid, "llm", owner_uid=2) for pid in (4, 5)]
    assert parts(suggested(*own, *others)) == [(("2", "3"), "step", True), (("4", "5"), "step", True)]


@pytest.mark.parametrize(
    ("step_seconds", "given", "deadline_seconds"),
    [(0.5, None, 30.0), (20.0, None, 85.0), (2000.0, None, 3600.0), (20.0, 7.0, 7.0)],
)
def test_a_job_with_long_steps_has_time_to_end_one_unless_a_deadline_is_given(
    step_seconds: float, given: float | None, deadline_seconds: float
) -> None:
    (request,) = suggested(trains(2, "llm", step_seconds=step_seconds), deadline_seconds=given).requests
    assert (request.mode, request.deadline_seconds) == ("step", deadline_seconds)


@pytest.mark.parametrize(
    ("idle", "reclaimable", "stays_free"), [(2, 8, 2), (8, 2, 2), (0, 8, 0), (None, 8, None), (2, None, None)]
)
def test_a_dry_run_expects_that_the_idle_cache_stays_free(
    idle: int | None, reclaimable: int | None, stays_free: int | None
) -> None:
    of_device = dataclasses.replace(sample(UUIDS[0], 1), idle_cache_bytes=idle, reclaimable_bytes=reclaimable)
    snapshot = Snapshot(0.0, None, (reporting(1, devices=(of_device,)),))
    (selected,) = select_reporting(EVERYTHING, snapshot)
    (result,) = dry_run_results(selected, ActionRequest("empty_cache", EVERYTHING), NodeFacts())
    assert (result.freed_bytes, result.still_free_bytes) == (reclaimable, stays_free)


def test_a_suggestion_takes_no_search_for_each_job(monkeypatch: pytest.MonkeyPatch) -> None:
    searches = []

    def counted(*arguments: Any) -> Any:
        searches.append(arguments)
        return select_reporting(*arguments)

    for module in ("selection", "group", "suggestion"):
        monkeypatch.setattr(f"gpumem_exporter.actions.{module}.select_reporting", counted)
    ranks = [trains(pid, f"llm{pid // 2}", rank=str(pid)) for pid in range(2, 82)]
    assert len(suggested(*ranks).requests) == 40
    assert len(searches) == 2
