"""Converts actions to the events of the audit trail, and back after a restart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, TypeVar

from gpumem_exporter.actions.action import Action, ActionResult, SubmittedAction
from gpumem_exporter.actions.action_options import ActionRequest, Target
from gpumem_exporter.core.event import ACTION_REQUESTED, PLACE, Event

T = TypeVar("T")

_COMMON = ("id", "action", "requested_by", "caller", "created_unix_seconds", "reason", "mode", "group", "at_step")
_RESULT = (*PLACE, "outcome", "reason", "reason_code", "freed_bytes", "step")


def action_event(action: Action, finished_unix_seconds: float) -> Event:
    """Build the event of a finished action.

    Its columns have the device or the process only if all results have the same one.
    """
    results = action.results
    return Event(
        "action",
        finished_unix_seconds,
        **place_of(results),
        owner=action.share,
        detail={
            **_common_detail(action),
            "state": action.state,
            "duration_seconds": action.duration_seconds,
            "freed_bytes": action.freed_bytes,
            "results": [_result(result) for result in results],
            "results_left_out": 0,  # the log leaves out what is too long
        },
    )


def _result(result: ActionResult) -> dict[str, Any]:
    values = {name: getattr(result, name) for name in _RESULT}
    return {**values, "profile": result.profile} if result.profile else values


def requested_event(submitted: SubmittedAction) -> Event:
    """Build the record of a requested action."""
    request = {name: value for name, value in asdict(submitted.request).items() if name != "target"}
    return Event(
        ACTION_REQUESTED,
        submitted.action.created_unix_seconds,
        pid=_one_of([pid for pid, _, _ in submitted.processes]),
        workload=_one_of(workload for _, workload, _ in submitted.processes),
        rank=_one_of(rank for _, _, rank in submitted.processes),
        owner=submitted.action.share,
        detail={
            **_common_detail(submitted.action),
            "request": request,
            "idempotency_key": submitted.idempotency_key,
            "processes": [list(process) for process in submitted.processes],
            "processes_left_out": 0,
        },
    )


def read_requested(event: Event) -> SubmittedAction:
    """Restore a requested action from its record."""
    detail = event.detail
    action = _action(detail, "queued")
    return SubmittedAction(
        action,
        ActionRequest(target=action.target, **detail["request"]),
        detail["idempotency_key"],
        tuple((pid, workload, rank) for pid, workload, rank in detail["processes"]),
    )


def read_action(event: Event) -> Action:
    """Restore the action from an `action` event, without the results that the event left out."""
    detail = event.detail
    results = tuple(ActionResult(**result) for result in detail["results"])
    return replace(_action(detail, detail["state"]), results=results, duration_seconds=detail["duration_seconds"])


def _common_detail(action: Action) -> dict[str, Any]:
    return {**{name: getattr(action, name) for name in _COMMON}, "target": action.target.document()}


def _action(detail: Mapping[str, Any], state: str) -> Action:
    # An earlier version did not record the caller.
    common = {name: detail[name] for name in _COMMON if name in detail}
    return Action(state=state, target=Target(**detail["target"]), **common)


def place_of(results: Sequence[ActionResult]) -> dict[str, Any]:
    """Return an event's columns for these results; a column is None unless all results have the same value."""
    return {name: _one_of([getattr(result, name) for result in results]) for name in PLACE}


def _one_of(values: Iterable[T]) -> T | None:
    """Return the value that all have in common; None if they differ."""
    distinct = set(values)
    return distinct.pop() if len(distinct) == 1 else None
