from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import pytest

from gpumem_exporter.cli.live.clearing import Clearing
from gpumem_exporter.cli.live.rows import Row, rows_of
from gpumem_exporter.errors import ExporterAnswerError
from tests.support.top_documents import process, unreported

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
    """An exporter that does what it is asked, and a clock."""

    def __init__(self) -> None:
        self.requests: list[Mapping[str, Any]] = []
        self.result: dict[str, Any] = dict(_RESULT)
        self.error: Exception | None = None
        self.now = 50.0
        self._heard = threading.Semaphore(0)
        self.clearing = Clearing(lambda url: _Api(self), self._heard.release, lambda: self.now)  # type: ignore[arg-type,return-value]

    def wait(self) -> str:
        """Until the exporter has answered; what is then said."""
        assert self._heard.acquire(timeout=10)
        return self.said()

    def said(self) -> str:
        note = self.clearing.note()
        return note.text if note else ""


def _row(**changes: Any) -> Row:
    return rows_of({"processes": [process(7, "0", **changes)]})[0]


def test_a_clear_is_a_dry_run_a_question_and_only_then_the_deed() -> None:
    world = _World()
    world.clearing.ask(_row(), _URL)
    said = world.wait()
    assert said == "pid 7: Would free 3.0 GiB in 1 of 1 process. Clear it? y/n"
    (asked,) = world.requests
    assert (asked["dry_run"], asked["target"]) == (True, {"pid": 7, "workload": "llm", "rank": "0"})
    world.clearing.answer(yes=True)
    assert world.wait() == "pid 7: Freed 3.0 GiB in 1 of 1 process."
    assert (world.requests[1]["dry_run"], world.requests[1]["target"]) == (False, asked["target"])
    note = world.clearing.note()
    assert note is not None
    assert not note.asks


def test_no_leaves_everything_as_it_is() -> None:
    world = _World()
    world.clearing.ask(_row(), _URL)
    world.wait()
    world.clearing.answer(yes=False)
    assert (world.said(), len(world.requests)) == ("", 1)


def test_a_question_does_not_stand_forever() -> None:
    world = _World()
    world.clearing.ask(_row(), _URL)
    world.wait()
    world.now += 31
    assert world.said() == ""
    world.clearing.answer(yes=True)
    assert len(world.requests) == 1


def test_what_would_free_nothing_is_not_asked_about() -> None:
    world = _World()
    world.result["freed_bytes"] = 0
    world.clearing.ask(_row(), _URL)
    assert world.wait() == "pid 7: Would free 0 B in 1 of 1 process."
    world.clearing.answer(yes=True)
    assert len(world.requests) == 1


def test_a_refusal_of_the_exporter_is_shown_with_its_mend() -> None:
    world = _World()
    world.error = ExporterAnswerError(403, "give a token:\n--action.token-file")
    world.clearing.ask(_row(), _URL)
    assert world.wait() == "HTTP 403: give a token: --action.token-file"
    world.error, world.result = None, {**_RESULT, "outcome": "gone", "reason": "the process ended"}
    world.clearing.ask(_row(), _URL)
    assert world.wait() == "pid 7: gone: the process ended"


@pytest.mark.parametrize(
    ("row", "url", "why"),
    [
        (None, _URL, "choose a process first"),
        (_row(), "", "none answers"),
        (rows_of({"processes": [unreported(8, "0", 5)]})[0], _URL, "does not report"),
        (_row(actions=["reset_peak"]), _URL, "does not take that action"),
    ],
)
def test_what_cannot_be_cleared_is_not_asked_for(row: Row | None, url: str, why: str) -> None:
    world = _World()
    world.clearing.ask(row, url)
    assert why in world.said()
    assert world.requests == []
    world.clearing.dismiss()
    assert world.said() == ""
