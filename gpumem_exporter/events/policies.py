"""Rules of a policy that have stopped acting somewhere, as events."""

from __future__ import annotations

from dataclasses import asdict

from gpumem_exporter.actions.policy.engine import Stop
from gpumem_exporter.events.actions import about
from gpumem_exporter.events.model import Event

__all__ = ["policy_stopped_event"]


def policy_stopped_event(stop: Stop, stopped_unix_seconds: float) -> Event:
    """The event of a rule that leaves a process, or the ranks of a workload, alone since it has not helped there."""
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
