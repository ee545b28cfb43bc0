from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from gpumem_client.wire.protocol import CommandResult, DeviceResult
from gpumem_exporter.core.samples import ProcessMemory
from tests.support.builders import UUIDS, report, sample
from tests.support.running_exporter import ACTIONS, RunningExporter, problem, running_exporter
from tests.support.waiting import eventually


@pytest.fixture
def exporter() -> Iterator[RunningExporter]:
    """An exporter with two reporting processes that hold cached memory."""
    with running_exporter(report_interval=300, report_expiry=900) as running:
        for pid, uuid in ((1, UUIDS[0]), (2, UUIDS[1])):
            sent = report(pid, devices=(sample(uuid, 10, 7),), workload=f"w{pid}", rank="0")
            assert running.report(sent).status == 200
        yield running


def carry_out(exporter: RunningExporter, pid: int, uuid: str) -> str:
    """Do what the reporter of a process would do: fetch the command, run it, report its result."""
    command = json.loads(
        exporter.report(report(pid, devices=(sample(uuid, 10, 7),), workload=f"w{pid}", sequence=2)).body
    )["commands"][0]
    devices = (DeviceResult(uuid, reserved_before_bytes=17, reserved_after_bytes=10, freed_bytes=7),)
    result = CommandResult(command["id"], "done", duration_seconds=0.001, devices=devices)
    sent = report(pid, devices=(sample(uuid, 10),), workload=f"w{pid}", sequence=3, results=(result,))
    assert exporter.report(sent).status == 200
    command_id: str = command["id"]
    return command_id


def test_a_running_action_is_answered_202_with_its_location(exporter: RunningExporter) -> None:
    answer = exporter.act(action="empty_cache", target={"workload": "w2"}, wait_seconds=0.05)
    assert answer.status == 202
    where = answer.headers["location"]
    assert where == f"{ACTIONS}/{json.loads(answer.body)['id']}"
    assert exporter.document(where)["state"] == "queued"
    carry_out(exporter, 2, UUIDS[1])
    assert exporter.document(where)["state"] == "done"


def test_a_target_without_a_match_is_404_and_lists_the_processes(exporter: RunningExporter) -> None:
    detail = problem(exporter.act(action="empty_cache", target={"workload": "w1", "pid": 2}), 404)["detail"]
    assert "pid=2 workload=w1" in detail
    assert "pid=1 workload=w1" in detail
    assert "pid=2 workload=w2" in detail


def test_a_process_that_does_not_report_is_not_called_unknown(exporter: RunningExporter) -> None:
    exporter.provider.processes[UUIDS[0]] = (ProcessMemory(1, 100), ProcessMemory(4242, 100))
    eventually(lambda: 4242 in {row["pid"] for row in exporter.document("/api/v1/processes")["processes"]})
    detail = problem(exporter.act(action="empty_cache", target={"pid": [1, 4242]}), 404)["detail"]
    assert "4242" in detail
    assert "no such" not in detail
    rows = exporter.document("/api/v1/processes")["processes"]
    (command,) = [row["command"] for row in rows if row["pid"] == 4242]
    named = problem(exporter.act(action="empty_cache", target={"workload": command}), 404)["detail"]
    assert named.startswith(f"workload {command}: no report arrives")
    both = problem(exporter.act(action="empty_cache", target={"pid": [4242, 4243]}), 404)["detail"]
    assert "no such pid '4243'; known pids: 1, 2" in both
    assert exporter.document(ACTIONS)["actions"] == []


def test_an_idempotency_key_returns_the_same_action_and_conflicts_with_another_request(
    exporter: RunningExporter,
) -> None:
    request = {"action": "empty_cache", "target": {"pid": 1}, "wait_seconds": 0}
    first, second = (exporter.request("POST", ACTIONS, request, Idempotency_Key="k-1") for _ in range(2))
    assert (first.status, second.status) == (202, 202)
    assert json.loads(first.body)["id"] == json.loads(second.body)["id"]
    other = exporter.request("POST", ACTIONS, {**request, "target": {"pid": 2}}, Idempotency_Key="k-1")
    assert "k-1" in problem(other, 409)["detail"]
    assert len(exporter.document(ACTIONS)["actions"]) == 1
    problem(exporter.request("POST", ACTIONS, request, Idempotency_Key="x" * 256), 422)


def test_a_request_over_the_limit_is_429_with_a_retry_after() -> None:
    with running_exporter(action_process_limit=2) as exporter:
        exporter.report(report(1, devices=(sample(),)))
        answers = [exporter.act(action="empty_cache", target={"pid": 1}, wait_seconds=0) for _ in range(3)]
        assert [answer.status for answer in answers] == [202, 202, 429]
        assert 1 <= int(answers[2].headers["retry-after"]) <= 30
        assert "pid 1" in problem(answers[2], 429)["detail"]
