from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from gpumem_exporter.core.caller import Caller, CallerKind, Rights
from gpumem_exporter.core.event import Event, Query
from gpumem_exporter.features.events.event_routes import (
    EventParameters,
    events_for_caller,
    one_event_document,
)


def query(**given: Any) -> Query:
    return EventParameters.model_validate(given).query()


def test_each_parameter_becomes_part_of_the_query() -> None:
    given = query(
        after="7",
        since="12.5",
        type=["oom,device_lost", "action"],
        pid="4711",
        job="llm~1",
        device="GPU-1",
        limit="1000",
    )
    assert given == Query(7, 12.5, ("oom", "device_lost", "action"), "4711", job="llm~1", device="GPU-1", limit=1000)
    assert query(pid="1@4026532007").pid == "1@4026532007"
    assert query(fold="1", limit="40").limit == 1000, "the last folded events come from the last thousand"
    assert query(fold="1", limit="40", after="7").limit == 40


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1700000000.25", 1700000000.25),
        ("2023-11-14t22:13:20.5z", 1.7e9 + 0.5),
        ("2023-11-14T23:43:20.123456+01:30", 1.7e9 + 0.123456),
        ("2023-11-14T23:43:20 01:30", 1.7e9),
        ("2023-11-14T14:13:20-08:00", 1.7e9),
    ],
)
def test_since_is_unix_seconds_or_rfc_3339(text: str, seconds: float) -> None:
    assert query(since=text).since_unix_seconds == pytest.approx(seconds, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("since", value) for value in ("", "nan", "1e300", "2023-11-14T22:13:20", "2023-11-14T22:13:20+99:00")),
        *(("after", value) for value in ("", "-1", "9223372036854775808", "9" * 5000)),
        *(("limit", value) for value in ("0", "1001")),
        *(("type", [value]) for value in ("", "oom,", "oom,nothing", "action_asked")),
        *((name, "") for name in ("job", "device", "pid", "fold")),
        ("typ", "oom"),
    ],
)
def test_an_invalid_parameter_is_named(name: str, value: object) -> None:
    with pytest.raises(ValidationError) as caught:
        query(**{name: value})
    assert [error["loc"][0] for error in caught.value.errors()] == [name]


def test_identities_beside_an_error_are_hidden_like_those_of_its_process() -> None:
    job = {"job": "pid~9", "workload": None, "command": "python secret.py", "user": "eve", "pid": 9, "used_bytes": 5}
    device = {"total_bytes": 10, "jobs": [job]}
    error = Event("oom", 1.7e9, pid=7, detail={"number": 1, "device": device, "allocator": None}, id=9)
    ada = Caller(CallerKind.LOOPBACK, Rights.OWN, uid=1000)
    (shown,) = events_for_caller([error], ada, hide_identities=False)
    assert shown == error
    (hidden,) = events_for_caller([error], ada, hide_identities=True)
    assert hidden.detail["device"] == {"total_bytes": 10, "jobs": [{**job, "command": None, "user": None}]}
    assert "secret" not in str(one_event_document(hidden, [hidden]))
    unknown = replace(error, detail={**error.detail, "device": {"total_bytes": 10}})
    (hidden,) = events_for_caller([unknown], ada, hide_identities=True)
    assert hidden.detail["device"] == {"total_bytes": 10}, "no list of jobs is not an empty list"


def test_the_user_of_an_ended_process_is_hidden_as_a_name_and_as_a_number() -> None:
    detail = {"reason": "it exited", "user": "eve", "uid": 1002, "slurm_job_id": "7", "ray_job_id": "01"}
    ended = Event("process_ended", 1.7e9, pid=7, detail=detail, id=9)
    ada = Caller(CallerKind.LOOPBACK, Rights.OWN, uid=1000)
    (hidden,) = events_for_caller([ended], ada, hide_identities=True)
    assert hidden.detail == {**detail, "user": None, "uid": None, "slurm_job_id": None}
