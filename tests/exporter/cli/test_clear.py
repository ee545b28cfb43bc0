from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from gpumem_client.wire.errors import ExporterAnswerError
from gpumem_exporter.cli import clear
from gpumem_exporter.cli.clear import Plan, act, confirmed, plan_clear
from tests.support.fleet_builders import action, row

GIB = 1 << 30
BODY = {"action": "empty_cache", "target": {"all": True}, "mode": "now", "group": False, "deadline_seconds": 30.0}
NOW = {"target": {"pid": [1, 2]}, "mode": "now", "group": False, "deadline_seconds": 30.0}
GROUP = {"target": {"pid": [3, 4]}, "mode": "step", "group": True, "deadline_seconds": 45.0}
EXPECTED = [
    row(pid, "would_clear", workload=workload, freed_bytes=10 * GIB, still_free_bytes=GIB)
    for pid, workload in ((1, "notebook"), (2, ""), (3, "llm"), (4, "llm"))
]


class Api:
    """An exporter whose dry run suggests two parts. Its actions end after `readings` readings."""

    def __init__(self, readings: int = 0) -> None:
        self.requests: list[Mapping[str, Any]] = []
        self.readings = readings
        self.refuses_groups = False
        self.canceled: list[str] = []

    def submit(self, request: Mapping[str, Any], **_: float) -> Any:
        self.requests.append(request)
        if request.get("dry_run"):
            return action(*EXPECTED, dry_run=True, suggested=[NOW, GROUP])
        if request.get("group") and self.refuses_groups:
            raise ExporterAnswerError(409, "rank 1 makes no steps")
        return self.action(str(len(self.requests)))

    def action(self, action_id: str) -> Any:
        self.readings -= 1
        done = row(1, freed_bytes=GIB, still_free_bytes=None)
        common = {"id": action_id, "settle_seconds": 0.0, "freed_bytes": GIB, "mode": self.requests[-1].get("mode")}
        return {**action(state="running"), **common} if self.readings >= 0 else {**action(done), **common}

    def cancel(self, action_id: str) -> Any:
        self.canceled.append(action_id)
        self.readings = 0
        return self.action(action_id)


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(clear, "_POLL_SECONDS", 0.001)
    return Api()


@pytest.mark.parametrize(
    ("answer", "free_mode", "modes"),
    [
        ("n", True, None),
        ("y", True, ["now", "step"]),
        ("now", True, ["now"]),
        ("y", False, ["now"]),
        ("now", False, None),
    ],
)
def test_the_answer_chooses_the_modes(
    api: Any, answer: str, free_mode: bool, modes: list[str] | None, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def answered(prompt: str) -> str:
        print(prompt)
        return answer

    monkeypatch.setattr("builtins.input", answered)
    chosen = confirmed(api, BODY, free_mode=free_mode)
    assert (None if chosen is None else [request["mode"] for request in chosen.requests]) == modes
    text = " ".join(capsys.readouterr().out.split())
    assert "Clear 4 processes? Stays free 4.0 GiB; 36.0 GiB more would be reserved again." in text
    assert "llm (2 ranks)" in text
    assert ("[y/N/now]" in text, "[y/N]" in text) == (free_mode, not free_mode)
    assert clear.can_ask() is False


def test_a_dry_run_leaves_mode_and_default_deadline_to_the_exporter(api: Any) -> None:
    plan_clear(api, BODY)
    plan_clear(api, {**BODY, "deadline_seconds": 7.0})
    assert ["mode" in request for request in api.requests] == [False, False]
    assert [request.get("deadline_seconds") for request in api.requests] == [None, 7.0]


def test_a_part_that_is_refused_does_not_hide_the_results_of_the_others(api: Any) -> None:
    api.refuses_groups = True
    document = act(api, plan_clear(api, BODY))
    assert [(each["pid"], each["outcome"]) for each in document["results"]] == [
        *((1, "done"), (3, "refused"), (4, "refused")),
    ]
    assert (document["state"], document["freed_bytes"]) == ("failed", GIB)


def test_the_only_request_that_is_refused_is_an_error(api: Any) -> None:
    api.refuses_groups = True
    with pytest.raises(ExporterAnswerError):
        act(api, Plan({**BODY, "mode": "step", "group": True}))


def test_an_action_is_read_until_it_ends_or_the_wait_does(api: Any) -> None:
    api.readings = 3
    said: list[str] = []
    assert act(api, Plan({**BODY, "mode": "step"}), say=said.append)["state"] == "done"
    assert len(said) == 3
    assert "at most 30 s" in said[0]
    api.readings = 1000
    assert act(api, Plan(BODY), wait_seconds=0.01)["state"] == "running"
    assert act(api, Plan(BODY), wait_seconds=0)["state"] == "running"


def test_a_stop_cancels_what_has_not_started(api: Any) -> None:
    api.readings = 1000
    assert act(api, plan_clear(api, BODY), stopped=lambda: True)["state"] == "done"
    assert api.canceled == ["2", "3"]
