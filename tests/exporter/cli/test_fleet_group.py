from __future__ import annotations

import re
from typing import Any

import pytest

from gpumem_client.wire.errors import ExporterUnreachableError
from gpumem_exporter.actions.group import GROUP_LEAD_SECONDS
from gpumem_exporter.cli.fleet.group import SUBMIT_SECONDS, Group, form_group, ranks_query
from gpumem_exporter.cli.fleet.requests import ExporterRequest
from gpumem_exporter.cli.fleet.selection import Exporter, Failure
from gpumem_exporter.errors import GroupIncompleteError
from tests.support.builders import Clock
from tests.support.fleet_builders import A, B, C, ScriptedExporter, action, fleet_of, process, row

LEAD = SUBMIT_SECONDS + GROUP_LEAD_SECONDS
Readings = dict[Exporter, list[dict[str, Any]] | Failure]


def rank(pid: int, number: int, **changes: Any) -> dict[str, Any]:
    return process(pid, **{"rank": str(number), "step": 50, "step_seconds": 0.1, **changes})


def of(*processes: dict[str, Any]) -> list[dict[str, Any]]:
    return list(processes)


def group(
    readings: Readings, requested_seconds: float = 0.0, now: float = 0.0, deadline_seconds: float | None = 60.0
) -> Group:
    return form_group("train", readings, requested_seconds, deadline_seconds=deadline_seconds, clock=lambda: now)


def two_nodes(**second: Any) -> Readings:
    return {A: of(rank(1, 0), process(9, workload="other")), B: of(rank(1, 1, **second))}


def test_the_step_leaves_time_to_submit_and_to_cancel() -> None:
    found = group({**two_nodes(step=48, world_size=2), C: of(process(5, workload="other"))})
    assert found.at_step == 50 + round(LEAD / 0.1)
    assert [(one.exporter, one.pid, one.rank) for one in found.processes] == [(A, 1, "0"), (B, 1, "1")]


def test_the_step_counts_the_age_of_samples() -> None:
    late: Readings = {A: of(rank(1, 0, sample_age_seconds=0.5)), B: of(rank(2, 1))}
    assert group(late, 10.0, now=11.5).at_step == 50 + round((0.5 + 1.5 + LEAD) / 0.1)


def test_a_group_says_which_ranks_it_adds_to_the_selected_ones() -> None:
    found = group(two_nodes())
    first, second = found.processes
    assert found.added([first]) == "--group adds 1 rank to the ranks of the query: rank 1 (pid 1 on node2:9844)"
    assert found.added([first, second]) == ""


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
def test_a_rank_that_cannot_take_part_stops_the_group(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(GroupIncompleteError, match=named):
        group(two_nodes(**changes))


def test_a_group_needs_every_exporter_and_a_rank() -> None:
    with pytest.raises(GroupIncompleteError, match=r"node3:9844\b.*: silent-x\b"):
        group({**two_nodes(), C: Failure("failed", "silent-x")})
    with pytest.raises(GroupIncompleteError, match=r"\btrain\b"):
        group({C: of()})


def test_without_a_deadline_ranks_with_long_steps_have_time() -> None:
    long_steps = {"step": 50, "step_seconds": 40.0}
    readings: Readings = {A: of(rank(1, 0, **long_steps)), B: of(rank(1, 1, **long_steps))}
    found = group(readings, deadline_seconds=None)
    assert found.deadline_seconds > (found.at_step - 50) * 40.0


def test_the_ranks_query_escapes_the_workload() -> None:
    assert ranks_query('a"b\\é') == 'max_over_time(gpumem_reporter_up{workload="a\\"b\\\\é"}[15m])'


BODY = {"action": "empty_cache", "dry_run": False, "mode": "step", "group": True}
RUNNING = action(state="running")


def run(exporters: dict[Exporter, ScriptedExporter], clock: Clock | None = None) -> tuple[list[ExporterRequest], str]:
    clock = clock or Clock()
    found = group({exporter: two_nodes()[exporter] for exporter in exporters})
    return found.act(fleet_of(exporters, clock), BODY, wait_seconds=40.0, clock=clock)


@pytest.mark.parametrize(
    ("submits", "later", "reason"),
    [
        ([ExporterUnreachableError("silent-x")], [], "node2:9844: failed: silent-x"),
        ([action(row(1, "refused", rank="1", reason="no"), state="failed")], [], "node2:9844: refused: pid 1: no"),
        (
            [RUNNING],
            [action(row(1, "expired", rank="1", reason="no word"), state="running"), RUNNING],
            "node2:9844: expired: pid 1: no word",
        ),
        ([RUNNING], [ExporterUnreachableError("silent-x")], "node2:9844: failed: "),
    ],
)
def test_the_first_failure_cancels_the_other_exporters(submits: list[Any], later: list[Any], reason: str) -> None:
    canceled = action(row(1, "refused", reason="canceled"), state="failed")
    first = ScriptedExporter(submits=[RUNNING], later=[RUNNING], cancels=[canceled])
    second = ScriptedExporter(submits=submits, later=later, cancels=[RUNNING])
    (one, _), cancel_reason = run({A: first, B: second})
    assert cancel_reason.startswith(reason)
    assert first.requests_of("cancel") == ["a1"]
    assert one.action == canceled
    assert len(second.requests_of("cancel")) <= 1


def test_submitting_that_takes_too_long_for_the_step_cancels_the_group() -> None:
    clock = Clock()
    slow = ScriptedExporter(
        submits=[RUNNING], cancels=[action(state="failed")], on_submit=lambda: clock.sleep(SUBMIT_SECONDS + 0.1)
    )
    _, cancel_reason = run({A: slow}, clock)
    assert re.search(r"\b3\.1 s\b.*\bstep 130\b", cancel_reason)
    assert slow.requests_of("cancel") == ["a1"]


def test_ctrl_c_cancels_the_group() -> None:
    class Interrupted(Clock):
        def sleep(self, seconds: float) -> None:
            raise KeyboardInterrupt

    exporter = ScriptedExporter(submits=[RUNNING], cancels=[action(state="failed")])
    with pytest.raises(KeyboardInterrupt):
        run({A: exporter}, Interrupted())
    assert exporter.requests_of("cancel") == ["a1"]
