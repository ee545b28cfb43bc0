from __future__ import annotations

import json
from typing import Any

import pytest

from gpumem_exporter.actions.model import Action, ActionResult
from gpumem_exporter.actions.request import ActionRequest, Target
from gpumem_exporter.server.api.action_schema import action_document, read_action
from gpumem_exporter.server.http.problems import ProblemError


def body(**changes: Any) -> bytes:
    return json.dumps({"action": "empty_cache", "target": {"all": True}, **changes}).encode()


def test_a_request_needs_only_its_action_and_its_target() -> None:
    read = read_action(body())
    assert read.wait_seconds == 10.0
    assert read.request() == ActionRequest(action="empty_cache", target=Target(all=True))


def test_a_full_request_arrives_whole() -> None:
    target = {"gpu": "0:1", "uuid": "MIG-1", "pid": 4711, "workload": "w", "rank": "0"}
    read = read_action(
        body(
            action="empty_cache",
            target=target,
            mode="step",
            group=True,
            at_step=120,
            collect_garbage=True,
            deadline_seconds=5,
            wait_seconds=0,
            dry_run=True,
            reason="because",
        )
    )
    assert read.wait_seconds == 0
    assert read.request() == ActionRequest(
        action="empty_cache",
        target=Target(**target),
        mode="step",
        group=True,
        at_step=120,
        collect_garbage=True,
        deadline_seconds=5.0,
        dry_run=True,
        reason="because",
    )


def test_a_group_acts_at_a_step_and_everything_else_at_once_unless_it_says_otherwise() -> None:
    assert read_action(body()).request().mode == "now"
    assert read_action(body(group=True)).request().mode == "step"
    assert read_action(body(mode="idle")).request().mode == "idle"
    fraction = read_action(body(action="set_memory_fraction", fraction=0.5, force=True)).request()
    assert (fraction.fraction, fraction.force) == (0.5, True)


@pytest.mark.parametrize(
    ("field", "said", "changes"),
    [
        ("action", "empty_cache, collect_garbage, reset_peak", {"action": "explode"}),
        ("mode", "now", {"action": "terminate", "mode": "step"}),
        ("mode", "step", {"group": True, "mode": "now"}),
        ("at_step", "group", {"at_step": 5}),
        ("fraction", "fraction", {"action": "set_memory_fraction"}),
        ("fraction", "set_memory_fraction", {"fraction": 0.5}),
        ("fraction", "1", {"action": "set_memory_fraction", "fraction": 1.5}),
        ("force", "set_memory_fraction", {"force": True}),
        ("collect_garbage", "empty_cache", {"action": "reset_peak", "collect_garbage": True}),
        ("action", "string", {"action": 1}),
        ("target", "gpu, uuid, pid, workload", {"target": {}}),
        ("target", "gpu, uuid, pid, workload", {"target": {"all": False}}),
        ("target", "gpu, uuid, pid, workload", {"target": {"gpu": None}}),
        ("target", "object", {"target": "all"}),
        ("target.gpuu", "gpu, uuid, pid, workload, rank, all", {"target": {"gpuu": "0"}}),
        ("target.gpu", "string", {"target": {"gpu": 0}}),
        ("target.gpu", "1", {"target": {"gpu": ""}}),
        ("target.uuid", "1", {"target": {"uuid": ""}}),
        ("target.pid", "integer", {"target": {"pid": "1"}}),
        ("target.pid", "1", {"target": {"pid": 0}}),
        ("target.workload", "256", {"target": {"workload": "x" * 10_000}}),
        ("mode", "now, step, idle", {"mode": "soon"}),
        ("group", "boolean", {"group": "yes"}),
        ("deadline_seconds", "0", {"deadline_seconds": 0}),
        ("deadline_seconds", "3600", {"deadline_seconds": 3601}),
        ("deadline_seconds", "finite", {"deadline_seconds": float("nan")}),
        ("wait_seconds", "60", {"wait_seconds": 61}),
        ("wait_seconds", "0", {"wait_seconds": -1}),
        ("dry_run", "boolean", {"dry_run": "yes"}),
        ("reason", "1000", {"reason": "x" * 1001}),
        ("dryrun", "dry_run", {"dryrun": True}),
    ],
)
def test_a_wrong_request_is_refused_by_the_name_of_its_field(field: str, said: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ProblemError) as caught:
        read_action(body(**changes))
    assert caught.value.status == 422
    assert [error.field for error in caught.value.errors] == [field]
    assert said in caught.value.detail


@pytest.mark.parametrize("raw", [b"", b"[]", b"{", b"null", b"{}"])
def test_what_is_no_request_is_refused(raw: bytes) -> None:
    with pytest.raises(ProblemError) as caught:
        read_action(raw)
    assert caught.value.status == 422


def test_an_action_reads_as_the_contract_writes_it() -> None:
    result = ActionResult(pid=7, workload="w", rank="0", gpu="0", uuid="GPU-0", outcome="done", freed_bytes=5)
    action = Action(
        id="abc",
        action="empty_cache",
        state="done",
        requested_by="tcp:127.0.0.1",
        created_unix_seconds=1_700_000_000.5,
        target=Target(gpu="0"),
        results=(result,),
    )
    document = action_document(action)
    assert document["created"] == "2023-11-14T22:13:20.500Z"
    assert document["target"] == {"gpu": "0"}
    assert document["freed_bytes"] == 5
    assert document["results"][0]["reserved_before_bytes"] is None
    contract = {"id", "action", "state", "requested_by", "created", "results", "freed_bytes"}
    assert contract <= set(document)
    of_a_result = {"pid", "workload", "rank", "gpu", "uuid", "outcome", "reason", "reserved_before_bytes"}
    of_a_result |= {"reserved_after_bytes", "freed_bytes", "device_free_before_bytes", "device_free_after_bytes"}
    assert of_a_result | {"duration_seconds"} <= set(document["results"][0])
