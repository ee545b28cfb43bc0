from __future__ import annotations

from typing import Any

import pytest

from gpumem_exporter.actions.kinds import KINDS
from gpumem_exporter.actions.sentences import sentence, subject
from tests.support.builders.fleet_builders import action, row

GIB = 1 << 30


def size(gib: float | None) -> int | None:
    return None if gib is None else int(gib * GIB)


def result(pid: int, freed: float | None, stays: float | None, workload: str = "", rank: str = "") -> dict[str, Any]:
    sizes = {"freed_bytes": size(freed), "still_free_bytes": size(stays)}
    return row(pid, "would_clear", workload=workload, rank=rank, step=7 if workload == "llm" else None, **sizes)


RANKS = [result(3, 10, 1, "llm", "0"), result(4, 10, 1.2, "llm", "1")]
OTHERS = [result(1, 4, 4, "notebook"), result(2, 1, 1)]


@pytest.mark.parametrize(
    ("results", "text"),
    [
        (RANKS, "Stays free 2.2 GiB; 17.8 GiB more would be reserved again in the next step."),
        (OTHERS, "Stays free 5.0 GiB."),
        ([result(1, 4, 1), *RANKS], "Stays free 3.2 GiB; 20.8 GiB more would be reserved again."),
        ([result(1, 4, 4), result(2, 1, None)], "Stays free at least 4.0 GiB."),
        ([result(1, None, None)], "It is not known how much memory a clear would free."),
        ([result(1, 0, 0)], "A clear would free nothing."),
        ([result(1, 4, 4), row(2, "refused")], "Stays free 4.0 GiB. 1 of 2 processes would act."),
    ],
)
def test_a_dry_run_of_a_clear_says_what_stays_free(results: list[dict[str, Any]], text: str) -> None:
    assert sentence(action(*results, dry_run=True)) == text


@pytest.mark.parametrize(
    ("still_free", "text"),
    [
        ((0, 0), "Stays free 0 B in llm (2 ranks); 4.0 GiB more was reserved again within 10 s."),
        ((2, 2), "Stays free 4.0 GiB in llm (2 ranks)."),
        ((2, None), "Stays free at least 2.0 GiB in llm (2 ranks)."),
        ((None, None), "Freed 4.0 GiB in llm (2 ranks)."),
    ],
)
def test_a_settled_clear_says_what_stays_free(still_free: tuple[int | None, ...], text: str) -> None:
    results = [
        row(pid, workload="llm", freed_bytes=2 * GIB, still_free_bytes=size(gib)) for pid, gib in enumerate(still_free)
    ]
    assert sentence(action(*results, settle_seconds=10.0)) == text
    settling = action(*results, settle_seconds=10.0, settling=True)
    assert sentence(settling) == "Freed 4.0 GiB in llm (2 ranks)."


def test_what_a_sleep_has_freed_is_at_least_what_is_known() -> None:
    rows = [row(pid, workload="llm", freed_bytes=size(gib)) for pid, gib in enumerate((2, None))]
    assert (
        sentence(action(*rows, action="release_memory")) == "Put llm (2 ranks) to sleep, which freed at least 2.0 GiB."
    )


@pytest.mark.parametrize("name", KINDS)
def test_no_dry_run_reads_as_done(name: str) -> None:
    would = row(1, KINDS[name].would, job="llm")
    assert "ould" in sentence(action(would, action=name, dry_run=True))
    assert "ould" not in sentence(action(row(1, job="llm"), action=name))


def test_a_dry_run_says_when_jobs_clear_unless_all_do_at_once() -> None:
    now, at_step = ([{**each, "mode": mode} for each in some] for mode, some in (("now", OTHERS), ("step", RANKS)))
    spread = [row(5, "would_clear", workload="big", mode="idle", reason="rank 1 of 2 does not report here")]
    assert sentence(action(*now, dry_run=True, deadline_seconds=45.0)) == "Stays free 5.0 GiB."
    text = sentence(action(*now, *at_step, *spread, dry_run=True, deadline_seconds=45.0))
    assert text.endswith(
        " At the end of a step, within 45 s: llm (2 ranks). When idle, within 45 s: big rank 0, because rank 1 of 2 "
        "does not report here. At once: 2 processes."
    )


def test_a_sleep_waits_for_an_idle_engine_for_its_own_time() -> None:
    times: dict[str, Any] = {"action": "release_memory", "deadline_seconds": 30.0, "wait_idle_seconds": 5.0}
    would = row(1, "would_release", workload="chat", rank="", mode="idle", freed_bytes=None)
    assert sentence(action(would, dry_run=True, **times)) == "Would put chat to sleep. When idle, within 5 s: chat."
    pending = [{"pid": 1, "workload": "chat", "rank": "", "job": "chat", "at_step": None, "mode": "idle"}]
    running = action(state="running", pending=pending, **times)
    assert sentence(running) == "Waiting for chat to be idle, at most 5 s."


def test_an_action_without_a_match_says_that_there_is_nothing_to_do() -> None:
    assert "nothing to do" in sentence(action())


@pytest.mark.parametrize(
    ("results", "name"),
    [
        ([row(1, workload="llm", rank="3")], "llm rank 3"),
        ([row(1, workload="llm"), row(1, workload="llm", gpu="1")], "llm rank 0"),
        ([row(1, workload="llm"), row(2, workload="llm")], "llm (2 ranks)"),
        ([row(1, workload="llm", rank=""), row(2, workload="llm")], "llm (2 processes)"),
        ([row(1, workload="", rank="", job="python train.py")], "python train.py"),
        ([row(pid, workload="", rank="", job="python train.py") for pid in (1, 2)], "2 processes"),
        ([row(1, workload="", rank="")], "pid 1"),
        ([row(1, instance="a", workload="llm"), row(1, instance="b", workload="llm")], "llm (2 ranks)"),
    ],
)
def test_results_are_named_by_their_job(results: list[dict[str, Any]], name: str) -> None:
    assert subject(results) == name


def test_a_running_action_says_what_it_waits_for() -> None:
    engine = {"pid": 9, "title": "VLLM::EngineCore", "gpu": "0", "uuid": "GPU-0", "until_unix_seconds": 3600.0}
    ranks = [{"pid": pid, "workload": "llm", "rank": str(pid), "job": "llm", "at_step": 9} for pid in (0, 1)]
    for changes, text in (
        ({"mode": "step"}, "Waiting for the end of a step of llm (2 ranks), at most 30 s."),
        ({"mode": "idle"}, "Waiting for llm (2 ranks) to be idle, at most 30 s."),
        ({"mode": "now"}, "Waiting for llm (2 ranks)."),
    ):
        pending = [{**rank, **changes} for rank in ranks]
        assert sentence(action(state="running", pending=pending, deadline_seconds=30.0)) == text
    assert "VLLM::EngineCore" in sentence(action(state="running", waits_for=[engine]))
