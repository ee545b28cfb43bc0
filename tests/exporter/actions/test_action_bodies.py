from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from gpumem_exporter.actions.action_options import ActionRequest, Target
from gpumem_exporter.actions.action_routes import ActionBody
from gpumem_exporter.edge.problems import ProblemError


def body(**changes: Any) -> bytes:
    return json.dumps({"action": "empty_cache", "target": {"all": True}, **changes}).encode()


def test_a_request_with_every_field_is_read_unchanged() -> None:
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
        (("target", "gpu"), {"target": {"gpu": -1}}),
        (("target", "gpu"), {"target": {"gpu": [], "pid": 1}}),
        (("target", "workload"), {"target": {"workload": ["a", None]}}),
        (("group",), {"group": "yes"}),
        (("deadline_seconds",), {"deadline_seconds": float("nan")}),
        (("wait_seconds",), {"wait_seconds": 61}),
        (("dryrun",), {"dryrun": True}),
    ],
)
def test_a_field_of_the_wrong_type_is_reported_once(location: tuple[str, ...], changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        ActionBody.model_validate_json(body(**changes))
    assert [error["loc"] for error in caught.value.errors()] == [location]


def test_each_field_that_breaks_a_rule_of_requests_is_reported() -> None:
    with pytest.raises(ProblemError) as caught:
        ActionBody.model_validate_json(body(action="explode", deadline_seconds=3601)).request()
    assert (caught.value.status, [error.field for error in caught.value.errors]) == (
        422,
        ["action", "deadline_seconds"],
    )


def test_a_body_with_thousands_of_unknown_fields_has_one_error() -> None:
    with pytest.raises(ValidationError) as caught:
        ActionBody.model_validate_json(body(**{f"x{number}": 1 for number in range(5000)}))
    (error,) = caught.value.errors()
    assert "5002" in error["msg"]
