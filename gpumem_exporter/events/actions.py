"""Convert actions and stops of policy rules to events, and events to actions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, TypeVar

from gpumem_exporter.actions.model import Action, ActionResult, SubmittedAction
from gpumem_exporter.actions.request import ActionRequest, Target
from gpumem_exporter.events.model import Event

if TYPE_CHECKING:
    from gpumem_exporter.actions.policy.rule_state import Stop

T = TypeVar("T")

_COLUMNS = ("gpu", "uuid", "pid", "workload", "rank")
_COMMON = ("id", "action", "requested_by", "caller", "created_unix_seconds", "reason", "mode", "group", "at_step")
_RESULT = (*_COLUMNS, "outcome", "reason", "reason_code", "freed_bytes", "step")

MAX_RESULTS = 512
"""The maximum number of results in an event. Of more results, it has the first ones and the number of the others."""


def action_event(action: Action, finished_unix_seconds: float) -> Event:
    """Build the event of a finished action.

    Its columns have the device or the process only if all results have the same one.
    """
    results = action.results
    return Event(
        "action",
        finished_unix_seconds,
        **_about(results),
        owner=action.share,
        detail={
            **_common_detail(action),
            "state": action.state,
            "duration_seconds": action.duration_seconds,
            "freed_bytes": action.freed_bytes,
            "results": [{name: getattr(result, name) for name in _RESULT} for result in results[:MAX_RESULTS]],
            "results_left_out": max(0, len(results) - MAX_RESULTS),
        },
    )


def requested_event(submitted: SubmittedAction) -> Event:
    """Build the event of a requested action."""
    request = {name: value for name, value in asdict(submitted.request).items() if name != "target"}
    return Event(
        "action_asked",
        submitted.action.created_unix_seconds,
        pid=_one_of([pid for pid, _, _ in submitted.processes]),
        workload=_one_of(workload for _, workload, _ in submitted.processes),
        rank=_one_of(rank for _, _, rank in submitted.processes),
        owner=submitted.action.share,
        detail={
            **_common_detail(submitted.action),
            "request": request,
            "idempotency_key": submitted.idempotency_key,
            "processes": [list(process) for process in submitted.processes[:MAX_RESULTS]],
            "processes_left_out": max(0, len(submitted.processes) - MAX_RESULTS),
        },
    )


def read_requested(event: Event) -> SubmittedAction:
    """Restore the requested action from an `action_asked` event."""
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


def policy_stopped_event(stop: Stop, stopped_unix_seconds: float) -> Event:
    """Build the event of a rule that stops acting on a process or the ranks of a workload, because it did not help."""
    return Event(
        "policy_stopped",
        stopped_unix_seconds,
        **_about(stop.action.results),
        owner=stop.action.share,
        detail={
            "rule": stop.rule.name,
            "action": stop.action.action,
            "reason": stop.reason,
            "tries": [asdict(tried) for tried in stop.tries],
        },
    )


def _common_detail(action: Action) -> dict[str, Any]:
    return {**{name: getattr(action, name) for name in _COMMON}, "target": action.target.document()}


def _action(detail: Mapping[str, Any], state: str) -> Action:
    # An earlier version did not record the caller.
    common = {name: detail[name] for name in _COMMON if name in detail}
    return Action(state=state, target=Target(**detail["target"]), **common)


def _about(results: Sequence[ActionResult]) -> dict[str, Any]:
    """Return an event's columns for these results; a column is None unless all results have the same value."""
    return {name: _one_of([getattr(result, name) for result in results]) for name in _COLUMNS}


def _one_of(values: Iterable[T]) -> T | None:
    """Return the value that all have in common; None if they differ."""
    distinct = set(values)
    return distinct.pop() if len(distinct) == 1 else None
