"""The event of a rule that stops."""

from __future__ import annotations

from dataclasses import asdict

from gpumem_exporter.actions.action_events import place_of
from gpumem_exporter.core.event import Event
from gpumem_exporter.features.policy.evaluation import Stop


def policy_stopped_event(stop: Stop, stopped_unix_seconds: float, until: str) -> Event:
    """Build the event of a rule that stops acting on a process or the ranks of a workload, because it did not help."""
    return Event(
        "policy_stopped",
        stopped_unix_seconds,
        **place_of(stop.action.results),
        owner=stop.action.share,
        detail={
            "rule": stop.rule.name,
            "action": stop.action.action,
            "reason": stop.reason,
            "until": until,
            "tries": [asdict(tried) for tried in stop.tries],
        },
    )
