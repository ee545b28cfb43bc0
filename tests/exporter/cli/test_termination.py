"""`terminate` and `fleet terminate` ask before they end anything."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from gpumem_exporter.cli import usage
from gpumem_exporter.main import main
from tests.support.builders.fleet_builders import A, ScriptedExporter, action, process, row, serve_fleet

TARGETS: list[tuple[str, dict[str, Any]]] = [
    ("--all", {}),
    ("--orphans", {"orphans": True}),
    ("--gpu 0", {"gpu": "0"}),
    ("--user ada", {"user": "ada"}),
    ("--workload train", {"workload": "train"}),
    ("--pid 1", {}),
]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Api(ScriptedExporter):
    """An exporter whose dry run matches processes 1 and 2, and may not end 3."""

    matches = True

    def submit(self, request: Mapping[str, Any], **_: object) -> dict[str, Any]:
        self.requests.append(("submit", request))
        outcome = "would_terminate" if request["dry_run"] else "done"
        rows = [*(row(pid, outcome, workload="victim") for pid in (1, 1, 2)), row(3, "refused", reason="not listed")]
        rows = rows if self.matches else []
        return {**action(*rows, action="terminate", dry_run=request["dry_run"]), "settle_seconds": 0.0}

    @property
    def sent(self) -> list[Any]:
        return self.requests_of("submit")

    @property
    def terminated(self) -> list[Any]:
        """The targets of the requests that end something."""
        return [body["target"] for body in self.sent if not body["dry_run"]]


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Api:
    api = Api()
    monkeypatch.setattr(usage, "ExporterApi", lambda *_, **__: api)
    return api


@pytest.fixture
def on_terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Terminal]:
    """Give the next command a terminal on which a person types this."""

    def become(typed: str) -> Terminal:
        shown = Terminal()
        monkeypatch.setattr(sys, "stdin", Terminal(typed))
        monkeypatch.setattr(sys, "stdout", shown)
        return shown

    return become


@pytest.mark.parametrize(("words", "target"), TARGETS)
def test_every_termination_on_a_terminal_shows_what_it_would_end_and_asks(
    api: Api, on_terminal: Callable[[str], Terminal], words: str, target: dict[str, Any]
) -> None:
    shown = on_terminal("n\n")
    assert main(["terminate", *words.split()]) == 1
    text = shown.getvalue()
    assert "Terminate 2 processes? [y/N]" in text
    assert "victim" in text
    assert api.terminated == []
    on_terminal("\n")
    assert main(["terminate", *words.split()]) == 1
    assert api.terminated == []
    on_terminal("y\n")
    main(["terminate", *words.split()])
    assert api.terminated == [{**target, "pid": [1, 2]}]


@pytest.mark.parametrize(("words", "_target"), TARGETS)
def test_a_termination_without_a_terminal_needs_a_yes(
    api: Api, capsys: pytest.CaptureFixture[str], words: str, _target: object
) -> None:
    assert main(["terminate", *words.split()]) == 2
    assert "add --yes" in capsys.readouterr().err
    assert api.sent == []
    assert main(["terminate", "--dry-run", *words.split()]) == 1  # process 3
    main(["terminate", "--yes", "--grace", "2m", *words.split()])
    assert (len(api.terminated), api.sent[-1]["grace_seconds"]) == (1, 120.0)


def test_a_termination_that_matches_nothing_ends_nothing_and_succeeds(
    api: Api, on_terminal: Callable[[str], Terminal]
) -> None:
    api.matches = False
    on_terminal("")
    assert main(["terminate", "--orphans"]) == 0
    assert api.terminated == []


@pytest.mark.parametrize(("typed", "terminated"), [("n\n", 0), ("y\n", 1)])
def test_a_termination_of_a_fleet_asks_and_keeps_to_what_it_has_shown(
    monkeypatch: pytest.MonkeyPatch, on_terminal: Callable[[str], Terminal], typed: str, terminated: int
) -> None:
    answers: list[Any] = [action(row(1, "would_terminate"), row(2, "refused", workload="train")), action(row(1))]
    exporter = ScriptedExporter(document={"processes": [process(1), process(2)]}, submits=answers)
    serve_fleet(monkeypatch, {A: exporter}, [{"instance": A.instance, "pid": pid} for pid in "12"])
    shown = on_terminal(typed)
    assert main(["fleet", "terminate", "--query", "doomed"]) == 1  # no, or a refusal
    assert "Terminate 1 process? [y/N]" in shown.getvalue()
    sent = [each["target"]["pid"] for each in exporter.requests_of("submit") if not each["dry_run"]]
    assert sent == [[1]] * terminated


def test_a_termination_of_a_fleet_without_a_terminal_needs_a_yes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fleet", "terminate", "--query", "doomed", "--json", "--prometheus", "http://127.0.0.1:1"]) == 2
    assert "add --yes" in json.dumps(capsys.readouterr().err)
