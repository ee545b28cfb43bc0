"""The exporter's own counters and histograms."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gpumem_exporter.actions.model import Action, ActionResult
from gpumem_exporter.actions.request import Target
from gpumem_exporter.collectors.instruments import Instruments
from gpumem_exporter.core.samples import Snapshot
from tests.support.exposition_builders import exposition, read, text_of


def action(*results: ActionResult, dry_run: bool = False) -> Action:
    target = Target(all=True)
    return Action(
        "id", "empty_cache", "done", "me", 0.0, target, dry_run=dry_run, results=results, duration_seconds=0.02
    )


def result(pid: int, uuid: str, outcome: str = "done", freed: int | None = None) -> ActionResult:
    return ActionResult(pid, "w", "0", "0", uuid, outcome, freed_bytes=freed)


def value(instruments: Instruments, name: str, **labels: str) -> float:
    """Return the value of a series on a page."""
    page = text_of(exposition(instruments), Snapshot(10.0, None))
    return read(text_string_to_metric_families(page))[1][name, frozenset(labels.items())]


def test_an_action_counts_once_per_process_and_its_freed_bytes_add_up() -> None:
    instruments = Instruments()
    instruments.observe_action(
        action(result(1, "a", freed=5), result(1, "b", freed=6), result(2, "a", freed=-4), result(3, "a", "expired"))
    )
    instruments.observe_action(action(result(1, "a", freed=100), dry_run=True))
    assert value(instruments, "gpumem_actions_total", action="empty_cache", outcome="done") == 2
    assert value(instruments, "gpumem_actions_total", action="empty_cache", outcome="expired") == 1
    assert value(instruments, "gpumem_action_freed_bytes_total", action="empty_cache") == 11
    assert value(instruments, "gpumem_action_duration_seconds_count", action="empty_cache") == 1
    assert value(instruments, "gpumem_action_duration_seconds_sum", action="empty_cache") == 0.02
    for bound, count in (("0.01", 0), ("0.025", 1), ("60.0", 1), ("+Inf", 1)):
        assert value(instruments, "gpumem_action_duration_seconds_bucket", action="empty_cache", le=bound) == count


def test_a_policy_rule_starts_at_0_and_its_series_end_with_it() -> None:
    instruments = Instruments()
    instruments.add_policy_rule("a")
    instruments.add_policy_rule("b")
    instruments.count_policy("b", "acted", 3)
    instruments.remove_policy_rule("a")
    assert value(instruments, "gpumem_policy_evaluations_total", rule="b", result="acted") == 3
    assert value(instruments, "gpumem_policy_evaluations_total", rule="b", result="busy") == 0
    with pytest.raises(KeyError):
        value(instruments, "gpumem_policy_evaluations_total", rule="a", result="acted")


def test_counters_of_actions_exist_before_the_first_action() -> None:
    instruments = Instruments()
    assert value(instruments, "gpumem_actions_total", action="reset_peak", outcome="gone") == 0
    assert value(instruments, "gpumem_processes_dropped_total") == 0
