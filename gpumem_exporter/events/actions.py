"""Finished actions as events."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any, TypeVar

from gpumem_exporter.actions.model import Action, ActionResult
from gpumem_exporter.events.model import Event

__all__ = ["MAX_RESULTS", "action_event"]

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
        gpu=_one(result.gpu for result in results),
        uuid=_one(result.uuid for result in results),
        pid=_one([result.pid for result in results]),
        workload=_one(result.workload for result in results),
        rank=_one(result.rank for result in results),
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


def _one(values: Iterable[T]) -> T | None:
    different = set(values)
    return different.pop() if len(different) == 1 else None


def _result(result: ActionResult) -> dict[str, Any]:
    names = ("pid", "workload", "rank", "gpu", "uuid", "outcome", "reason", "freed_bytes")
    return {name: getattr(result, name) for name in names}
