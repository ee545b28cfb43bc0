"""Requests of actions: the body of the HTTP API, and the rules that every request follows."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from gpumem_client.wire.protocol import MODES
from gpumem_exporter.actions.action_options import ACTIONS, MAX_DEADLINE_SECONDS, ActionRequest, Target, invalid_fields
from gpumem_exporter.actions.action_routes import ActionBody
from gpumem_exporter.edge.problems import ProblemError


def request(**changes: Any) -> ActionRequest:
    return ActionRequest(**{"action": "empty_cache", "target": Target(all=True), **changes})


def body(**changes: Any) -> bytes:
    return json.dumps({"action": "empty_cache", "target": {"all": True}, **changes}).encode()


def test_a_body_with_every_field_is_read_unchanged() -> None:
    """A target takes a value or a list, and numbers where names are expected."""
    target = {"gpu": 7, "uuid": "MIG-1", "pid": 4711, "workload": ["a", "b"], "rank": [0, "1"], "user": 1001}
    values: dict[str, Any] = {
        "action": "empty_cache",
        "mode": "step",
        "at_step": 120,
        "collect_garbage": True,
        "deadline_seconds": 5,
        "dry_run": True,
        "reason": "because",
    }
    read = ActionBody.model_validate_json(body(**values, target=target, wait_seconds=0))
    assert read.wait_seconds == 0
    selected = Target(gpu="7", uuid="MIG-1", pid=4711, workload=("a", "b"), rank=("0", "1"), user="1001")
    assert read.request() == ActionRequest(**values, target=selected)


@pytest.mark.parametrize(
    ("location", "changes"),
    [
        (("target", "gpu"), {"target": {"gpu": True}}),
        (("target", "gpu"), {"target": {"gpu": [], "pid": 1}}),
        (("target", "workload"), {"target": {"workload": ["a", None]}}),
        (("deadline_seconds",), {"deadline_seconds": float("nan")}),
        (("wait_seconds",), {"wait_seconds": 61}),
        (("x0",), {f"x{number}": 1 for number in range(5000)}),
    ],
)
def test_a_field_that_cannot_be_read_is_reported_once(location: tuple[str, ...], changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        ActionBody.model_validate_json(body(**changes))
    assert [error["loc"] for error in caught.value.errors()] == [location]


def test_each_field_that_breaks_a_rule_is_reported() -> None:
    with pytest.raises(ProblemError) as caught:
        ActionBody.model_validate_json(body(action="explode", deadline_seconds=3601)).request()
    assert [error.field for error in caught.value.errors] == ["action", "deadline_seconds"]


def test_the_description_of_the_api_has_the_bounds_of_each_field() -> None:
    described = ActionBody.model_json_schema()["properties"]
    for field, bounds in {
        "mode": {"enum": ["auto", *MODES, None]},
        "at_step": {"minimum": 1, "maximum": 2**63 - 1},
        "fraction": {"exclusiveMinimum": 0, "maximum": 1},
        "deadline_seconds": {"exclusiveMinimum": 0, "maximum": 3600},
        "search_seconds": {"minimum": 0, "maximum": 10},
        "reason": {"maxLength": 1000},
    }.items():
        keywords = ("enum", "exclusiveMinimum", "minimum", "maximum", "maxLength")
        assert {name: described[field][name] for name in keywords if name in described[field]} == bounds, field


@pytest.mark.parametrize(
    "changes",
    [
        *({"action": action} for action in ACTIONS if action not in ("set_memory_fraction", "terminate")),
        *({"mode": mode} for mode in MODES),
        {"mode": "step", "at_step": 1},
        {"group": True},
        {"action": "set_memory_fraction", "fraction": 1.0, "force": True},
        {"action": "terminate", "mode": "auto", "force": True},
        {"action": "terminate", "dry_run": True},
        {"action": "terminate", "target": Target(pid=7), "grace_seconds": 0.0},
        {"collect_garbage": True, "deadline_seconds": MAX_DEADLINE_SECONDS, "reason": "x" * 1000},
        {"target": Target(workload="", rank="")},
        {"target": Target(pid="1@4026532007")},
    ],
)
def test_a_valid_request_has_no_invalid_field(changes: dict[str, Any]) -> None:
    assert invalid_fields(request(**changes)) == ()


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("action", {"action": "explode"}),
        ("mode", {"mode": "soon"}),
        ("mode", {"action": "terminate", "mode": "step", "force": True}),
        ("mode", {"group": True, "mode": "now"}),
        ("at_step", {"at_step": 5}),
        ("at_step", {"mode": "step", "at_step": 0}),
        ("fraction", {"action": "set_memory_fraction"}),
        ("fraction", {"fraction": 0.5}),
        ("grace_seconds", {"grace_seconds": 5.0}),
        ("force", {"action": "terminate"}),
        ("force", {"action": "reset_peak", "force": True}),
        ("collect_garbage", {"action": "reset_peak", "collect_garbage": True}),
        ("deadline_seconds", {"deadline_seconds": 0.0}),
        ("deadline_seconds", {"deadline_seconds": float("nan")}),
        ("reason", {"reason": "x" * 1001}),
        ("target", {"target": Target()}),
        ("target", {"target": Target(workload=[f"{number:0100d}" for number in range(200)])}),  # more than 16 KiB
        ("target.all", {"target": Target(all=True, pid=4711)}),
        ("target.gpu", {"target": Target(gpu="")}),
        ("target.gpu", {"target": Target(gpu=range(1001))}),
        ("target.workload", {"target": Target(workload="x" * 257)}),
        ("target.pid", {"target": Target(pid=(7, 0))}),
        ("target.pid", {"target": Target(pid="٣")}),
        ("target.pid", {"target": Target(pid="9" * 5000)}),  # longer than `int` reads
    ],
)
def test_an_invalid_field_is_named_in_a_short_message(field: str, changes: dict[str, Any]) -> None:
    """The golden file of mistakes has the messages."""
    (invalid,) = invalid_fields(request(**changes))
    assert invalid.field == field
    assert len(invalid.message) < 200


def test_the_exporter_chooses_mode_and_deadline_unless_the_request_has_them() -> None:
    for given, mode in (
        ({}, "auto"),
        ({"group": True}, "step"),
        ({"mode": "idle"}, "idle"),
        ({"action": "terminate"}, "now"),
    ):
        assert request(**given).mode == mode
    assert [request(**given).free_deadline for given in ({}, {"deadline_seconds": 30.0})] == [True, False]


def test_a_target_is_the_same_whether_a_value_or_a_list_of_numbers_or_texts_was_given() -> None:
    assert Target(gpu=7, pid=(4711, "4711")) == Target(gpu=["7"], pid="4711")
    several = Target(gpu=("0", 1), pid=4711, workload=("a", "b"))
    assert several.document() == {"gpu": ["0", "1"], "pid": 4711, "workload": ["a", "b"]}
    assert Target(**several.document()) == several
    assert several.describe() == "gpu=0,1 pid=4711 workload=a,b"
