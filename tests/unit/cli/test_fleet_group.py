from __future__ import annotations

import re
from typing import Any

import pytest

from gpumem_exporter.actions.group import GROUP_LEAD_SECONDS
from gpumem_exporter.cli.fleet.asks import Ask, Failure
from gpumem_exporter.cli.fleet.group import ASKING_SECONDS, Group, Reading, gather, ranks_query
from gpumem_exporter.cli.fleet.naming import Place
from gpumem_exporter.errors import ExporterUnreachableError, GroupIncompleteError
from tests.support.fleet_builders import A, B, C, Clock, ScriptedExporter, action, nodes, process, row

LEAD = ASKING_SECONDS + GROUP_LEAD_SECONDS


def rank(pid: int, number: int, **changes: Any) -> dict[str, Any]:
    return process(pid, **{"rank": str(number), "step": 50, "step_seconds": 0.1, **changes})


def group(readings: dict[Place, Reading | Failure], now: float = 0.0, deadline_seconds: float = 60.0) -> Group:
    return gather("train", readings, deadline_seconds=deadline_seconds, clock=lambda: now)


def two_nodes(**second: Any) -> dict[Place, Reading | Failure]:
    others = [process(9, workload="other")]
    return {A: Reading([rank(1, 0), *others], 0.0), B: Reading([rank(1, 1, **second)], 0.0)}


def test_the_step_lies_so_far_ahead_that_every_exporter_can_be_asked_and_called_off() -> None:
    found = group(two_nodes(step=48))
    assert found.at_step == 50 + round(LEAD / 0.1)
    assert [(member.place, member.pid, member.rank) for member in found.members] == [(A, 1, "0"), (B, 1, "1")]


def test_ranks_that_are_as_many_as_they_say_are_a_whole_group() -> None:
    assert len(group(two_nodes(world_size=2)).members) == 2


def test_what_went_by_since_a_rank_said_its_step_counts() -> None:
    late = {A: Reading([rank(1, 0, sample_age_seconds=0.5)], 10.0), B: Reading([rank(2, 1)], 10.0)}
    assert group(late, now=11.5).at_step == 50 + round((0.5 + 1.5 + LEAD) / 0.1)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"step": None}, r"pid 1 on node2:9844 \(rank 1\)"),
        ({"step_seconds": None}, r"pid 1 on node2:9844 \(rank 1\)"),
        ({"reporting": False, "state": "silent"}, r"pid 1 on node2:9844 \(rank 1\)"),
        ({"rank": "0"}, r"rank 0\b.*\b2\b.*pid 1 on node1:9844 \(rank 0\), pid 1 on node2:9844 \(rank 0\)"),
        ({"world_size": 2, "rank": "2"}, r"\b2 ranks\b.*\brank 1\b"),
        ({"world_size": 10**12}, r"\b1000000000000 ranks\b.*\brank 2, 3, [4-8, ]+, 9, …;"),
        ({"step_seconds": 40.0}, r"step 130\b.*\b3200\.0 s\b.*\b60 s\b"),
    ],
)
def test_with_a_rank_that_cannot_nothing_is_asked(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(GroupIncompleteError, match=named):
        group(two_nodes(**changes))


def test_with_an_exporter_that_cannot_be_read_nothing_is_asked() -> None:
    with pytest.raises(GroupIncompleteError, match=r"node3:9844\b.*: nobody\b"):
        group({**two_nodes(), C: Failure("failed", "nobody")})


def test_an_exporter_whose_ranks_have_gone_is_none_of_the_group() -> None:
    assert len(group({**two_nodes(), C: Reading([process(5, workload="other")], 0.0)}).members) == 2
    with pytest.raises(GroupIncompleteError, match=r"\btrain\b"):
        group({C: Reading([], 0.0)})


def test_a_workload_may_be_called_anything() -> None:
    assert ranks_query('a"b\\é') == 'max_over_time(gpumem_reporter_up{workload="a\\"b\\\\é"}[15m])'


BODY = {"action": "empty_cache", "dry_run": False, "mode": "step", "group": True}
RUNNING = action(state="running")
DONE = [action(row(1, step=120))], [action(row(1, rank="1", step=120))]


def run(exporters: dict[Place, ScriptedExporter], clock: Clock | None = None) -> tuple[Group, list[Ask]]:
    clock = clock or Clock()
    found = group({place: two_nodes()[place] for place in exporters})
    return found, found.act(nodes(exporters, clock), BODY, wait_seconds=40.0, clock=clock)


def test_every_exporter_is_asked_for_its_ranks_after_the_same_step() -> None:
    exporters = {
        A: ScriptedExporter(begins=[RUNNING], later=[RUNNING, action(row(1))]),
        B: ScriptedExporter(begins=[RUNNING], later=[action(row(1, rank="1"))]),
    }
    found, asks = run(exporters)
    asked = {**BODY, "at_step": found.at_step, "target": {"workload": "train"}}
    assert [exporter.asked_for("begin") for exporter in exporters.values()] == [[asked], [asked]]
    assert (found.called_off, [ask.troubled for ask in asks]) == ("", [False, False])
    assert [exporter.asked_for("cancel") for exporter in exporters.values()] == [[], []]


@pytest.mark.parametrize(
    ("begins", "later", "said"),
    [
        ([ExporterUnreachableError("nobody")], [], "node2:9844: failed: nobody"),
        ([action(row(1, "refused", rank="1", reason="no"), state="failed")], [], "node2:9844: refused: pid 1: no"),
        (
            [RUNNING],
            [action(row(1, "expired", rank="1", reason="no word"), state="running"), RUNNING],
            "node2:9844: expired: pid 1: no word",
        ),
        ([RUNNING], [ExporterUnreachableError("nobody")], "node2:9844: failed: "),
    ],
)
def test_as_soon_as_one_exporter_is_in_trouble_the_others_are_called_off(
    begins: list[Any], later: list[Any], said: str
) -> None:
    taken_back = action(row(1, "refused", reason="cancelled by token@x"), state="failed")
    first = ScriptedExporter(begins=[RUNNING], later=[RUNNING], cancels=[taken_back])
    second = ScriptedExporter(begins=begins, later=later, cancels=[RUNNING])
    clock = Clock()
    found, (one, _) = run({A: first, B: second}, clock)
    assert found.called_off.startswith(said)
    assert first.asked_for("cancel") == ["a1"]
    assert one.action == taken_back
    assert len(second.asked_for("cancel")) <= 1


def test_asking_that_takes_too_long_for_the_step_calls_all_of_them_off() -> None:
    clock = Clock()
    slow = ScriptedExporter(
        begins=[RUNNING], cancels=[action(state="failed")], on_begin=lambda: clock.sleep(ASKING_SECONDS + 0.1)
    )
    found, _ = run({A: slow}, clock)
    assert re.search(r"\b3\.1 s\b.*\bstep 130\b", found.called_off)
    assert slow.asked_for("cancel") == ["a1"]


def test_ctrl_c_takes_back_what_was_asked() -> None:
    class Interrupted(Clock):
        def sleep(self, seconds: float) -> None:
            raise KeyboardInterrupt

    exporter = ScriptedExporter(begins=[RUNNING], cancels=[action(state="failed")])
    with pytest.raises(KeyboardInterrupt):
        run({A: exporter}, Interrupted())
    assert exporter.asked_for("cancel") == ["a1"]
