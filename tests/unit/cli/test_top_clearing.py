from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from typing import Any

import pytest

from gpumem_exporter.cli.top.clearing import Clearing
from gpumem_exporter.cli.top.rows import Row, rows_of
from gpumem_exporter.errors import ExporterAnswerError
from tests.support.top_documents import process, unreported
from tests.support.waiting import patient

_VALUES = re.compile(r"\d+(?:\.\d+)?(?: (?:B|GiB))?")
_URL = "unix:///e.sock"
_RESULT = {"pid": 7, "workload": "llm", "rank": "0", "gpu": "0", "outcome": "done", "freed_bytes": 3 << 30}


class _Api:
    def __init__(self, world: _World) -> None:
        self._world = world

    def __enter__(self) -> _Api:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def act(self, request: Mapping[str, Any], *, wait_seconds: float) -> Any:
        self._world.requests.append(request)
        if self._world.error is not None:
            raise self._world.error
        return {"action": "empty_cache", "state": "done", "results": [self._world.result]}


class _World:
    """An exporter with prepared results, and a clock."""

    def __init__(self) -> None:
        self.requests: list[Mapping[str, Any]] = []
        self.result: dict[str, Any] = dict(_RESULT)
        self.error: Exception | None = None
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


def test_a_clear_starts_with_a_dry_run_and_a_question() -> None:
    world = _World()
    world.clearing.ask(_row(), _URL)
    text = world.wait()
    assert _VALUES.findall(text) == ["7", "3.0 GiB", "1", "1"]
    assert text.endswith("y/n")
    (dry_run,) = world.requests
    assert (dry_run["dry_run"], dry_run["target"]) == (True, {"pid": 7, "workload": "llm", "rank": "0"})
    world.clearing.answer(yes=True)
    assert _VALUES.findall(world.wait()) == ["7", "3.0 GiB", "1", "1"]
    assert (world.requests[1]["dry_run"], world.requests[1]["target"]) == (False, dry_run["target"])
    note = world.clearing.note()
    assert note is not None
    assert not note.asks


def test_the_answer_no_changes_nothing() -> None:
    world = _World()
    world.clearing.ask(_row(), _URL)
    world.wait()
    world.clearing.answer(yes=False)
    assert (world.note_text(), len(world.requests)) == ("", 1)


def test_a_question_expires() -> None:
    world = _World()
    world.clearing.ask(_row(), _URL)
    world.wait()
    world.now += 31
    assert world.note_text() == ""
    world.clearing.answer(yes=True)
    assert len(world.requests) == 1


def test_a_clear_that_frees_nothing_is_not_offered() -> None:
    world = _World()
    world.result["freed_bytes"] = 0
    world.clearing.ask(_row(), _URL)
    assert _VALUES.findall(world.wait()) == ["7", "0 B", "1", "1"]
    world.clearing.answer(yes=True)
    assert len(world.requests) == 1


def test_a_refusal_of_the_exporter_is_shown() -> None:
    world = _World()
    world.error = ExporterAnswerError(403, "token:\n--action.token-file")
    world.clearing.ask(_row(), _URL)
    text = world.wait()
    assert "403" in text
    assert "token: --action.token-file" in text
    world.error, world.result = None, {**_RESULT, "outcome": "gone", "reason": "process-ended"}
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
