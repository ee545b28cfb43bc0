"""Rules of a policy that have stopped acting somewhere, as events."""

from __future__ import annotations

from dataclasses import asdict

from gpumem_exporter.actions.policy_engine import Stop
from gpumem_exporter.events.actions import one_of
from gpumem_exporter.events.model import Event

__all__ = ["policy_stopped_event"]


def policy_stopped_event(stop: Stop, stopped_unix_seconds: float) -> Event:
    """The event of a rule that leaves a process, or the ranks of a workload, alone since it has not helped there."""
    results = stop.action.results
    return Event(
        "policy_stopped",
        stopped_unix_seconds,
        gpu=one_of(result.gpu for result in results),
        uuid=one_of(result.uuid for result in results),
        pid=one_of([result.pid for result in results]),
        workload=one_of(result.workload for result in results),
        rank=one_of(result.rank for result in results),
        detail={
            "rule": stop.rule.name,
            "action": stop.action.action,
            "reason": stop.reason,
            "tries": [asdict(tried) for tried in stop.tries],
        },
    )
