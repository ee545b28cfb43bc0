from __future__ import annotations

import json
import re
from typing import Any

import pytest

from gpumem_exporter.actions.caller import Caller, CallerKind, Rights
from gpumem_exporter.actions.declarations import ActionRequest, Target
from gpumem_exporter.server.api import alerts
from gpumem_exporter.server.api.alerts import (
    ALERT_KEYS,
    MAX_ALERTS,
    AlertBody,
    AlertReceiver,
    AlertRequestError,
    read_alerts,
    requested_action,
)
from gpumem_exporter.server.http.problems import ProblemError
from tests.support.dispatching import Bench
from tests.support.paths import REPOSITORY

FIRING: dict[str, Any] = {
    "status": "firing",
    "labels": {"alertname": "Hoarded", "gpu": "0"},
    "startsAt": "2026-01-02T03:04:05.678Z",
    "fingerprint": "0123456789abcdef",
}
MESSAGE: dict[str, Any] = {"version": "4", "alerts": [FIRING]}


def alert(labels: dict[str, str] | None = None, **annotations: str) -> AlertBody:
    changed = {**FIRING, "labels": {**FIRING["labels"], **(labels or {})}, "annotations": annotations}
    (read,) = read_alerts(json.dumps({**MESSAGE, "alerts": [changed]}).encode()).alerts
    return read


def request(labels: dict[str, str] | None = None, **annotations: str) -> ActionRequest:
    wanted = requested_action(alert(labels, **annotations))
    assert wanted is not None
    return wanted.request


def test_fields_of_a_later_alertmanager_are_ignored() -> None:
    later = {**MESSAGE, "new": 1, "alerts": [{**FIRING, "newer": [], "labels": {}}]}
    assert read_alerts(json.dumps(later).encode()).alerts[0].name == FIRING["fingerprint"]


@pytest.mark.parametrize(
    ("spoil", "field"),
    [
        (lambda m: m.update(version=4), "version"),
        (lambda m: m.update(alerts=[FIRING] * (MAX_ALERTS + 1)), "alerts"),
        (lambda m: m["alerts"][0].update(status="pending"), "alerts.0.status"),
        (lambda m: m["alerts"][0].update(startsAt="x" * 65), "alerts.0.startsAt"),
        (lambda m: m["alerts"][0].update(fingerprint="a b"), "alerts.0.fingerprint"),
    ],
)
def test_an_invalid_message_is_refused_with_the_invalid_field(spoil: Any, field: str) -> None:
    message = json.loads(json.dumps(MESSAGE))
    spoil(message)
    with pytest.raises(ProblemError) as refused:
        read_alerts(json.dumps(message).encode())
    assert (refused.value.status, refused.value.errors[0].field) == (422, field)


def test_an_alert_without_an_action_requests_none() -> None:
    assert requested_action(alert()) is None
    assert requested_action(alert({"gpumem_action": " "}, gpumem_target_pid="4")) is None


def test_labels_and_annotations_request_an_action() -> None:
    requested = request(
        {"gpumem_action": "empty_cache", "gpumem_target_workload": "train"},
        gpumem_mode="step",
        gpumem_target_pid="4711",
        gpumem_target_gpu="0",
        gpumem_target_uuid="GPU-1",
        gpumem_target_rank="3",
        gpumem_target_user="ada",
        gpumem_collect_garbage="true",
        gpumem_deadline_seconds="60",
        gpumem_dry_run="true",
        gpumem_reason="slack is 5 GiB",
    )
    assert requested == ActionRequest(
        "empty_cache",
        Target(gpu="0", uuid="GPU-1", pid=4711, workload="train", rank="3", user="ada"),
        mode="step",
        collect_garbage=True,
        deadline_seconds=60.0,
        dry_run=True,
        reason=requested.reason,
    )
    assert requested.reason.endswith(": slack is 5 GiB")
    assert "Hoarded (0123456789abcdef)" in requested.reason


def test_an_alert_can_request_a_group_a_fraction_and_every_process() -> None:
    grouped = request(gpumem_action="empty_cache", gpumem_group="true", gpumem_target_workload="train")
    assert (grouped.group, grouped.mode) == (True, "step")
    capped = request(
        gpumem_action="set_memory_fraction", gpumem_fraction="0.5", gpumem_force="true", gpumem_target_all="true"
    )
    assert (capped.fraction, capped.force, capped.target) == (0.5, True, Target(all=True))
    assert request(gpumem_action="snapshot", gpumem_target_pid="1@4026532007").target.pid == ("1@4026532007",)


def test_an_empty_string_and_a_repeated_value_are_ignored() -> None:
    repeated = {"gpumem_action": "empty_cache"}
    requested = request(repeated, **repeated, gpumem_target_pid="7", gpumem_target_rank="", gpumem_mode=" ")
    assert (requested.target, requested.mode) == (Target(pid=7), "now")


@pytest.mark.parametrize(
    ("annotations", "named"),
    [
        ({}, ("gpumem_target:",)),
        ({"gpumem_target_workloda": "a"}, ("gpumem_target_workloda", "gpumem_target_workload,")),
        ({"gpumem_target_pid": "many"}, ("gpumem_target_pid:", "integer")),
        ({"gpumem_target_all": "yes"}, ("gpumem_target_all: 'yes'", "true", "false")),
        ({"gpumem_target_pid": "7", "gpumem_mode": "now", "gpumem_group": "true"}, ("gpumem_mode:", "group", "step")),
        ({"gpumem_target_pid": "7", "gpumem_deadline_seconds": "soon"}, ("gpumem_deadline_seconds: 'soon'",)),
        ({"gpumem_target_pid": "7", "gpumem_cooldown_seconds": "inf"}, ("gpumem_cooldown_seconds: 'inf'",)),
        ({"gpumem_target_pid": "7", "gpumem_action": "snapshot"}, ("gpumem_action:", "label", "annotation")),
        ({"gpumem_target_pid": "7", "gpumem_wait_seconds": "3"}, ("gpumem_wait_seconds", "gpumem_target_pid,")),
    ],
)
def test_an_invalid_request_is_refused_with_the_name_of_the_label(
    annotations: dict[str, str], named: tuple[str, ...]
) -> None:
    with pytest.raises(AlertRequestError) as refused:
        requested_action(alert({"gpumem_action": "empty_cache"}, **annotations))
    message = str(refused.value)
    assert [part for part in named if part not in message] == [], message


def test_the_least_recently_seen_alert_is_forgotten_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alerts, "MAX_REMEMBERED", 2)
    bench = Bench()
    receiver = AlertReceiver(bench.dispatcher, lambda: bench.now, lambda: 0.0)
    root = Caller(CallerKind.UNIX, Rights.ALL, uid=0)

    def outcome_of(fingerprint: str) -> str:
        labels = {"gpumem_action": "reset_peak", "gpumem_target_pid": "1"}
        sent = {"status": "firing", "labels": labels, "startsAt": "monday", "fingerprint": fingerprint}
        return receiver.take(AlertBody.model_validate(sent), root)["outcome"]

    outcomes = [outcome_of(each) for each in ("a", "b", "a", "c", "a", "b")]
    assert outcomes == ["acted", "acted", "repeated", "acted", "repeated", "acted"]


def test_the_example_has_every_key() -> None:
    text = (REPOSITORY / "deploy" / "alertmanager" / "gpumem-receiver.example.yml").read_text()
    shown = set(re.findall(r"gpumem_[a-z_]+", text)) | {
        f"gpumem_target{part}" for part in re.findall(r" (_[a-z]+)\b", text)
    }
    assert shown >= ALERT_KEYS
