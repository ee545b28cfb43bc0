from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from typing import Any

import pytest

from gpumem_client.wire.errors import ExporterAnswerError, ExporterUnreachableError
from gpumem_exporter.cli import action_dialog
from gpumem_exporter.cli.action_dialog import act, confirmed, said_yes
from tests.support.builders.fleet_builders import action, row

GIB = 1 << 30
BODY = {"action": "empty_cache", "target": {"all": True}}
PENDING = [{"pid": 3, "workload": "llm", "rank": "0", "job": "llm", "mode": "step", "at_step": 7}]
EXPECTED = action(
    *(
        row(pid, "would_clear", workload=name, freed_bytes=10 * GIB, still_free_bytes=GIB, mode=mode)
        for pid, name, mode in ((1, "notebook", "now"), (2, "", "now"), (3, "llm", "step"), (4, "llm", "step"))
    ),
    dry_run=True,
    deadline_seconds=45.0,
)
SILENT = ExporterUnreachableError("silent-x")


class Api:
    """An exporter whose action ends after some readings, each of which may do something else first."""

    def __init__(self, *readings: Any) -> None:
        self.readings = list(readings)
        self.requests: list[Mapping[str, Any]] = []
        self.canceled: list[str] = []
        self.on_submit = lambda: None

    def submit(self, request: Mapping[str, Any]) -> Any:
        self.requests.append(request)
        self.on_submit()
        return self._running()

    def action(self, action_id: str) -> Any:
        reading = self.readings.pop(0) if self.readings else None
        if isinstance(reading, Exception):
            raise reading
        if reading is not None:
            reading()
            return self._running()
        return {**action(row(1, freed_bytes=GIB, still_free_bytes=None), id=action_id), "settle_seconds": 0.0}

    def cancel(self, action_id: str) -> Any:
        self.canceled.append(action_id)
        self.readings.clear()
        return action(row(1, "refused", reason="cancelled"), state="cancelled", id=action_id)

    def _running(self) -> Any:
        return action(state="running", pending=PENDING, deadline_seconds=45.0)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def waits() -> None:
    """Let an action run on."""


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(action_dialog, "_FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(action_dialog, "_LONGEST_PAUSE_SECONDS", 0.001)


@pytest.mark.parametrize(("given", "agreed"), [("n", False), ("", False), ("y", True), ("now", False)])
def test_the_question_says_what_stays_free_and_when_the_jobs_clear(
    given: str, agreed: bool, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def answered(prompt: str) -> str:
        print(prompt)
        return given

    monkeypatch.setattr("builtins.input", answered)
    assert said_yes(EXPECTED) is agreed
    text = " ".join(capsys.readouterr().out.split())
    assert "Stays free 4.0 GiB; 36.0 GiB more would be reserved again." in text
    assert "At the end of a step, within 45 s: llm (2 ranks). At once: 2 processes. Clear 4 processes? [y/N]" in text


def test_an_action_is_read_until_it_ends_or_the_wait_does() -> None:
    said: list[str] = []
    api = Api(waits, waits)
    assert act(api, BODY, say=said.append)["state"] == "done"  # type: ignore[arg-type]
    assert api.requests == [BODY]
    assert set(said) == {"Waiting for the end of a step of llm rank 0, at most 45 s."}
    for seconds, texts in ((0.01, said[:1]), (0, [])):
        said.clear()
        document = act(Api(*[waits] * 10_000), BODY, wait_seconds=seconds, say=said.append)  # type: ignore[arg-type]
        assert (document["state"], said) == ("running", texts)


@pytest.mark.parametrize("at", ["request", "reading", "wait"])
def test_ctrl_c_cancels_at_any_moment(at: str) -> None:
    api = Api(*([interrupt] if at == "reading" else []), *[waits] * 1000)
    if at == "request":
        api.on_submit = interrupt
    moments = iter([interrupt] if at == "wait" else [])
    assert act(api, BODY, say=lambda _: next(moments, waits)())["state"] == "cancelled"  # type: ignore[arg-type]
    assert api.canceled == ["a1"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_ctrl_c_ends_the_command_and_prints_the_id(capsys: pytest.CaptureFixture[str]) -> None:
    def twice() -> None:
        interrupt()
        interrupt()

    with pytest.raises(KeyboardInterrupt):
        act(Api(twice), BODY)  # type: ignore[arg-type]
    assert "a1" in capsys.readouterr().err


def test_an_exporter_that_restarts_does_not_end_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    assert act(Api(SILENT, SILENT, waits), BODY)["state"] == "done"  # type: ignore[arg-type]
    monkeypatch.setattr(action_dialog, "_LOST_SECONDS", 0.0)
    for error in (SILENT, ExporterAnswerError(404, "unknown")):
        with pytest.raises(type(error), match="a1"):
            act(Api(error, error), BODY)  # type: ignore[arg-type]


def test_nothing_to_clear_is_no_question() -> None:
    api = Api()
    api._running = lambda: action(dry_run=True)  # type: ignore[method-assign]
    assert confirmed(api, {**BODY, "dry_run": False}) == {**BODY, "dry_run": True}  # type: ignore[arg-type]
