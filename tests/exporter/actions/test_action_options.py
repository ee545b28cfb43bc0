from __future__ import annotations

from typing import Any

import pytest

from gpumem_client.wire.protocol import MODES
from gpumem_exporter.actions.action_options import ACTIONS, MAX_DEADLINE_SECONDS, ActionRequest, Target, invalid_fields

EVERY_PROCESS = Target(all=True)


def request(**changes: Any) -> ActionRequest:
    return ActionRequest(**{"action": "empty_cache", "target": EVERY_PROCESS, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        *({"action": action} for action in ACTIONS if action not in ("set_memory_fraction", "terminate")),
        *({"mode": mode} for mode in MODES),
        {"mode": "step", "at_step": 1},
        {"group": True},
        {"action": "terminate", "mode": "auto", "force": True},
        {"action": "set_memory_fraction", "fraction": 1.0, "force": True},
        {"action": "terminate", "force": True},
        {"action": "terminate", "dry_run": True},
        {"action": "terminate", "target": Target(pid=7), "grace_seconds": 0.0},
        {"collect_garbage": True, "deadline_seconds": MAX_DEADLINE_SECONDS, "reason": "x" * 1000},
        {"target": Target(workload="", rank="")},
        {"target": Target(gpu=(0, "1"), user=("alice", 1001))},
        {"target": Target(pid="1@4026532007")},
    ],
)
def test_a_valid_request_has_no_invalid_field(changes: dict[str, Any]) -> None:
    assert invalid_fields(request(**changes)) == ()


@pytest.mark.parametrize(
    ("field", "message", "changes"),
    [
        ("action", f"'explode' is invalid: expected {', '.join(ACTIONS)}", {"action": "explode"}),
        ("mode", "'soon' is invalid: expected auto, now, step, idle", {"mode": "soon"}),
        ("mode", "'step' is invalid: expected now", {"action": "terminate", "mode": "step", "force": True}),
        ("mode", "'now' is invalid: expected step", {"group": True, "mode": "now"}),
        ("at_step", "5 is invalid: expected no value without mode step", {"at_step": 5}),
        ("at_step", "0 is invalid: expected an integer from 1", {"mode": "step", "at_step": 0}),
        ("fraction", "is missing: expected a number over 0 and at most 1", {"action": "set_memory_fraction"}),
        ("fraction", "0.5 is invalid: expected no value", {"fraction": 0.5}),
        ("grace_seconds", "5.0 is invalid: expected no value, because only terminate", {"grace_seconds": 5.0}),
        ("force", "expected true, because all: true terminates every process", {"action": "terminate"}),
        (
            "force",
            "set_memory_fraction, release_memory, resume_memory, profile accept",
            {"action": "reset_peak", "force": True},
        ),
        ("collect_garbage", "only empty_cache", {"action": "reset_peak", "collect_garbage": True}),
        ("deadline_seconds", "0.0 is invalid: expected a number of seconds over 0", {"deadline_seconds": 0.0}),
        ("deadline_seconds", "nan is invalid", {"deadline_seconds": float("nan")}),
        ("reason", "at most 1000 characters", {"reason": "x" * 1001}),
        ("target", "expected gpu, uuid, pid, workload, rank, user, orphans: true or all: true", {"target": Target()}),
        ("target.all", "no value beside pid", {"target": Target(all=True, pid=4711)}),
        ("target.gpu", "'' is invalid: expected 1 to 128 characters", {"target": Target(gpu="")}),
        ("target.workload", "expected 0 to 128 characters", {"target": Target(workload="x" * 257)}),
        ("target.pid", "'0' is invalid: expected an integer from 1", {"target": Target(pid=(7, 0))}),
        ("target.pid", "'٣' is invalid: expected an integer", {"target": Target(pid="٣")}),
        ("target.gpu", "1001 is invalid: expected at most 1000 values", {"target": Target(gpu=range(1001))}),
    ],
)
def test_an_invalid_field_is_named_with_its_value_and_what_is_accepted(
    field: str, message: str, changes: dict[str, Any]
) -> None:
    (invalid,) = invalid_fields(request(**changes))
    assert invalid.field == field
    assert message in invalid.message
    assert len(invalid.message) < 200


def test_a_target_is_at_most_16_kib() -> None:
    names = [f"{number:0100d}" for number in range(200)]
    (invalid,) = invalid_fields(request(target=Target(workload=names)))
    assert invalid.field == "target"
    assert not invalid_fields(request(target=Target(workload=names[:100])))


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
    assert Target(pid="1@4026532007").document() == {"pid": "1@4026532007"}
