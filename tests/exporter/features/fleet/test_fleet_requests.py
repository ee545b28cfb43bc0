from __future__ import annotations

import json
import threading
from typing import Any
from unittest.mock import Mock

import pytest

from gpumem_client.wire.errors import ExporterAnswerError, ExporterUnreachableError, ExporterUntrustedError
from gpumem_exporter.features.fleet.fleet_action import requests_for
from gpumem_exporter.features.fleet.fleet_options import FleetOptions
from gpumem_exporter.features.fleet.node_requests import ExporterRequest, result_rows
from gpumem_exporter.features.fleet.node_selection import Failure, TargetProcess
from gpumem_exporter.features.fleet.prometheus import QueryResult
from gpumem_exporter.main import main
from tests.support.builders import Clock
from tests.support.fleet_builders import A, B, ScriptedExporter, action, fleet_of, process, row, unreported

BODY = {"action": "empty_cache", "dry_run": False}


def new_request(pid: int | str = 1) -> ExporterRequest:
    (request,) = requests_for("empty_cache", [TargetProcess(A, pid, "train", "0", ("0",))])
    return request


def results(request: ExporterRequest) -> list[tuple[Any, str, str]]:
    return [(one["pid"], one["outcome"], one["reason"]) for one in result_rows(request)]


def run(exporter: ScriptedExporter, wait_seconds: float = 30.0) -> ExporterRequest:
    """Submit one request to an exporter and wait for its end."""
    clock = Clock()
    request = new_request()
    fleet = fleet_of({A: exporter}, clock)
    fleet.run([request], BODY, wait_seconds=wait_seconds)
    assert clock.now <= wait_seconds
    return request


def test_a_request_names_a_process_by_pid_workload_and_rank() -> None:
    exporter = ScriptedExporter(submits=[action(row())])
    assert results(run(exporter)) == [(1, "done", "")]
    assert exporter.requests == [("submit", {**BODY, "target": {"pid": 1, "workload": "train", "rank": "0"}})]


@pytest.mark.parametrize(
    ("name", "uuids", "requested"),
    [
        ("reset_peak", ("GPU-0", "GPU-1"), ["GPU-0", "GPU-1"]),
        ("empty_cache", ("GPU-0", "GPU-1"), [None]),
        ("reset_peak", None, [None]),
    ],
)
def test_only_actions_on_devices_are_requested_by_device(
    name: str, uuids: tuple[str, ...] | None, requested: list[str | None]
) -> None:
    requests = requests_for(name, [TargetProcess(A, 1, "train", "0", ("0", "1"), uuids)])
    assert [one.target.get("uuid") for one in requests] == requested


def test_the_ranks_of_a_job_on_a_node_are_one_request_which_may_add_ranks() -> None:
    ranks = [TargetProcess(A, pid, "train", str(pid), ("0",)) for pid in (1, 2)]
    others = [TargetProcess(B, 3, "train", "3"), TargetProcess(A, 4, "notebook", ""), TargetProcess(A, 5, None, None)]
    requests = requests_for("empty_cache", [*ranks, *others], of_jobs=True)
    assert [(each.exporter, each.target) for each in requests] == [
        (A, {"pid": 4, "workload": "notebook", "rank": ""}),
        (A, {"pid": 5}),
        (A, {"pid": [1, 2], "workload": "train"}),
        (B, {"pid": [3], "workload": "train"}),
    ]
    request = requests[2]
    request.action = action(row(1), row(2, rank="1"), row(7, rank="2"), row(8, workload="another"), row(9, rank=""))
    assert [(pid, outcome) for pid, outcome, _ in results(request)] == [
        *((pid, "done") for pid in (1, 2, 7)),
        *((pid, "failed") for pid in (8, 9)),
    ]


def test_ctrl_c_cancels_what_was_requested_and_requests_no_more() -> None:
    interrupted: list[bool] = []
    canceled = action(row(1, "refused", reason="cancelled"), state="cancelled")
    exporter = ScriptedExporter(
        submits=[action(state="queued")], cancels=[canceled], on_submit=lambda: interrupted.append(True)
    )
    requests = [new_request(pid) for pid in (1, 2)]
    fleet_of({A: exporter}, Clock()).run(requests, BODY, stopped=lambda: bool(interrupted))
    assert [kind for kind, _ in exporter.requests] == ["submit", "cancel"]
    assert [outcome for request in requests for _, outcome, _ in results(request)] == ["refused", "refused"]


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_termination_reaches_the_selected_processes_alone_and_a_refusal_is_a_failure(
    dry_run: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also a process that does not report can be terminated."""
    outcome = "would_terminate" if dry_run else "done"
    listed = {"processes": [process(1), process(2, workload="spared"), unreported(3)]}
    answers = [action(row(1, outcome)), action(row(3, outcome, workload="", rank=""))]
    allows = ScriptedExporter(document=listed, submits=[*answers])
    refuses = ScriptedExporter(document=listed, submits=[ExporterAnswerError(403, "--action.allow")])
    series = [{"instance": each.instance, "pid": pid} for each, pid in ((A, "1"), (A, "3"), (B, "1"))]
    monkeypatch.setattr(FleetOptions, "connect", lambda _: Mock(query=lambda _: QueryResult(tuple(series), ())))
    monkeypatch.setattr(FleetOptions, "fleet", lambda *_: fleet_of({A: allows, B: refuses}, Clock()))
    assert main(["fleet", "terminate", "--query", "doomed", "--json", "--dry-run" if dry_run else "--yes"]) == 1
    requests = [*allows.requests_of("submit"), *refuses.requests_of("submit")]
    reporting = {"pid": 1, "workload": "train", "rank": "0"}
    assert [each["target"] for each in requests] == [reporting, {"pid": 3}, reporting]
    assert {(each["action"], each["dry_run"]) for each in requests} == {("terminate", dry_run)}
    rows = json.loads(capsys.readouterr().out)["results"]
    assert {(each["instance"], each["pid"], each["outcome"]) for each in rows} == {
        (A.instance, 1, outcome),
        (A.instance, 3, outcome),
        (B.instance, 1, "refused"),
    }
    assert [each["reason"] for each in rows if each["outcome"] == "refused"] == ["--action.allow"]


def test_an_action_that_does_not_end_in_time_expires() -> None:
    exporter = ScriptedExporter(submits=[action(state="queued")], later=[action(state="running")])
    ((pid, outcome, reason),) = results(run(exporter, wait_seconds=5.0))
    assert (pid, outcome) == (1, "expired")
    assert "a1" in reason


@pytest.mark.parametrize(
    ("error", "outcome", "reason"),
    [
        (ExporterAnswerError(404, "nothing matches pid=1"), "gone", ""),
        (ExporterAnswerError(403, "not-allowed"), "refused", "not-allowed"),
        (ExporterAnswerError(401, "token-needed"), "refused", "token-needed"),
        (ExporterAnswerError(500, "see-log"), "failed", "see-log"),
        (ExporterUnreachableError("silent-x"), "failed", "silent-x"),
        (ExporterUntrustedError("uid 1001"), "refused", "uid 1001"),
    ],
)
def test_an_error_of_an_exporter_is_an_outcome(error: Any, outcome: str, reason: str) -> None:
    ((pid, found, why),) = results(run(ScriptedExporter(submits=[error])))
    assert (pid, found) == (1, outcome)
    assert reason in why


SILENCE = ExporterUnreachableError("silent-x")


@pytest.mark.parametrize(
    ("polls", "outcome", "reason"),
    [
        ([action(state="running"), SILENCE, SILENCE, action(row())], "done", ""),
        ([SILENCE], "failed", "silent-x"),
        ([ExporterAnswerError(404, "no such action")], "failed", ""),
    ],
)
def test_a_poll_is_repeated_until_the_exporter_misses_several_answers(
    polls: list[Any], outcome: str, reason: str
) -> None:
    exporter = ScriptedExporter(submits=[action(state="queued")], later=polls)
    ((_, found, why),) = results(run(exporter))
    assert found == outcome
    assert set(exporter.requests_of("action")) == {"a1"}
    assert reason in why


@pytest.mark.parametrize(
    ("answered", "expected"),
    [
        (action(row(1), row(2)), [(1, "done"), (2, "failed")]),
        (action(row(1), row(1, uuid="GPU-1")), [(1, "done"), (1, "failed")]),
        (action(row(1, workload="other")), [(1, "failed")]),
        (action(row(1, rank="7")), [(1, "failed")]),
        (action(), [(1, "failed")]),
    ],
)
def test_a_result_of_another_process_or_device_is_a_failure(answered: Any, expected: list[tuple[int, str]]) -> None:
    target = {"pid": 1, "uuid": "GPU-0", "workload": "train", "rank": "0"}
    request = ExporterRequest(A, (TargetProcess(A, 1, "train", "0"),), target, answered)
    assert [(pid, outcome) for pid, outcome, _ in results(request)] == expected
    assert all(reason for _, outcome, reason in results(request) if outcome == "failed")


def test_reading_reports_silence_and_servers_that_are_no_exporters() -> None:
    silent, other = ScriptedExporter(document=SILENCE), ScriptedExporter(document={"hello": "world"})
    read = fleet_of({A: silent, B: other}, Clock()).processes()
    assert read[A] == Failure("failed", "silent-x")
    refusal = read[B]
    assert isinstance(refusal, Failure)
    assert refusal.outcome == "failed"
    assert B.url in refusal.reason


def test_one_exporter_is_used_by_one_thread_at_a_time() -> None:
    busy, overlaps = threading.Lock(), []

    def on_submit() -> None:
        overlaps.append(not busy.acquire(blocking=False))
        busy.release()

    exporter = ScriptedExporter(submits=[action(row())], on_submit=on_submit)
    fleet_of({A: exporter}, Clock(), parallel=8).run([new_request(pid) for pid in range(1, 40)], BODY)
    assert overlaps == [False] * 39
