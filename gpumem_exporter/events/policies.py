"""Convert stops of policy rules to events."""

from __future__ import annotations

from dataclasses import asdict

from gpumem_exporter.actions.policy.outcomes import Stop
from gpumem_exporter.events.actions import about
from gpumem_exporter.events.model import Event

__all__ = ["policy_stopped_event"]


def policy_stopped_event(stop: Stop, stopped_unix_seconds: float) -> Event:
    """Build the event of a rule that stops acting on a process or the ranks of a workload, because it did not help."""
    return Event(
        "policy_stopped",
        stopped_unix_seconds,
        **about(stop.action.results),
        detail={
            "rule": stop.rule.name,
            "action": stop.action.action,
            "reason": stop.reason,
            "tries": [asdict(tried) for tried in stop.tries],
        },
    )
