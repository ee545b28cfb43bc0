"""Finished actions as events."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any, TypeVar

from gpumem_exporter.actions.model import Action, ActionResult
from gpumem_exporter.events.model import Event

__all__ = ["MAX_RESULTS", "action_event", "one_of"]

T = TypeVar("T")

MAX_RESULTS = 512
"""Results that an event holds: the first ones of an action on more, and how many were left out."""


def action_event(action: Action, finished_unix_seconds: float) -> Event:
    """The event of an action that has finished.

    Its columns name the device or the process only where every result is about the same one.
    """
    results = action.results
    return Event(
        "action",
        finished_unix_seconds,
        gpu=one_of(result.gpu for result in results),
        uuid=one_of(result.uuid for result in results),
        pid=one_of([result.pid for result in results]),
        workload=one_of(result.workload for result in results),
        rank=one_of(result.rank for result in results),
        detail={
            "id": action.id,
            "action": action.action,
            "state": action.state,
            "requested_by": action.requested_by,
            "reason": action.reason,
            "target": {name: value for name, value in asdict(action.target).items() if value not in (None, False)},
            "duration_seconds": action.duration_seconds,
            "freed_bytes": action.freed_bytes,
            "results": [_result(result) for result in results[:MAX_RESULTS]],
            "results_left_out": max(0, len(results) - MAX_RESULTS),
        },
    )


def one_of(values: Iterable[T]) -> T | None:
    """The value that all are; None where they differ."""
    different = set(values)
    return different.pop() if len(different) == 1 else None


def _result(result: ActionResult) -> dict[str, Any]:
    names = ("pid", "workload", "rank", "gpu", "uuid", "outcome", "reason", "freed_bytes")
    return {name: getattr(result, name) for name in names}
