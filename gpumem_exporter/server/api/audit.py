"""Answering for actions: each is on the disk before a process hears of it, and its end before its caller does.

Only where `--storage.path` names a folder: what is in memory alone answers for nothing after a restart. Then an action
that the exporter before this one had begun, and not seen the end of, has failed: its processes are told to forget it
where it still waits there, and whatever became of it elsewhere is not known.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TypeVar

from gpumem_exporter.actions.dispatcher import Dispatcher
from gpumem_exporter.actions.model import Action, ActionResult, SubmittedAction
from gpumem_exporter.errors import StorageError
from gpumem_exporter.events import Event, Query, Recorder
from gpumem_exporter.events.actions import read_action, read_asked
from gpumem_exporter.server.api.event_writes import read_events, wait_until_kept

__all__ = ["Audit"]

T = TypeVar("T")

RESTARTED = "the exporter was restarted before its answer came; whether it was done is not known"
_RECALLED_SECONDS = 7200.0
"""Twice the longest deadline of an action."""
_RETRY_SECONDS = 1.0
_WAIT_SECONDS = 5.0
_PAGE = 500

_log = logging.getLogger(__name__)


class Audit:
    """Writes actions down and finds them again. For the event loop.

    Args:
        events: where they are written.
        durable: they outlive this process.
        wall_clock: seconds of the Unix epoch.
        on_lost: told of each action whose end a restart has cut off.
    """

    def __init__(
        self,
        events: Recorder,
        *,
        durable: bool,
        wall_clock: Callable[[], float],
        on_lost: Callable[[Action], None],
    ) -> None:
        self._events = events
        self.durable = durable
        self._wall_clock = wall_clock
        self._on_lost = on_lost
        self._ends: dict[str, Future[bool]] = {}
        self._recalled = asyncio.Event()

    async def write_down(self, asked: SubmittedAction) -> None:
        """An action begins: return when that is on the disk, or when the disk fails."""
        await wait_until_kept(self._events.log, self._events.action_asked(asked))

    def finished(self, action: Action) -> None:
        """An action has ended."""
        kept = self._events.action_finished(action)
        if kept is not None and self.durable:
            self._ends = {known: end for known, end in self._ends.items() if not end.done()}
            self._ends[action.id] = kept

    async def kept(self, action: Action) -> None:
        """Return when an action's end is on the disk, or when the disk fails."""
        end = self._ends.get(action.id)
        if end is not None:
            await wait_until_kept(self._events.log, end)

    async def recalled(self) -> None:
        """Return when the actions of before are known; not later than after some seconds."""
        if self.durable and not self._recalled.is_set():
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._recalled.wait(), _WAIT_SECONDS)

    async def recall(self, dispatcher: Dispatcher) -> None:
        """Have the dispatcher know the actions of before. The disk is asked until it answers."""
        if not self.durable:
            return
        begun = self._wall_clock()
        try:
            while True:
                try:
                    events = await self._read(begun - _RECALLED_SECONDS)
                except StorageError:
                    await asyncio.sleep(_RETRY_SECONDS)  # the log says by itself what is wrong with it
                    continue
                break
            self._tell(dispatcher, events)
        except Exception:  # noqa: BLE001 - it would be the same the next time, and nobody waits for this task
            _log.exception("the actions before this start cannot be recalled")
        finally:
            self._recalled.set()

    def _tell(self, dispatcher: Dispatcher, events: Sequence[Event]) -> None:
        asked = dict(_readable(events, "action_asked", read_asked))
        ended = dict(_readable(events, "action", read_action))
        have_ended = {event.detail.get("id") for event in events if event.type == "action"}
        known = [(action, asked.get(id_)) for id_, action in ended.items()]
        for id_, one in asked.items():
            if id_ not in have_ended and dispatcher.get(id_) is None:
                lost = _lost(one)
                known.append((lost, one))
                self._on_lost(lost)
                self.finished(lost)
        for action, how in sorted(known, key=lambda pair: pair[0].created_unix_seconds, reverse=True):
            dispatcher.recall(action, how)

    async def _read(self, since_unix_seconds: float) -> list[Event]:
        query = Query(since_unix_seconds=since_unix_seconds, types=("action_asked", "action"), limit=_PAGE)
        events: list[Event] = []
        while True:
            page = await read_events(self._events.log, query)
            events += page.events
            if not page.more:
                return events
            query = replace(query, after=page.next_after)


def _readable(events: Sequence[Event], type_: str, read: Callable[[Event], T]) -> Iterator[tuple[str, T]]:
    """What can be read of these; another version of the exporter may have written what this one cannot."""
    for event in events:
        if event.type == type_:
            try:
                yield event.detail["id"], read(event)
            except Exception:  # noqa: BLE001 - told, and the others are read
                _log.exception("an action of before cannot be read", extra={"fields": {"event": event.id}})


def _lost(asked: SubmittedAction) -> Action:
    results = tuple(
        ActionResult(pid=pid, workload=workload, rank=rank, gpu="", uuid="", outcome="failed", reason=RESTARTED)
        for pid, workload, rank in asked.processes
    )
    return replace(asked.action, state="failed", results=results)
