from __future__ import annotations

import threading
from typing import Any

import pytest

from gpumem_exporter.cli.fleet.acting import asks_of
from gpumem_exporter.cli.fleet.asks import Ask, Failure, rows
from gpumem_exporter.cli.fleet.choosing import Member
from gpumem_exporter.cli.fleet.naming import Place
from gpumem_exporter.cli.fleet.parallel import each
from gpumem_exporter.errors import ExporterAnswerError, ExporterUnreachableError
from tests.support.fleet_builders import A, B, Clock, ScriptedExporter, action, nodes, row
from tests.support.waiting import patient

BODY = {"action": "empty_cache", "dry_run": False}


def ask(place: Place = A, pid: int | str = 1) -> Ask:
    (one,) = asks_of("empty_cache", [Member(place, pid, "train", "0", ("0",))])
    return one


def told(one: Ask, **changes: Any) -> list[tuple[Any, str, str]]:
    found = rows(one, **{"action": "empty_cache", "dry_run": False, **changes})
    return [(found["pid"], found["outcome"], found["reason"]) for found in found]


def outcomes(one: Ask) -> list[tuple[Any, str]]:
    return [(pid, outcome) for pid, outcome, _ in told(one)]


def act(exporter: ScriptedExporter, one: Ask, wait_seconds: float = 30.0) -> None:
    clock = Clock()
    fleet = nodes({one.place: exporter}, clock)
    fleet.begin([one], BODY)
    fleet.watch([one], wait_seconds=wait_seconds)
    assert clock.now <= wait_seconds


def test_each_process_is_asked_for_by_all_that_tells_it_from_a_later_one_with_its_pid() -> None:
    exporter = ScriptedExporter(begins=[action(row())])
    one = ask()
    act(exporter, one)
    assert exporter.asked == [("begin", {**BODY, "target": {"pid": 1, "workload": "train", "rank": "0"}})]
    assert told(one) == [(1, "done", "")]


def test_what_is_done_to_one_device_is_asked_for_by_device_and_what_is_not_is_not() -> None:
    on_two = Member(A, 1, "train", "0", ("0", "1"), ("GPU-0", "GPU-1"))
    assert [one.target.get("uuid") for one in asks_of("reset_peak", [on_two])] == ["GPU-0", "GPU-1"]
    assert [one.target.get("uuid") for one in asks_of("set_memory_fraction", [on_two])] == ["GPU-0", "GPU-1"]
    assert [one.target.get("uuid") for one in asks_of("empty_cache", [on_two])] == [None]
    assert [one.target.get("uuid") for one in asks_of("reset_peak", [Member(A, 1, "", "")])] == [None]


def test_an_action_is_asked_after_until_it_has_ended() -> None:
    exporter = ScriptedExporter(
        begins=[action(state="queued")], later=[action(state="running"), action(row(freed_bytes=3))]
    )
    one = ask()
    act(exporter, one)
    assert exporter.asked_for("action") == ["a1", "a1"]
    assert [found["freed_bytes"] for found in rows(one, action="empty_cache", dry_run=False)] == [3]


def test_what_has_not_ended_in_time_says_so() -> None:
    one = ask()
    act(ScriptedExporter(begins=[action(state="queued")], later=[action(state="running")]), one, wait_seconds=5.0)
    ((pid, outcome, reason),) = told(one)
    assert (pid, outcome) == (1, "expired")
    assert "a1" in reason


@pytest.mark.parametrize(
    ("error", "outcome", "reason"),
    [
        (ExporterAnswerError(404, "nothing matches pid=1"), "gone", ""),
        (ExporterAnswerError(403, "not-allowed"), "refused", "HTTP 403: not-allowed"),
        (ExporterAnswerError(401, "token-needed"), "refused", "token-needed"),
        (ExporterAnswerError(500, "see-log"), "failed", "HTTP 500"),
        (ExporterUnreachableError("silent-x"), "failed", "silent-x"),
    ],
)
def test_an_exporter_that_does_not_take_it_is_told_as_what_it_is(error: Any, outcome: str, reason: str) -> None:
    one = ask()
    act(ScriptedExporter(begins=[error]), one)
    ((pid, found, why),) = told(one)
    assert (pid, found) == (1, outcome)
    assert reason in why


def test_an_exporter_that_is_silent_for_a_moment_is_asked_again_and_one_that_has_gone_is_given_up() -> None:
    silence = ExporterUnreachableError("silent-x")
    one = ask()
    act(ScriptedExporter(begins=[action(state="queued")], later=[silence, silence, action(row())]), one)
    assert told(one) == [(1, "done", "")]
    one = ask()
    act(ScriptedExporter(begins=[action(state="queued")], later=[silence]), one)
    ((_, outcome, reason),) = told(one)
    assert outcome == "failed"
    assert "silent-x" in reason
    one = ask()
    act(ScriptedExporter(begins=[action(state="queued")], later=[ExporterAnswerError(404, "no such action")]), one)
    assert outcomes(one) == [(1, "failed")]


@pytest.mark.parametrize(
    ("answered", "expected"),
    [
        (action(row(1), row(2)), [(1, "done"), (2, "failed")]),
        (action(row(1, workload="other")), [(1, "failed")]),
        (action(row(1, rank="7")), [(1, "failed")]),
        (action(), [(1, "failed")]),
        (action(row(1), action="terminate"), [(1, "done"), (1, "failed")]),
        (action(row(1), dry_run=True), [(1, "done"), (1, "failed")]),
    ],
)
def test_an_answer_of_more_or_of_something_else_than_was_asked_for_is_a_failure(
    answered: Any, expected: list[tuple[int, str]]
) -> None:
    one = ask()
    act(ScriptedExporter(begins=[answered]), one)
    assert outcomes(one) == expected
    assert all(reason for _, outcome, reason in told(one) if outcome == "failed")


def test_an_answer_for_another_device_than_was_asked_for_is_a_failure() -> None:
    one = Ask(A, (Member(A, 1, "train", "0"),), {"pid": 1, "uuid": "GPU-0"}, action(row(1), row(1, uuid="GPU-1")))
    assert outcomes(one) == [(1, "done"), (1, "failed")]


def test_a_document_that_is_no_exporters_is_not_taken_for_one() -> None:
    silent = ScriptedExporter(document=ExporterUnreachableError("nobody"))
    other = ScriptedExporter(document={"hello": "world"})
    read = nodes({A: silent, B: other}, Clock()).read([A, B], "devices")
    assert read[A] == Failure("failed", "nobody")
    refusal = read[B]
    assert isinstance(refusal, Failure)
    assert refusal.outcome == "failed"
    assert B.url in refusal.reason


def test_one_exporter_is_asked_by_one_thread_at_a_time() -> None:
    busy, overlaps = threading.Lock(), []

    def on_begin() -> None:
        overlaps.append(not busy.acquire(blocking=False))
        busy.release()

    exporter = ScriptedExporter(begins=[action(row())], on_begin=on_begin)
    asks = [ask(pid=pid) for pid in range(1, 40)]
    nodes({A: exporter}, Clock(), parallel=8).begin(asks, BODY)
    assert overlaps == [False] * 39


def test_so_many_run_at_a_time_and_no_more() -> None:
    together = threading.Barrier(3, timeout=patient(30))
    running, most, lock = 0, 0, threading.Lock()

    def work(item: int) -> int:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        together.wait()  # broken if three do not run side by side
        with lock:
            running -= 1
        return item * item

    assert each(list(range(9)), work, parallel=3) == [item * item for item in range(9)]
    assert most == 3
    assert each([], work, parallel=3) == []


def test_an_error_of_one_is_raised_once_the_others_have_ended() -> None:
    def work(item: int) -> int:
        if item == 1:
            raise KeyError(item)
        return item

    with pytest.raises(KeyError):
        each([0, 1, 2], work, parallel=1)
