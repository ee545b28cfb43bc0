"""The exporter's own counters and histograms."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from gpumem_exporter.actions.model import Action, ActionResult
from gpumem_exporter.actions.request import Target
from gpumem_exporter.collectors.instruments import Instruments


def action(*results: ActionResult, dry_run: bool = False) -> Action:
    target = Target(all=True)
    return Action(
        "id", "empty_cache", "done", "me", 0.0, target, dry_run=dry_run, results=results, duration_seconds=0.02
    )


def result(pid: int, uuid: str, outcome: str = "done", freed: int | None = None) -> ActionResult:
    return ActionResult(pid, "w", "0", "0", uuid, outcome, freed_bytes=freed)


def test_an_action_counts_once_per_process_and_its_freed_bytes_add_up() -> None:
    own = CollectorRegistry()
    instruments = Instruments(own)

    instruments.observe_action(
        action(result(1, "a", freed=5), result(1, "b", freed=6), result(2, "a", freed=-4), result(3, "a", "expired"))
    )
    instruments.observe_action(action(result(1, "a", freed=100), dry_run=True))

    assert own.get_sample_value("gpumem_actions_total", {"action": "empty_cache", "outcome": "done"}) == 2
    assert own.get_sample_value("gpumem_actions_total", {"action": "empty_cache", "outcome": "expired"}) == 1
    assert own.get_sample_value("gpumem_action_freed_bytes_total", {"action": "empty_cache"}) == 11
    assert own.get_sample_value("gpumem_action_duration_seconds_count", {"action": "empty_cache"}) == 1
    assert own.get_sample_value("gpumem_action_duration_seconds_sum", {"action": "empty_cache"}) == 0.02


def test_counters_of_actions_exist_before_the_first_action() -> None:
    own = CollectorRegistry()
    Instruments(own)

    assert own.get_sample_value("gpumem_actions_total", {"action": "reset_peak", "outcome": "gone"}) == 0
    assert own.get_sample_value("gpumem_processes_dropped_total") == 0
