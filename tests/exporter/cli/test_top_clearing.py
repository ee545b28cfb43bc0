from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from typing import Any

import pytest

from gpumem_client.wire.errors import ExporterAnswerError
from gpumem_exporter.cli.top.clearing import Clearing
from gpumem_exporter.cli.top.rows import Row, rows_of
from tests.support.top_documents import process, unreported
from tests.support.waiting import patient, wait_for

GIB = 1 << 30
_VALUES = re.compile(r"\d+(?:\.\d+)?(?: (?:B|GiB))?")
_URL = "unix:///e.sock"
_RESULT = {
    "pid": 7,
    "workload": "llm",
    "rank": "0",
    "gpu": "0",
    "outcome": "done",
    "freed_bytes": 3 * GIB,
    "still_free_bytes": 3 * GIB,
}
_RANKS = [{**_RESULT, "pid": pid, "rank": str(pid - 7), "still_free_bytes": GIB} for pid in (7, 8)]
_AT_ONCE = {"target": {"pid": 7}, "mode": "now", "group": False, "deadline_seconds": 30.0}
_GROUP = {"target": {"pid": [7, 8]}, "mode": "step", "group": True, "deadline_seconds": 45.0}


class _Api:
    def __init__(self, world: _World) -> None:
        self._world = world

    def __enter__(self) -> _Api:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def act(self, request: Mapping[str, Any], *, wait_seconds: float) -> Any:
        assert request["dry_run"]
        action = {**self.submit(request), "state": "done", "results": self._world.results}
        return {**action, "suggested": [self._world.suggested]}

    def submit(self, request: Mapping[str, Any]) -> Any:
        self._world.requests.append(request)
        if self._world.error is not None:
            raise self._world.error
        return self.action("")

    def action(self, _: str) -> Any:
        world = self._world
        state = "running" if world.waits else "done"
        results = [] if world.waits else world.results
        return {"id": "a", "action": "empty_cache", "state": state, "results": results, "waits_for": world.engines}

    def cancel(self, _: str) -> Any:
        self._world.waits = False
        self._world.results = [{**each, "outcome": "refused", "reason": "cancelled"} for each in self._world.results]
        return self.action("")


class _World:
    """An exporter with prepared results, and a clock."""

    def __init__(self) -> None:
        self.requests: list[Mapping[str, Any]] = []
        self.results: list[dict[str, Any]] = [dict(_RESULT)]
        self.suggested: dict[str, Any] = _AT_ONCE
        self.error: Exception | None = None
        self.waits = False
        self.engines: list[dict[str, Any]] = []
        self.now = 50.0
        self._answered = threading.Semaphore(0)
        self.clearing = Clearing(lambda url: _Api(self), self._answered.release, lambda: self.now)  # type: ignore[arg-type,return-value]

    def wait(self) -> str:
        """Wait for the exporter's answer, and return the note."""
        assert self._answered.acquire(timeout=patient(30))
        return self.note_text()

    def note_text(self) -> str:
        note = self.clearing.note()
        return note.text if note else ""


def _row(**changes: Any) -> Row:
    return rows_of({"processes": [process(7, "0", **changes)]})[0]


def _sent(world: _World) -> list[Mapping[str, Any]]:
    return [request for request in world.requests if not request.get("dry_run")]


def test_a_clear_starts_with_a_dry_run_of_the_job_and_a_question() -> None:
    world = _World()
    world.clearing.ask(_row(), _URL)
    text = world.wait()
    assert text.startswith("Clear llm rank 0? y/n")
    assert "Stays free 3.0 GiB." in text
    (dry_run,) = world.requests
    assert "mode" not in dry_run, "the exporter chooses"
    assert dry_run["target"] == {"workload": "llm", "user": "alice"}
    world.clearing.answer(yes=True)
    assert _VALUES.findall(world.wait()) == ["0", "3.0 GiB", "1", "1"]
    (sent,) = _sent(world)
    assert (sent["mode"], sent["target"]) == ("now", {"pid": 7})
    note = world.clearing.note()
    assert note is not None
    assert not note.asks


def test_a_process_without_a_workload_is_named_by_its_pid() -> None:
    world = _World()
    world.clearing.ask(_row(workload=""), _URL)
    world.wait()
    assert world.requests[0]["target"] == {"pid": 7}


def test_the_ranks_of_a_job_clear_as_a_group_after_the_same_step() -> None:
    world = _World()
    world.results, world.suggested = _RANKS, _GROUP
    world.clearing.ask(_row(), _URL)
    text = world.wait()
    assert text.startswith("Clear llm (2 ranks)? y/n")
    assert "Stays free 2.0 GiB; 4.0 GiB more would be reserved again in the next step." in text
    assert "within 45 s" in text
    world.clearing.answer(yes=True)
    world.wait()
    world.wait()
    (sent,) = _sent(world)
    assert (sent["mode"], sent["group"], sent["target"]) == ("step", True, {"pid": [7, 8]})


def test_a_clear_that_waits_for_a_step_can_be_cancelled() -> None:
    world = _World()
    world.results, world.suggested = _RANKS, _GROUP
    world.clearing.ask(_row(), _URL)
    world.wait()
    world.waits = True
    world.clearing.answer(yes=True)
    assert re.search(r"llm \(2 ranks\), at most 45 s; c cancels", world.wait())
    world.clearing.ask(_row(), _URL)
    wait_for(lambda: world.note_text() == "pid 7, 8: refused: cancelled", "the end of the clear")


def test_a_clear_that_waits_for_an_engine_names_it_and_can_be_cancelled() -> None:
    world = _World()
    world.clearing.ask(_row(), _URL)
    world.wait()
    engine = {"pid": 9, "title": "VLLM::EngineCore", "gpu": "0", "uuid": "GPU-0", "until_unix_seconds": 3600.0}
    world.waits, world.engines = True, [engine]
    world.clearing.answer(yes=True)
    note = world.wait()
    assert all(text in note for text in ("pid 9", "VLLM::EngineCore", "GPU 0", "01:00:00")), note
    world.clearing.ask(_row(), _URL)
    wait_for(lambda: world.note_text() == "pid 7: refused: cancelled", "the end of the clear")


def test_a_reason_in_a_dry_run_is_shown_in_the_question() -> None:
    world = _World()
    world.results[0]["reason"] = "an-engine-starts"
    world.clearing.ask(_row(), _URL)
    text = world.wait()
    assert text.startswith("Clear llm rank 0? y/n")
    assert "an-engine-starts" in text


def test_the_answer_no_changes_nothing() -> None:
    world = _World()
    world.clearing.ask(_row(), _URL)
    world.wait()
    world.clearing.answer(yes=False)
    assert (world.note_text(), _sent(world)) == ("", [])


def test_a_question_expires() -> None:
    world = _World()
    world.clearing.ask(_row(), _URL)
    world.wait()
    world.now += 31
    assert world.note_text() == ""
    world.clearing.answer(yes=True)
    assert _sent(world) == []


def test_a_clear_that_frees_nothing_is_not_offered() -> None:
    world = _World()
    world.results[0] |= {"freed_bytes": 0, "still_free_bytes": 0}
    world.clearing.ask(_row(), _URL)
    assert "y/n" not in world.wait()
    world.clearing.answer(yes=True)
    assert _sent(world) == []


def test_a_refusal_of_the_exporter_is_shown() -> None:
    world = _World()
    world.error = ExporterAnswerError(403, "token:\n--action.token-file")
    world.clearing.ask(_row(), _URL)
    text = world.wait()
    assert "403" in text
    assert "token: --action.token-file" in text
    world.error, world.results = None, [{**_RESULT, "outcome": "gone", "reason": "process-ended"}]
    world.clearing.ask(_row(), _URL)
    assert world.wait() == "pid 7: gone: process-ended"


@pytest.mark.parametrize(
    ("row", "url", "named"),
    [
        (None, _URL, "process"),
        (_row(), "", "exporter"),
        (rows_of({"processes": [unreported(8, "0", 5)]})[0], _URL, "pid 8"),
        (_row(actions=["reset_peak"]), _URL, "pid 7"),
    ],
)
def test_a_process_that_cannot_clear_gets_no_request(row: Row | None, url: str, named: str) -> None:
    world = _World()
    world.clearing.ask(row, url)
    assert named in world.note_text()
    assert world.requests == []
    world.clearing.dismiss()
    assert world.note_text() == ""
