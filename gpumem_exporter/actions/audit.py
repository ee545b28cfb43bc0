"""Records actions: each before a process gets its command, and its end before the caller gets the reply.

With `--storage.path`, the records are on disk by then. Otherwise only ends are recorded, in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from gpumem_client.wire.reason_codes import ReasonCode
from gpumem_exporter.actions.action import Action, ActionResult
from gpumem_exporter.actions.action_options import MAX_DEADLINE_SECONDS, ActionRequest, Target
from gpumem_exporter.actions.dispatcher import Dispatcher
from gpumem_exporter.actions.lifecycle import RunningAction
from gpumem_exporter.actions.selection import SelectedProcess
from gpumem_exporter.core.event import ACTION_REQUESTED, PLACE, Event, Query
from gpumem_exporter.core.recorders import Journal

_RESTARTED = "the exporter restarted before the result arrived; the action may have been done"
_RESTORED_SECONDS = 2 * MAX_DEADLINE_SECONDS
_WAIT_SECONDS = 5.0
_PAGE = 500
# Of 1 MiB or 500 records each. The audit trail may have many times more than the dispatcher keeps.
_LAST_PAGES = 8
_COMMON = ("id", "action", "requested_by", "caller", "created_unix_seconds", "reason", "mode", "group", "at_step")
_LOGGED = ("id", "action", "state", "requested_by", "reason", "freed_bytes", "duration_seconds")
_OF_REQUEST = ("action", "reason", "mode")
_RESULT = (*PLACE, "outcome", "reason", "reason_code", "freed_bytes", "step")

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Audit:
    """Records actions and reads them after a restart; `durable` if the records are on disk. Event loop only."""

    journal: Journal
    durable: bool
    wall_clock: Callable[[], float]
    count: Callable[[Action], None]
    poll_soon: Callable[[], None]
    _ends: dict[str, Future[bool]] = field(default_factory=dict, init=False)
    _restored: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    async def record(self, running: RunningAction) -> None:
        """Record a new action; return when it is on disk, or when the disk fails."""
        await self.journal.wait_until_kept(self.journal.put(requested_event(running)))

    def finished(self, action: Action) -> None:
        """Count, log and record the end of an action, and poll the driver."""
        self.count(action)
        request = action.request
        fields = {
            **action.values(_LOGGED),
            "target": request.target.describe(),
            "dry_run": str(request.dry_run).lower(),
            "outcomes": ",".join(f"{outcome}:{count}" for outcome, count in sorted(action.outcomes.items())),
        }
        _log.log(logging.DEBUG if action.unlisted else logging.INFO, "action finished", extra={"fields": fields})
        self.store_end(action)
        if not request.dry_run:
            self.poll_soon()

    def store_end(self, action: Action) -> None:
        """Record the end of an action. A dry run has no event."""
        if action.request.dry_run or action.unlisted:
            return
        stored = self.journal.put(action_event(action, self.wall_clock()))
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
        since_unix_seconds = self.wall_clock() - _RESTORED_SECONDS
        query = Query(since_unix_seconds=since_unix_seconds, types=(ACTION_REQUESTED, "action"), limit=_PAGE)
        try:
            self._restore(dispatcher, await self.journal.pages(query, last=_LAST_PAGES))
        except Exception:  # noqa: BLE001 - another attempt would fail in the same way
            _log.exception("cannot restore the actions before this start")
        finally:
            self._restored.set()

    def _restore(self, dispatcher: Dispatcher, events: Sequence[Event]) -> None:
        requested: dict[str, Action] = {}
        ended: dict[str, Action | None] = {}
        for event in events:
            action_id = str(event.detail.get("id"))
            try:
                if event.type == ACTION_REQUESTED:
                    requested[action_id] = read_requested(event)
                else:
                    ended[action_id] = None  # it has ended, even if it cannot be read
                    ended[action_id] = read_action(event)
            except Exception:  # noqa: BLE001 - another version may have written the event; the others are still read
                _log.exception("cannot read a recorded action", extra={"fields": {"event": event.id}})
        for action_id, lost in requested.items():
            if (end := ended.get(action_id)) is not None:
                ended[action_id] = replace(end, **lost.values(("request", "deadline_seconds", "idempotency_key")))
            elif action_id not in ended and dispatcher.get(action_id) is None:
                ended[action_id] = lost
                self.finished(lost)
        known = [action for action in ended.values() if action is not None]
        for action in sorted(known, key=lambda action: action.created_unix_seconds, reverse=True):
            dispatcher.actions.restore(action)


# Actions as events, and back after a restart


def action_event(action: Action, finished_unix_seconds: float) -> Event:
    """Build the event of a finished action.

    Its columns have the device or the process only if all results have the same one.
    """
    results = [
        {name: getattr(result, name) for name in _RESULT} | ({"profile": result.profile} if result.profile else {})
        for result in action.results
    ]
    # The log leaves out what is too long.
    ended = {"state": action.state, "duration_seconds": action.duration_seconds, "freed_bytes": action.freed_bytes}
    detail = {**_common_detail(action), **ended, "results": results, "results_left_out": 0}
    return Event("action", finished_unix_seconds, **place_of(action.results), owner=action.share, detail=detail)


def requested_event(running: RunningAction) -> Event:
    """Build the record of a requested action."""
    action = running.action
    processes: list[ActionResult | SelectedProcess] = [
        *action.results,
        *(part.target for part in running.parts.values()),
    ]
    detail = {
        **_common_detail(action),
        "request": {name: value for name, value in asdict(action.request).items() if name != "target"},
        "idempotency_key": action.idempotency_key,
        "processes": list(dict.fromkeys((each.pid, each.workload, each.rank) for each in processes)),
    }
    return Event(ACTION_REQUESTED, action.created_unix_seconds, owner=action.share, detail=detail)


def read_requested(event: Event) -> Action:
    """Restore a requested action from its record, as it has ended unless its end is recorded, too."""
    detail = event.detail
    # Processes that keep its command forget it. It is unknown whether other processes have run it.
    results = tuple(
        ActionResult(pid, workload, rank, "", "", "failed", _RESTARTED, ReasonCode.EXPORTER_RESTARTED)
        for pid, workload, rank in detail["processes"]
    )
    key = detail["idempotency_key"]
    return _action(detail, detail["request"], state="failed", results=results, idempotency_key=key)


def read_action(event: Event) -> Action:
    """Restore the action from an `action` event, without the results that the event left out."""
    detail = event.detail
    results = tuple(ActionResult(**result) for result in detail["results"])
    ended = {"state": detail["state"], "duration_seconds": detail["duration_seconds"]}
    return _action(detail, {name: detail[name] for name in _OF_REQUEST}, results=results, **ended)


def _common_detail(action: Action) -> dict[str, Any]:
    return {**action.values(_COMMON), "target": action.request.target.document()}


def _action(detail: Mapping[str, Any], request: Mapping[str, Any], **ended: Any) -> Action:
    common = {name: detail[name] for name in _COMMON if name not in _OF_REQUEST}
    asked = ActionRequest(target=Target(**detail["target"]), **request)
    return Action(request=asked, deadline_seconds=asked.deadline_seconds, **common, **ended)


def place_of(results: Sequence[ActionResult]) -> dict[str, Any]:
    """Return an event's columns for these results; a column is None unless all results have the same value."""
    values = {name: {getattr(result, name) for result in results} for name in PLACE}
    return {name: of_all.pop() if len(of_all) == 1 else None for name, of_all in values.items()}
