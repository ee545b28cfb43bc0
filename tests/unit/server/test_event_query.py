from __future__ import annotations

from typing import Any

import pytest

from gpumem_exporter.events import Event, Page, Query
from gpumem_exporter.server.api.event_query import events_document, read_query
from gpumem_exporter.server.http.problems import ProblemError


def test_nothing_asked_is_the_last_hundred() -> None:
    assert read_query([]) == Query(limit=100)


def test_each_parameter_is_read() -> None:
    asked = {"after": "7", "since": "12.5", "type": "oom,device_lost,oom", "pid": "4711", "limit": "1000"}
    assert read_query(asked.items()) == Query(7, 12.5, ("oom", "device_lost"), "4711", 1000)
    assert read_query([("pid", "1@4026532007")]).pid == "1@4026532007"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0.0),
        ("1700000000.25", 1700000000.25),
        ("1.7e9", 1.7e9),
        ("2023-11-14T22:13:20Z", 1.7e9),
        ("2023-11-14t22:13:20.5z", 1.7e9 + 0.5),
        ("2023-11-14T23:43:20.123456789+01:30", 1.7e9 + 0.123456789),
        ("2023-11-14T23:43:20 01:30", 1.7e9),
        ("2023-11-14T14:13:20-08:00", 1.7e9),
    ],
)
def test_a_moment_is_unix_seconds_or_rfc_3339(text: str, seconds: float) -> None:
    assert read_query([("since", text)]).since_unix_seconds == seconds


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            ("since", value)
            for value in ("", "now", "-1", "nan", "inf", "1e300", "١", "2023-11-14", "2023-11-14T22:13:20")
        ),
        *(("since", value) for value in ("2023-13-14T22:13:20Z", "2023-11-14T25:13:20Z", "2023-11-14T22:13:20+99:00")),
        *(("after", value) for value in ("", "-1", "1.0", "x", "9223372036854775808", "²", "9" * 5000)),
        *(("limit", value) for value in ("0", "1001", "")),
        *(("pid", value) for value in ("", "-1", "self", "1@", "1@x", "1 ")),
        *(("type", value) for value in ("", "ooms", "oom,", "oom,nothing")),
        ("typ", "oom"),
    ],
)
def test_a_parameter_that_is_wrong_is_named(name: str, value: str) -> None:
    with pytest.raises(ProblemError) as caught:
        read_query([("limit", "5"), (name, value)] if name != "limit" else [(name, value)])
    assert caught.value.status == 422
    assert [error.field for error in caught.value.errors] == [name]
    assert caught.value.detail.startswith(f"{name}: ")


def test_a_parameter_that_is_given_twice_is_named() -> None:
    with pytest.raises(ProblemError) as caught:
        read_query([("pid", "1"), ("pid", "2")])
    assert [error.field for error in caught.value.errors] == ["pid"]


def test_an_event_s_time_is_there_for_people_and_exactly() -> None:
    page = Page((Event("oom", 1.7e9 + 0.25, pid=7, detail={"number": 1}, id=9),), 9, more=True)
    document: dict[str, Any] = events_document(page)
    (event,) = document["events"]
    assert (document["next_after"], document["more"]) == (9, True)
    assert (event["time"], event["unix_seconds"]) == ("2023-11-14T22:13:20.250Z", 1700000000.25)
    assert (event["id"], event["type"], event["pid"], event["gpu"], event["detail"]) == (
        9,
        "oom",
        7,
        None,
        {"number": 1},
    )
    assert "subject" not in event
