from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from gpumem_client.wire.errors import ExporterAnswerError
from gpumem_exporter.cli import clear
from gpumem_exporter.cli.clear import ExpectedClear, confirmed, expect, send_all, stays_free, when
from tests.support.fleet_builders import row

GIB = 1 << 30
BODY = {"action": "empty_cache", "target": {"all": True}, "mode": "now", "group": False, "deadline_seconds": 30.0}
NOW = {"target": {"pid": [1, 2]}, "mode": "now", "group": False, "deadline_seconds": 30.0}
GROUP = {"target": {"pid": [3, 4]}, "mode": "step", "group": True, "deadline_seconds": 45.0}


def size(gib: float | None) -> int | None:
    return None if gib is None else int(gib * GIB)


def result(pid: int, freed: float | None, stays: float | None, workload: str = "", rank: str = "") -> dict[str, Any]:
    return row(pid, workload=workload, rank=rank, freed_bytes=size(freed), still_free_bytes=size(stays))


RANKS = [result(3, 10, 1, "llm", "0"), result(4, 10, 1.2, "llm", "1")]
OTHERS = [result(1, 4, 4, "notebook"), result(2, 1, 1)]


def expected(*results: dict[str, Any], suggested: list[dict[str, Any]]) -> ExpectedClear:
    return ExpectedClear(BODY, {"results": list(results), "suggested": suggested})


@pytest.mark.parametrize(
    ("results", "suggested", "sentence"),
    [
        (RANKS, [GROUP], "Stays free 2.2 GiB; 17.8 GiB more would be reserved again in the next step."),
        (OTHERS, [NOW], "Stays free 5.0 GiB."),
        (
            [*OTHERS, *RANKS],
            [NOW, GROUP],
            "Stays free 7.2 GiB; 17.8 GiB more would be reserved again in the next step.",
        ),
        ([result(1, 4, 1), *RANKS], [NOW, GROUP], "Stays free 3.2 GiB; 20.8 GiB more would be reserved again."),
        ([result(1, 4, 4), result(2, 1, None)], [NOW], "Stays free at least 4.0 GiB."),
        ([result(1, 4, 4), result(2, None, None)], [NOW], "Stays free at least 4.0 GiB."),
        ([result(1, 4, None)], [NOW], "Would free 4.0 GiB now; how much of it stays free is not known yet."),
        ([result(1, None, None)], [NOW], "It is not known how much memory a clear would free."),
        ([result(1, 0, 0)], [NOW], "A clear would free nothing."),
    ],
)
def test_the_figure_is_what_stays_free(
    results: list[dict[str, Any]], suggested: list[dict[str, Any]], sentence: str
) -> None:
    assert stays_free(expected(*results, suggested=suggested)) == sentence


def test_the_question_names_the_jobs_that_end_a_step_first() -> None:
    assert when(expected(*OTHERS, suggested=[NOW])) == ""
    text = when(expected(*OTHERS, *RANKS, suggested=[NOW, GROUP]))
    assert text == "At the end of a step, within 45 s: llm (2 ranks). At once: 2 processes."


class Api:
    """An exporter whose dry run suggests two parts."""

    def __init__(self) -> None:
        self.requests: list[Mapping[str, Any]] = []
        self.refuses_groups = False

    def act(self, request: Mapping[str, Any], *, wait_seconds: float) -> Any:
        self.requests.append(request)
        return {"state": "done", "dry_run": True, "results": [*OTHERS, *RANKS], "suggested": [NOW, GROUP]}

    def submit(self, request: Mapping[str, Any]) -> Any:
        self.requests.append(request)
        if request["group"] and self.refuses_groups:
            raise ExporterAnswerError(409, "rank 1 makes no steps")
        return {"id": str(len(self.requests)), "state": "done", "results": []}


@pytest.mark.parametrize(
    ("answer", "free_mode", "modes"),
    [
        ("n", True, None),
        ("", True, None),
        ("y", True, ["now", "step"]),
        ("now", True, ["now"]),
        ("y", False, ["now"]),
        ("now", False, None),
    ],
)
def test_the_answer_chooses_the_modes(
    answer: str, free_mode: bool, modes: list[str] | None, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr("builtins.input", lambda _: answer)
    chosen = confirmed(Api(), BODY, free_mode=free_mode)  # type: ignore[arg-type]
    assert (None if chosen is None else [request["mode"] for request in chosen.requests]) == modes
    printed = capsys.readouterr().out
    assert "Stays free 7.2 GiB" in printed
    assert "llm (2 ranks)" in printed
    assert clear.can_ask() is False


def test_a_dry_run_leaves_mode_and_default_deadline_to_the_exporter() -> None:
    api = Api()
    expect(api, BODY)  # type: ignore[arg-type]
    expect(api, {**BODY, "deadline_seconds": 7.0})  # type: ignore[arg-type]
    assert ["mode" in request for request in api.requests] == [False, False]
    assert [request.get("deadline_seconds") for request in api.requests] == [None, 7.0]


def test_a_part_that_is_refused_does_not_hide_the_results_of_the_others() -> None:
    api = Api()
    api.refuses_groups = True
    done, refused = send_all(api, expect(api, BODY), wait_seconds=1.0)  # type: ignore[arg-type]
    assert done["state"] == "done"
    assert [(each["pid"], each["outcome"], each["reason"]) for each in refused["results"]] == [
        (3, "refused", "rank 1 makes no steps"),
        (4, "refused", "rank 1 makes no steps"),
    ]
