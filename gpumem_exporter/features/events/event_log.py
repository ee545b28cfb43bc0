"""The queue of events, and the thread `gpumem-events` that stores them, so that no other thread waits for the disk.

An event is acknowledged only when it is committed: `EventLog.read` returns committed events only, and the future of
`EventLog.put` is then true.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, replace
from itertools import islice
from operator import attrgetter
from typing import TypeVar

from gpumem_client.wire.errors import StorageError
from gpumem_exporter.core.event import AUDIT_TYPES, Event, Page, Query
from gpumem_exporter.core.recorders import Journal
from gpumem_exporter.core.shares import Shares
from gpumem_exporter.features.events.event_storage import Storage
from gpumem_exporter.node.failures import FailureLog
from gpumem_exporter.page.health import Check, check

T = TypeVar("T")

MAX_WAITING = 4096
"""The maximum number of events in the queue. The largest event, an action on many processes, has tens of KiB."""
MAX_READERS = 16
# An event with long lists, such as an action on many processes, counts once for each of this number of items.
_ITEMS = 16
# The maximum number of events in one commit.
_BATCH = 256
_MAINTENANCE_SECONDS = 60.0
_RETRY_SECONDS = 1.0
# A disk operation that takes longer counts as slow, and no caller waits for it.
_SLOW_SECONDS = 1.0
# The longest time that a reply waits for a commit.
_KEPT_SECONDS = 1.0
_READ_SECONDS = 5.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EventLogStatus:
    """The state of the event log."""

    where: str
    """`memory`, or the path of the file."""
    alive: bool
    error: str
    """Why events cannot be stored now; empty if they can."""
    busy_seconds: float | None
    """The duration of the running disk operation so far; None if there is none."""
    waiting: int
    """The number of events in the queue."""
    dropped: int
    """The number of events dropped since the exporter started."""

    @property
    def prompt(self) -> bool:
        """Whether a commit is expected soon."""
        return self.alive and not self.error and (self.busy_seconds is None or self.busy_seconds < _SLOW_SECONDS)


def events_check(events: EventLogStatus) -> Check:
    """Return whether events are stored."""
    lost = f"; {events.waiting} waiting, {events.dropped} dropped" if events.waiting or events.dropped else ""
    if events.error:
        return check("degraded", events.error + lost)
    if not events.alive:
        return check("degraded", f"the event log has stopped{lost}")
    if not events.prompt:
        return check("degraded", f"{events.where} has not answered for {events.busy_seconds or 0:.0f} s{lost}")
    return check("ok", f"stored in {events.where}{lost}")


class _Waiting:
    """Events that wait for one common commit."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.events = tuple(events)
        self.committed: Future[bool] = Future()
        self.audit = any(event.type in AUDIT_TYPES for event in events)
        self.owner = events[0].owner
        self.size = len(events) + sum(event.items for event in events) // _ITEMS


class EventLog(Journal):
    """Stores and reads events in its own thread, which alone uses the storage. Thread-safe.

    `on_dropped` receives the number of dropped events in the thread that dropped them. `on_committed` receives the new
    events after a commit, before they can be read, in the log's thread. If more than `max_waiting` events are in the
    queue while the disk hangs, the owner with the most loses its latest events, events of the audit trail last.
    """

    def __init__(
        self,
        storage: Storage,
        *,
        clock: Callable[[], float],
        on_dropped: Callable[[int], None],
        on_committed: Callable[[Sequence[Event]], None],
        retry_seconds: float = _RETRY_SECONDS,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        self._storage = storage
        self._clock = clock
        self._on_dropped = on_dropped
        self._on_committed = on_committed
        self._retry_seconds = retry_seconds
        self._changed = threading.Condition()
        # Of all that follows, except where only the log's thread writes.
        self._failures = FailureLog(_log, clock)
        self._waiting: deque[_Waiting] = deque()
        # The first ones of the queue are being stored, so that their owners cannot lose them any more.
        self._being_stored = 0
        # Without those that are being stored.
        self._shares = Shares(max_waiting)
        self._readers: deque[tuple[Query, Future[Page]]] = deque()
        self._dropped = 0
        self._stopping = False
        self._error = ""
        self._busy_since_seconds: float | None = None
        # When the storage is next opened, retried or pruned.
        self._due_seconds = float("-inf")
        self._thread = threading.Thread(target=self._run, name="gpumem-events", daemon=True)

    def start(self) -> None:
        """Open the storage and start to store events. A log can be started once."""
        self._thread.start()

    def stop(self, timeout_seconds: float) -> bool:
        """Store the queued events and stop; returns whether that finished within the timeout."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread.ident is None:
            return True
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def put(self, events: Sequence[Event]) -> Future[bool]:
        """Queue events for one common commit. Never blocks. If one of them cannot be stored, all of them are dropped.

        The future is true after the commit, and false if the events are dropped or if the disk fails.
        """
        new = _Waiting(events)
        with self._changed:
            lost = [new] if self._stopping else self._queue(new)
            self._changed.notify_all()
        self._drop(lost)
        if self._error:
            # The disk fails. The events stay in the queue until a retry succeeds, but no caller waits for that.
            _complete(new.committed, False)
        return new.committed

    def _queue(self, new: _Waiting) -> list[_Waiting]:
        """Put events into the queue, and return the events that were removed for them."""
        self._waiting.append(new)
        self._shares.put(new.owner, new.size)
        lost: list[_Waiting] = []
        while (loser := self._shares.over()) is not None:
            own = [each for each in islice(self._waiting, self._being_stored, None) if each.owner == loser]
            lost.append(min(reversed(own), key=attrgetter("audit")))
            self._waiting.remove(lost[-1])
            self._shares.drop(loser, lost[-1].size)
        return lost

    def count_left_out(self, count: int) -> None:
        """Count events that are not recorded as dropped ones."""
        self._on_dropped(count)

    def read(self, query: Query) -> Future[Page]:
        """Query events without blocking. The future raises StorageError on an error, or if too many queries wait."""
        page: Future[Page] = Future()
        with self._changed:
            if self._stopping or len(self._readers) >= MAX_READERS:
                page.set_exception(StorageError("the exporter is stopping" if self._stopping else "too many queries"))
            else:
                self._readers.append((query, page))
                self._changed.notify_all()
        return page

    # On the event loop

    async def wait_until_kept(self, committed: Future[bool]) -> bool:
        """Wait until events are committed and return whether they are. Returns early if the disk fails or is slow."""
        if not committed.done() and self.status().prompt:
            await asyncio.wait((asyncio.wrap_future(committed),), timeout=_KEPT_SECONDS)
        return committed.done() and committed.result()

    async def page(self, query: Query) -> Page:
        """Return the events that match a query. Raises StorageError if the storage fails or does not answer in time."""
        try:
            return await asyncio.wait_for(asyncio.wrap_future(self.read(query)), _READ_SECONDS)
        except asyncio.TimeoutError:
            raise StorageError(f"{self._storage} has not answered within {_READ_SECONDS:g} s") from None

    async def pages(self, query: Query, *, max_rows: int | None = None) -> list[Event]:
        """Return the events of all pages, oldest first: the latest events that have, with their items, `max_rows`."""
        events: deque[Event] = deque()
        rows = 0
        while True:
            page = await self.page(query)
            for event in page.events:
                events.append(event)
                rows += 1 + event.items
            while max_rows is not None and rows > max_rows:
                rows -= 1 + events.popleft().items
            if not page.more:
                return list(events)
            query = replace(query, after=page.next_after)

    def status(self) -> EventLogStatus:
        """Return the state of the log. Never waits for the disk."""
        with self._changed:
            waiting = sum(len(each.events) for each in self._waiting)
        busy_since = self._busy_since_seconds
        return EventLogStatus(
            where=str(self._storage),
            alive=self._thread.is_alive(),
            error=self._error,
            busy_seconds=None if busy_since is None else max(0.0, self._clock() - busy_since),
            waiting=waiting,
            dropped=self._dropped,
        )

    def _run(self) -> None:
        while not self._stopping:
            self._write()
            self._serve_readers()
            with self._changed:
                self._changed.wait_for(self._has_work, max(0.0, self._due_seconds - self._clock()))
        while self._waiting and self._write():
            pass
        self._end()

    def _has_work(self) -> bool:
        # If the disk has failed, queued events do not shorten the retry interval.
        return self._stopping or bool(self._readers) or (bool(self._waiting) and not self._error)

    def _write(self) -> bool:
        """Store the next events, or maintain the storage if that is due; returns False if the storage fails."""
        due = self._stopping or self._clock() >= self._due_seconds
        if self._error and not due:
            return False
        batch = self._batch()
        return self._store(batch) if batch or due else True

    def _batch(self) -> list[_Waiting]:
        """Return the first events of the queue, as many as one commit has; they stay there until they are stored."""
        batch: list[_Waiting] = []
        size = 0
        with self._changed:
            for each in self._waiting:
                size += len(each.events)
                if batch and size > _BATCH:
                    break
                batch.append(each)
                self._shares.drop(each.owner, each.size)
            self._being_stored = len(batch)
        return batch

    def _store(self, batch: list[_Waiting]) -> bool:
        self._due_seconds = self._clock() + self._retry_seconds
        events = [event for each in batch for event in each.events]
        try:
            new_events = self._timed(lambda: self._storage.append(events))
        except StorageError as error:
            self._fail(str(error))
            return False
        except Exception:  # noqa: BLE001 - logged below
            # The disk works, but an event cannot be stored. It must not block the others.
            if len(batch) > 1:
                return all(self._store([each]) for each in batch)
            types = ",".join(sorted({event.type for event in events}))
            _log.exception("an event cannot be stored", extra={"fields": {"types": types}})
            self._remove(batch)
            self._drop(batch)
            return True
        self._due_seconds = self._clock() + _MAINTENANCE_SECONDS
        with self._changed:
            self._error = ""
            self._failures.recovered("events")
            self._failures.recovered("event queue")
        self._remove(batch)
        self._on_committed(new_events)
        for each in batch:
            _complete(each.committed, True)
        return True

    def _remove(self, batch: Sequence[_Waiting]) -> None:
        """Remove events from the start of the queue."""
        with self._changed:
            for _ in batch:
                self._waiting.popleft()
            self._being_stored -= len(batch)

    def _fail(self, text: str) -> None:
        with self._changed:
            self._error = text
            waiting = list(self._waiting)
            for each in waiting[: self._being_stored]:
                self._shares.put(each.owner, each.size)
            self._being_stored = 0
            self._failures.failed("events", text)
        for each in waiting:
            _complete(each.committed, False)

    def _serve_readers(self) -> None:
        """Answer the queries that wait now."""
        # Later ones wait for the next commit: clients that ask without end must not delay the events.
        for _ in range(len(self._readers)):
            with self._changed:
                query, page = self._readers.popleft()
            try:
                found: Page | Exception = self._timed(lambda query=query: self._storage.read(query))  # type: ignore[misc]
            except Exception as error:  # noqa: BLE001 - the caller gets the error
                found = error
            _complete(page, found)

    def _timed(self, operation: Callable[[], T]) -> T:
        """Run an operation of the storage while `busy_seconds` shows its duration."""
        self._busy_since_seconds = self._clock()
        try:
            return operation()
        finally:
            self._busy_since_seconds = None

    def _drop(self, lost: Sequence[_Waiting]) -> None:
        if not lost:
            return
        count = sum(len(each.events) for each in lost)
        with self._changed:
            self._dropped += count
            self._failures.failed("event queue", "events are dropped; gpumem_events_dropped_total counts them")
        self._on_dropped(count)
        for each in lost:
            _complete(each.committed, False)

    def _end(self) -> None:
        with self._changed:
            lost = list(self._waiting)
            self._waiting.clear()
            readers, self._readers = self._readers, deque()
        for _, page in readers:
            _complete(page, StorageError("the exporter is stopping"))
        self._drop(lost)
        self._storage.close()


def _complete(future: Future[T], result: T | Exception) -> None:
    """Set the result or the error, unless the caller has cancelled the future."""
    with contextlib.suppress(InvalidStateError):
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)
