"""The parameters of a query for events, and what people read: titles, texts, short jobs as one entry, lines."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from gpumem_exporter.cli.render.columns import event_line
from gpumem_exporter.core.caller import Caller, CallerKind, Rights
from gpumem_exporter.core.event import EVENT_TYPES, Event, Query
from gpumem_exporter.features.events.event_entries import FOLD_SECONDS, EventDocument, event_document, fold
from gpumem_exporter.features.events.event_routes import EventParameters, events_for_caller, one_event_document
from tests.support.builders.live_documents import GIB
from tests.support.builders.live_documents import event as listed_event
from tests.support.truth.golden import assert_golden

ADA = Caller(CallerKind.LOOPBACK, Rights.OWN, uid=1000)
_NOON = time.mktime((2026, 3, 4, 12, 0, 0, 0, 0, -1))
OOM = {
    "requested_bytes": 2 * GIB,
    "device_free_bytes": GIB,
    "limit_bytes": 40 * GIB,
    "allocator": {"reserved_bytes": 30 * GIB, "fragmented_bytes": 0},
}
ACTION = {
    "action": "empty_cache",
    "requested_by": "unix:uid=1001",
    "state": "done",
    "freed_bytes": 3 * GIB,
    "reason": "make room",
    "results": [{"pid": 7, "workload": "llm"}],
}


def event(type_: str, seconds: float = 0.0, **changes: Any) -> Event:
    values: dict[str, Any] = {"gpu": "3", "uuid": "GPU-3", "pid": 7, "workload": "llm", **changes}
    return Event(type_, 1e9 + seconds, **values)


def process(pid: int, seconds: float, type_: str, **changes: Any) -> Event:
    values: dict[str, Any] = {
        "pid": pid,
        "owner": "uid:1001",
        "subject": f"process:{pid}",
        "detail": {"reason": "it exited"},
    }
    return event(type_, seconds, **{**values, **changes})


def runs(count: int, every_seconds: float = 60.0, **changes: Any) -> list[Event]:
    """Return the starts and ends of processes that run one after the other."""
    return [
        process(number, number * every_seconds + after, type_, **changes)
        for number in range(count)
        for after, type_ in ((0.0, "process_started"), (5.0, "process_ended"))
    ]


def shown(*events: Event) -> list[EventDocument]:
    return [event_document(entry) for entry in fold(events)]


@pytest.mark.parametrize(
    ("detail", "parts"),
    [
        ({"allocator": {"reserved_bytes": 30 * GIB, "fragmented_bytes": 1}}, ("GPU 3", "2.0 GiB", "1.0 GiB")),
        ({"device_free_bytes": 9 * GIB, "limit_bytes": 31 * GIB}, ("2.0 GiB", "30.0 GiB of its limit of 31.0 GiB")),
        (
            {"allocator": {"reserved_bytes": 30 * GIB, "fragmented_bytes": GIB}},
            ("1.0 GiB was free", "1.0 GiB fragmented"),
        ),
    ],
)
def test_an_error_names_what_was_free_and_fragments_that_would_have_been_enough(
    detail: dict[str, Any], parts: tuple[str, ...]
) -> None:
    (entry,) = shown(event("oom", detail={**OOM, **detail}, rank="2"))
    assert (entry["title"], entry["severity"]) == ("out of memory", "warning")
    assert [part for part in ("llm rank 2", *parts) if part not in entry["text"]] == []
    assert ("fragmented" in entry["text"]) == any("fragmented" in part for part in parts)


@pytest.mark.parametrize(
    ("of", "severity", "text"),
    [
        (event("device_lost", detail={"error": "fell off"}), "critical", "GPU 3 does not answer: fell off"),
        (event("device_returned"), "info", "GPU 3 answers again"),
        (event("action", detail={**ACTION, "state": "expired"}), "info", "llm: expired, freed 3.0 GiB, by uid 1001"),
        (
            event("policy_stopped", detail={"rule": "hoard", "reason": "in vain"}),
            "warning",
            "hoard: in vain",
        ),
    ],
)
def test_an_event_has_a_severity_and_a_text(of: Event, severity: str, text: str) -> None:
    (entry,) = shown(of)
    assert (entry["severity"], entry["text"].partition(" (")[0]) == (severity, text)


def test_a_clear_of_several_processes_names_their_workload_once() -> None:
    results = [{"pid": pid, "workload": "llm"} for pid in (7, 7, 8)]
    (one,) = shown(event("action", pid=None, detail={**ACTION, "results": results}))
    assert one["text"].startswith("llm (2 processes):")
    results[0] = {"pid": 9, "workload": "other"}
    several = event("action", pid=None, workload=None, detail={**ACTION, "results": results})
    assert shown(several)[0]["text"].startswith("3 processes:")


@pytest.mark.parametrize("type_", [*EVENT_TYPES, "of_tomorrow"])
@pytest.mark.parametrize("detail", [{}, {"results": None, "allocator": 7, "requested_bytes": "x"}])
def test_an_event_of_another_version_has_a_title(type_: str, detail: dict[str, Any]) -> None:
    (entry,) = shown(event(type_, detail=detail))
    assert entry["title"]
    assert isinstance(entry["text"], str)


def test_short_jobs_are_one_entry_at_their_last_end() -> None:
    lost = event("device_lost", 100.0, detail={"error": ""})
    (first, ran) = shown(*sorted([*runs(14), lost], key=lambda each: each.time_unix_seconds))
    assert (first["type"], first["folded"]) == ("device_lost", None)
    assert (ran["title"], ran["unix_seconds"]) == ("ran", 1e9 + 13 * 60 + 5)
    assert ran["folded"] == {"starts": 14, "ends": 14, "errors": 0, "first_unix_seconds": 1e9}
    assert (ran["workload"], ran["gpu"], ran["pid"]) == ("llm", "3", None)
    assert re.search(r"llm\b.*\b14\b", ran["text"])
    assert shown(*runs(1))[0]["text"] == "llm (pid 0)"
    assert re.findall(r"\d+", shown(*runs(3)[:-1])[0]["text"]) == ["3", "2"], "one still runs"


@pytest.mark.parametrize(
    "second",
    [
        {"workload": "other"},
        {"owner": "uid:1002"},
        {"seconds": 5 + FOLD_SECONDS + 1},
    ],
    ids=["workload", "user", "later"],
)
def test_other_jobs_and_later_runs_are_entries_of_their_own(second: dict[str, Any]) -> None:
    later = process(99, second.pop("seconds", 30.0), "process_started", **second)
    assert len(fold([*runs(1), later])) == 2


def test_an_out_of_memory_error_of_the_job_ends_its_entry() -> None:
    error = event("oom", 30.0, owner="uid:1001", detail=OOM)
    assert [each["title"] for each in shown(*runs(1), error, *runs(2)[2:])] == ["ran", "out of memory", "ran"]
    other = event("oom", 30.0, owner="uid:1002", detail=OOM)
    assert [each["title"] for each in shown(*runs(1), other, *runs(2)[2:])] == ["out of memory", "ran"]


def test_processes_without_a_workload_are_one_entry_if_they_have_one_command() -> None:
    def run(pid: int, command: str | None) -> list[Event]:
        values: dict[str, Any] = {"workload": "", "subject": f"process:{pid}"}
        end = {"command": command and f"/usr/bin/{command}", "reason": "it exited"}
        return [
            process(pid, pid, "process_started", detail={"command": command}, **values),
            process(pid, pid + 0.5, "process_ended", detail=end, **values),
        ]

    evals = [each for pid in range(3) for each in run(pid, "eval.py")]
    assert [len(each) for each in fold([*evals, *run(9, "train.py")])] == [6, 2]
    hidden = [each for pid in range(3) for each in run(pid, None)]
    assert [len(each) for each in fold(hidden)] == [2, 2, 2]


def test_errors_of_a_job_on_a_device_are_one_entry_whatever_restarts_between() -> None:
    loop = [
        each
        for number in range(20)
        for each in (
            process(number, 40.0 * number, "process_started"),
            event("oom", 40.0 * number + 20, pid=number, owner="uid:1001", detail=OOM),
            process(number, 40.0 * number + 21, "process_ended"),
        )
    ]
    other_device = event("oom", 790.0, owner="uid:1001", uuid="GPU-4", detail=OOM)
    entries = fold([*loop, other_device])
    titles = ["started", "out of memory", "ran", "out of memory"]
    assert [(event_document(each)["title"], len(each)) for each in entries] == list(
        zip(titles, (1, 20, 39, 1), strict=True)
    )
    errors = event_document(entries[1])
    assert errors["folded"] == {"starts": 0, "ends": 0, "errors": 20, "first_unix_seconds": 1e9 + 20}
    assert (errors["pid"], errors["unix_seconds"]) == (None, 1e9 + 780)
    assert re.search(r"\b20 times", errors["text"])
    alone = [event("oom", seconds, workload="", detail=OOM) for seconds in (0.0, 5.0, 5.0 + FOLD_SECONDS + 1)]
    assert [len(each) for each in fold(alone)] == [2, 1]


def test_an_event_of_another_day_has_its_date() -> None:
    assert event_line(listed_event(2, "b", _NOON - 86400), _NOON, 60).plain.split() == ["03-03", "12:00:00", "b"]


def test_text_of_an_event_cannot_control_the_terminal() -> None:
    hostile = "\x1b[2J\x1b]0;x\x07\r\n\u202e[red]x[/red]\x9b"
    texts = dict.fromkeys(("error", "reason", "action", "state", "requested_by", "rule"), hostile)
    detail = {**OOM, **texts, "freed_bytes": 0, "results": []}
    identity = dict.fromkeys(("gpu", "uuid", "workload", "rank", "pid"), hostile)
    types = ("oom", "device_lost", "process_ended", "action", hostile)
    listed = [listed_event(number, type_, _NOON, **identity, detail=detail) for number, type_ in enumerate(types)]
    assert all(event_line(each, _NOON, 100).plain.isprintable() for each in listed)


def _day() -> list[Event]:
    """A day of a node: the ranks of a job, short jobs, an out-of-memory error, a lost device, an action, a policy."""
    midnight = _NOON - 12 * 3600
    job: dict[str, Any] = {"workload": "llm-pretrain", "owner": "uid:1001"}
    of_eval: dict[str, Any] = {"workload": "nightly-eval", "owner": "uid:1002", "detail": {"reason": "it exited"}}
    of_indexer: dict[str, Any] = {"workload": "rag-indexer", "owner": "uid:1003", "gpu": "4", "uuid": "GPU-4"}
    clear = {"action": "empty_cache", "state": "done", "freed_bytes": 9 * GIB, "reason": "room for the release run"}
    ranks = [{"pid": pid, "workload": "llm-pretrain"} for pid in range(4)]
    caller = "unix:uid=1001:pid=7"
    stopped = {"rule": "idle-notebooks", "reason": "3 clears freed nothing that lasted"}
    return [
        *(Event("process_started", midnight - 3600 + rank, pid=rank, rank=str(rank), **job) for rank in range(4)),
        *(
            Event(type_, midnight + 10_000 + 60 * run + after, pid=100 + run, **of_eval)
            for run in range(14)
            for type_, after in (("process_started", 0), ("process_ended", 20))
        ),
        Event("oom", midnight + 13_324, pid=4711, detail={**OOM, "device_free_bytes": GIB // 2}, **of_indexer),
        Event("device_lost", midnight + 20_000, gpu="7", uuid="GPU-7", detail={"error": "GPU is lost"}),
        Event("device_returned", midnight + 20_090, gpu="7", uuid="GPU-7"),
        Event(
            "action", _NOON - 60, workload="llm-pretrain", detail={**clear, "requested_by": caller, "results": ranks}
        ),
        Event("policy_stopped", _NOON - 30, detail=stopped),
    ]


def test_the_lines_of_a_day() -> None:
    lines = [event_line(dict(each), _NOON, 80).plain for each in shown(*_day())]
    assert max(map(len, lines)) <= 80
    assert_golden("events.txt", "\n".join(lines) + "\n")


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
    (shown,) = events_for_caller([error], ADA, hide_identities=False)
    assert shown == error
    (hidden,) = events_for_caller([error], ADA, hide_identities=True)
    assert hidden.detail["device"] == {"total_bytes": 10, "jobs": [{**job, "command": None, "user": None}]}
    assert "secret" not in str(one_event_document(hidden, [hidden]))
    unknown = replace(error, detail={**error.detail, "device": {"total_bytes": 10}})
    (hidden,) = events_for_caller([unknown], ADA, hide_identities=True)
    assert hidden.detail["device"] == {"total_bytes": 10}, "no list of jobs is not an empty list"


def test_the_user_of_an_ended_process_is_hidden_as_a_name_and_as_a_number() -> None:
    detail = {"reason": "it exited", "user": "eve", "uid": 1002, "slurm_job_id": "7", "ray_job_id": "01"}
    ended = Event("process_ended", 1.7e9, pid=7, detail=detail, id=9)
    (hidden,) = events_for_caller([ended], ADA, hide_identities=True)
    assert hidden.detail == {**detail, "user": None, "uid": None, "slurm_job_id": None}
