"""Records actions: each before a process gets its command, and its end before the caller gets the reply.

With `--storage.path`, the records are on disk by then. Otherwise only ends are recorded, in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace
from typing import Any, TypeVar

from gpumem_client.wire.reason_codes import ReasonCode
from gpumem_exporter.actions.action import Action, ActionResult, SubmittedAction
from gpumem_exporter.actions.action_options import MAX_DEADLINE_SECONDS, ActionRequest, Target
from gpumem_exporter.actions.dispatcher import Dispatcher
from gpumem_exporter.core.event import ACTION_REQUESTED, PLACE, Event, Query
from gpumem_exporter.core.recorders import Journal

T = TypeVar("T")

_RESTARTED = "the exporter restarted before the result arrived; the action may have been done"
_RESTORED_SECONDS = 2 * MAX_DEADLINE_SECONDS
_WAIT_SECONDS = 5.0
_PAGE = 500
# The dispatcher keeps about this number of actions and results. The audit trail may have many times more.
_MAX_ROWS = 16384
_COMMON = ("id", "action", "requested_by", "caller", "created_unix_seconds", "reason", "mode", "group", "at_step")
_RESULT = (*PLACE, "outcome", "reason", "reason_code", "freed_bytes", "step")

_log = logging.getLogger(__name__)


class Audit:
    """Records actions and reads them after a restart; `durable` if the records are on disk. Event loop only."""

    def __init__(
        self,
        journal: Journal,
        *,
        durable: bool,
        wall_clock: Callable[[], float],
        count: Callable[[Action], None],
        poll_soon: Callable[[], None],
    ) -> None:
        self.journal = journal
        self.durable = durable
        self._wall_clock = wall_clock
        self._count = count
        self._poll_soon = poll_soon
        self._ends: dict[str, Future[bool]] = {}
        self._restored = asyncio.Event()

    async def record(self, submitted: SubmittedAction) -> None:
        """Record a new action; return when it is on disk, or when the disk fails."""
        await self.journal.wait_until_kept(self.journal.put(requested_event(submitted)))

    def finished(self, action: Action) -> None:
        """Count, log and record the end of an action, and poll the driver."""
        self._count(action)
        fields = {
            "id": action.id,
            "action": action.action,
            "state": action.state,
            "target": action.target.describe(),
            "requested_by": action.requested_by,
            "reason": action.reason,
            "dry_run": str(action.dry_run).lower(),
            "outcomes": ",".join(f"{outcome}:{count}" for outcome, count in sorted(action.outcomes.items())),
            "freed_bytes": action.freed_bytes,
            "duration_seconds": action.duration_seconds,
        }
        _log.log(logging.DEBUG if action.unlisted else logging.INFO, "action finished", extra={"fields": fields})
        self.store_end(action)
        if not action.dry_run:
            self._poll_soon()

    def store_end(self, action: Action) -> None:
        """Record the end of an action. A dry run has no event."""
        if action.dry_run or action.unlisted:
            return
        stored = self.journal.put(action_event(action, self._wall_clock()))
        if self.durable:
            self._ends = {known: end for known, end in self._ends.items() if not end.done()}
            self._ends[action.id] = stored

    async def wait_until_stored(self, action: Action) -> None:
        """Return when the end of an action is on disk, or when the disk fails."""
        end = self._ends.get(action.id)
        if end is not None:
            await self.journal.wait_until_kept(end)

    async def wait_until_restored(self) -> None:
        """Wait until the dispatcher knows the actions before the restart, for some seconds at most."""
        if self.durable and not self._restored.is_set():
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._restored.wait(), _WAIT_SECONDS)

    async def restore(self, dispatcher: Dispatcher) -> None:
        """Give the dispatcher the actions before the restart."""
        if not self.durable:
            return
        since_unix_seconds = self._wall_clock() - _RESTORED_SECONDS
        query = Query(since_unix_seconds=since_unix_seconds, types=(ACTION_REQUESTED, "action"), limit=_PAGE)
        try:
            self._restore(dispatcher, await self.journal.pages(query, max_rows=_MAX_ROWS))
        except Exception:  # noqa: BLE001 - another attempt would fail in the same way
            _log.exception("cannot restore the actions before this start")
        finally:
            self._restored.set()

    def _restore(self, dispatcher: Dispatcher, events: Sequence[Event]) -> None:
        submitted = dict(_readable(events, ACTION_REQUESTED, read_requested))
        finished = dict(_readable(events, "action", read_action))
        ended_ids = {event.detail.get("id") for event in events if event.type == "action"}
        known = [(action, submitted.get(action_id)) for action_id, action in finished.items()]
        # After a restart, an action without a recorded end has failed. Processes that keep its command forget it. It is
        # unknown whether other processes have run it.
        for action_id, origin in submitted.items():
            if action_id not in ended_ids and dispatcher.get(action_id) is None:
                results = tuple(
                    ActionResult(pid, workload, rank, "", "", "failed", _RESTARTED, ReasonCode.EXPORTER_RESTARTED)
                    for pid, workload, rank in origin.processes
                )
                lost = replace(origin.action, state="failed", results=results)
                known.append((lost, origin))
                self.finished(lost)
        for action, submission in sorted(known, key=lambda pair: pair[0].created_unix_seconds, reverse=True):
            dispatcher.actions.restore(action, submission)


def _readable(events: Sequence[Event], type_: str, read: Callable[[Event], T]) -> Iterator[tuple[str, T]]:
    """Yield the readable actions by id. Another version of the exporter may have written other events."""
    for event in events:
        if event.type == type_:
            try:
                yield event.detail["id"], read(event)
            except Exception:  # noqa: BLE001 - the other events are still read
                _log.exception("cannot read a recorded action", extra={"fields": {"event": event.id}})


# Actions as events, and back after a restart


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
            "results": [
                {name: getattr(result, name) for name in _RESULT}
                | ({"profile": result.profile} if result.profile else {})
                for result in results
            ],
            "results_left_out": 0,  # the log leaves out what is too long
        },
    )


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
