"""The wire protocol between different versions."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gpumem_client.wire.errors import WireError
from gpumem_client.wire.protocol import Command, DeviceSample, ProcessIdentity, Reply, Report, reply_from_wire, to_wire
from gpumem_exporter.reports.report_schema import ReportReader

REPLY = Reply(
    commands=(Command("a", "empty_cache", 29.5, ("GPU-1",), True), Command("b", "reset_peak", 1.0)),
    report_interval_seconds=2.5,
)


def test_a_reply_is_unchanged_after_writing_and_reading() -> None:
    assert reply_from_wire(json.loads(json.dumps(to_wire(REPLY)))) == REPLY


def test_unknown_fields_of_a_newer_exporter_are_ignored() -> None:
    document = to_wire(REPLY)
    document["novelty"] = {"x": 1}
    document["commands"][0]["color"] = "red"
    assert reply_from_wire(document) == REPLY


def test_missing_fields_of_an_older_exporter_have_defaults() -> None:
    assert reply_from_wire({}) == Reply()
    assert reply_from_wire({"commands": [{"id": "a", "action": "empty_cache", "deadline_seconds": 3}]}) == Reply(
        commands=(Command("a", "empty_cache", 3.0),)
    )


@pytest.mark.parametrize(
    ("document", "field"),
    [
        ([], ""),
        ({"commands": {}}, "commands"),
        ({"commands": [{"action": "a", "deadline_seconds": 1}]}, "commands.0.id"),
        ({"commands": [{"id": "a", "action": "b", "deadline_seconds": True}]}, "commands.0.deadline_seconds"),
        ({"commands": [{"id": "a", "action": "b", "deadline_seconds": 1, "uuids": "GPU"}]}, "commands.0.uuids"),
        ({"report_interval_seconds": float("nan")}, "report_interval_seconds"),
    ],
)
def test_an_invalid_reply_names_the_field(document: Any, field: str) -> None:
    with pytest.raises(WireError) as caught:
        reply_from_wire(document)
    assert caught.value.field == field


def test_unknown_and_empty_values_are_not_sent_but_zero_is() -> None:
    sent = to_wire(Report(ProcessIdentity(1, 2, 3, "s", 4.0), 1, devices=(DeviceSample("GPU-1", allocated_bytes=0),)))
    assert sent["devices"] == [{"uuid": "GPU-1", "allocated_bytes": 0}]
    assert "step" not in sent
    assert "workload" not in sent["process"]


@pytest.mark.parametrize("code", [{}, {"reason_code": "not_idle"}, {"reason_code": "of_a_later_version"}])
def test_a_result_has_a_reason_code_that_older_reporters_do_not_send(code: dict[str, str]) -> None:
    document = to_wire(Report(ProcessIdentity(1, 2, 3, "s", 4.0), 1))
    document["results"] = [{"id": "a", "outcome": "expired", "reason": "why", **code}]
    (result,) = ReportReader().read(json.dumps(document).encode()).results
    assert result.reason_code == code.get("reason_code")
