"""What people read of events: titles, texts, severities, and short jobs as one entry."""

from __future__ import annotations

import re
from typing import Any

import pytest

from gpumem_exporter.core.event import EVENT_TYPES, Event
from gpumem_exporter.features.events.event_entries import FOLD_SECONDS, Entry, fold

GIB = 1 << 30
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


@pytest.mark.parametrize(
    ("of", "title", "severity", "parts"),
    [
        (
            event("oom", detail={**OOM, "allocator": {"reserved_bytes": 30 * GIB, "fragmented_bytes": 1}}, rank="2"),
            "out of memory",
            "warning",
            ("llm rank 2", "GPU 3", "2.0 GiB", "1.0 GiB"),
        ),
        (
            event("oom", detail={**OOM, "device_free_bytes": 9 * GIB, "limit_bytes": 31 * GIB}),
            "out of memory",
            "warning",
            ("2.0 GiB", "30.0 GiB of its limit of 31.0 GiB"),
        ),
        (
            event("oom", detail={**OOM, "allocator": {"reserved_bytes": 30 * GIB, "fragmented_bytes": GIB}}),
            "out of memory",
            "warning",
            ("1.0 GiB was free", "1.0 GiB fragmented"),
        ),
        (event("oom", detail={"requested_bytes": None}, workload=""), "out of memory", "warning", ("pid 7",)),
        (event("device_lost", detail={"error": "fell off the bus"}), "device lost", "critical", ("fell off the bus",)),
        (event("device_returned"), "device back", "info", ("GPU 3",)),
        (event("process_ended", detail={"reason": "it exited"}), "ended", "info", ("llm (pid 7)", "it exited")),
        (event("action", detail=ACTION), "clear", "info", ("llm:", "freed 3.0 GiB", "by uid 1001", "make room")),
        (event("action", detail={**ACTION, "state": "expired"}), "clear", "info", ("llm: expired", "3.0 GiB")),
        (
            event("policy_stopped", detail={"rule": "hoard", "reason": "in vain", "until": "2026-01-31T12:00:00.000Z"}),
            "rule stopped",
            "warning",
            ("hoard: in vain; until 2026-01-31 12:00 UTC",),
        ),
    ],
)
def test_an_event_has_a_title_a_severity_and_a_text(
    of: Event, title: str, severity: str, parts: tuple[str, ...]
) -> None:
    entry = Entry(of)
    assert (entry.title, entry.severity) == (title, severity)
    assert [part for part in parts if part not in entry.text] == []
    # Fragmentation is named only if the fragmented memory would have been enough.
    assert ("fragmented" in entry.text) == any("fragmented" in part for part in parts)


def test_a_clear_of_several_processes_names_their_workload_once() -> None:
    results = [{"pid": pid, "workload": "llm"} for pid in (7, 7, 8)]
    assert Entry(event("action", pid=None, detail={**ACTION, "results": results})).text.startswith("llm (2 processes):")
    results[0] = {"pid": 9, "workload": "other"}
    several = event("action", pid=None, workload=None, detail={**ACTION, "results": results})
    assert Entry(several).text.startswith("3 processes:")


@pytest.mark.parametrize("type_", [*EVENT_TYPES, "of_tomorrow"])
@pytest.mark.parametrize("detail", [{}, {"results": None, "allocator": 7, "requested_bytes": "x"}])
def test_an_event_of_another_version_has_a_title(type_: str, detail: dict[str, Any]) -> None:
    entry = Entry(event(type_, detail=detail))
    assert entry.title
    assert isinstance(entry.text, str)


def test_short_jobs_are_one_entry_at_their_last_end() -> None:
    lost = event("device_lost", 100.0, detail={"error": ""})
    (first, ran) = fold(sorted([*runs(14), lost], key=lambda each: each.time_unix_seconds))
    assert first.event is lost
    assert (ran.title, ran.starts, ran.ends) == ("ran", 14, 14)
    assert (ran.first_unix_seconds, ran.event.time_unix_seconds) == (1e9, 1e9 + 13 * 60 + 5)
    assert (ran.event.workload, ran.event.gpu, ran.event.pid) == ("llm", "3", None)
    assert re.search(r"llm\b.*\b14\b", ran.text)
    assert fold(runs(1))[0].text == "llm (pid 0)"
    assert re.findall(r"\d+", fold(runs(3)[:-1])[0].text) == ["3", "2"], "one still runs"


def test_the_starts_of_ranks_are_one_entry_and_their_ends_another() -> None:
    starts = [process(pid, pid / 10, "process_started", rank=str(pid)) for pid in range(4)]
    ends = [process(pid, 86400 + pid, "process_ended", rank=str(pid)) for pid in range(4)]
    started, ended = fold([*starts, *ends])
    assert [(each.title, each.starts, each.ends) for each in (started, ended)] == [("started", 4, 0), ("ended", 0, 4)]
    assert [re.findall(r"\d+", each.text) for each in (started, ended)] == [["4"], ["4"]]


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
    assert [each.title for each in fold([*runs(1), error, *runs(2)[2:]])] == ["ran", "out of memory", "ran"]
    other = event("oom", 30.0, owner="uid:1002", detail=OOM)
    assert [each.title for each in fold([*runs(1), other, *runs(2)[2:]])] == ["out of memory", "ran"]


def test_processes_without_a_workload_are_one_entry_if_they_have_one_command() -> None:
    def run(pid: int, command: str | None) -> list[Event]:
        values: dict[str, Any] = {"workload": "", "subject": f"process:{pid}"}
        end = {"command": command and f"/usr/bin/{command}", "reason": "it exited"}
        return [
            process(pid, pid, "process_started", detail={"command": command}, **values),
            process(pid, pid + 0.5, "process_ended", detail=end, **values),
        ]

    evals = [each for pid in range(3) for each in run(pid, "eval.py")]
    assert [(each.starts, each.ends) for each in fold([*evals, *run(9, "train.py")])] == [(3, 3), (1, 1)]
    hidden = [each for pid in range(3) for each in run(pid, None)]
    assert [(each.starts, each.ends) for each in fold(hidden)] == [(1, 1)] * 3


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
    assert [(each.title, each.errors) for each in entries] == [
        ("started", 0),
        ("out of memory", 20),
        ("ran", 0),
        ("out of memory", 1),
    ]
    errors = entries[1]
    assert (errors.first_unix_seconds, errors.event.time_unix_seconds) == (1e9 + 20, 1e9 + 780)
    assert errors.event.pid is None
    assert re.search(r"\b20 times", errors.text)
    alone = [event("oom", seconds, workload="", detail=OOM) for seconds in (0.0, 5.0, 5.0 + FOLD_SECONDS + 1)]
    assert [each.errors for each in fold(alone)] == [2, 1]
