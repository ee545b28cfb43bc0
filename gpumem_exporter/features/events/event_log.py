"""The queue of events, and the thread `gpumem-events` that stores them, so that no other thread waits for the disk.

An event is acknowledged only when it is committed: `EventLog.page` returns committed events only.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace

from gpumem_client.wire.errors import StorageError
from gpumem_exporter.core.event import AUDIT_TYPES, Event, Page, Query
from gpumem_exporter.core.recorders import Journal
from gpumem_exporter.core.shares import Shares
from gpumem_exporter.features.events.event_metrics import EventMetrics
from gpumem_exporter.features.events.event_storage import Storage
from gpumem_exporter.node.failures import FailureLog
from gpumem_exporter.page.health import Check, check

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


class _Waiting:
    """An event that waits for its commit."""

    def __init__(self, event: Event) -> None:
        self.event = event
        self.committed: Future[bool] = Future()
        self.committed.set_running_or_notify_cancel()  # no caller can cancel it
        self.share = f"{event.type in AUDIT_TYPES}:{event.owner}"
        self.size = 1 + event.items // _ITEMS


class EventLog(Journal):
    """Stores and reads events in its own thread, which alone uses the storage. Thread-safe.

    If more than `max_waiting` events are in the queue while the disk hangs, the owner with the most loses its latest
    events. An owner's actions and its other events have a share each.
    """

    def __init__(
        self,
        storage: Storage,
        metrics: EventMetrics,
        *,
        clock: Callable[[], float],
        retry_seconds: float = _RETRY_SECONDS,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        self._storage = storage
        self._clock = clock
        self._metrics = metrics
        self._retry_seconds = retry_seconds
        self._failures = FailureLog(_log, clock)
        self._changed = threading.Condition()
        # With the lock: the queue, the queries, and the number of dropped events.
        self._waiting: deque[_Waiting] = deque()
        self._shares = Shares(max_waiting)
        self._readers: list[tuple[Query, Future[Page]]] = []
        self._dropped = 0
        self._stopping = False
        # The rest belongs to the log's thread. These events are taken out of the queue, and are stored next.
        self._batch: list[_Waiting] = []
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

    def put(self, event: Event) -> Future[bool]:
        """Queue an event. Never blocks. The future is true after the commit, and false if the event is dropped."""
        new = _Waiting(event)
        lost = [new]
        with self._changed:
            if not self._stopping:
                self._waiting.append(new)
                self._shares.put(new.share, new.size)
                lost = list(self._over())
            self._changed.notify_all()
        self._drop(lost)
        return new.committed

    def _over(self) -> Iterator[_Waiting]:
        """Remove the events for which there is no room from the queue."""
        while (loser := self._shares.over()) is not None:
            lost = next(each for each in reversed(self._waiting) if each.share == loser)
            self._waiting.remove(lost)
            self._shares.drop(loser, lost.size)
            yield lost

    def count_left_out(self, count: int) -> None:
        """Count events that are not recorded as dropped ones."""
        self._metrics.count_dropped(count)

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

    async def wait_until_kept(self, committed: Future[bool]) -> None:
        """Wait until events are committed. Returns early if the disk fails or is slow."""
        if not committed.done() and self.check()["status"] == "ok":
            await asyncio.wait((asyncio.wrap_future(committed),), timeout=_KEPT_SECONDS)

    async def page(self, query: Query) -> Page:
        """Return the events that match a query. Raises StorageError if the storage fails or does not answer in time."""
        try:
            return await asyncio.wait_for(asyncio.wrap_future(self.read(query)), _READ_SECONDS)
        except asyncio.TimeoutError:
            raise StorageError(f"{self._storage} has not answered within {_READ_SECONDS:g} s") from None

    async def pages(self, query: Query, *, max_rows: int | None = None) -> list[Event]:
        """Return the events of all pages, oldest first: the latest events that have, with their items, `max_rows`.

        Waits until the storage can be read.
        """
        events: deque[Event] = deque()
        rows = 0
        while True:
            try:
                page = await self.page(query)
            except StorageError:
                await asyncio.sleep(self._retry_seconds)  # an earlier exporter may still use the file
                continue
            events.extend(page.events)
            rows += sum(1 + event.items for event in page.events)
            while max_rows is not None and rows > max_rows:
                rows -= 1 + events.popleft().items
            if not page.more:
                return list(events)
            query = replace(query, after=page.next_after)

    def check(self) -> Check:
        """Return whether events are stored. Never waits for the disk."""
        with self._changed:
            waiting = len(self._batch) + len(self._waiting)
        lost = f"; {waiting} waiting, {self._dropped} dropped" if waiting or self._dropped else ""
        busy_since, now = self._busy_since_seconds, self._clock()
        busy_seconds = 0.0 if busy_since is None else now - busy_since
        if self._error:
            return check("degraded", self._error + lost)
        if not self._thread.is_alive():
            return check("degraded", f"the event log has stopped{lost}")
        if busy_seconds >= _SLOW_SECONDS:
            return check("degraded", f"{self._storage} has not answered for {busy_seconds:.0f} s{lost}")
        return check("ok", f"stored in {self._storage}{lost}")

    # In the log's thread

    def _run(self) -> None:
        while not self._stopping or (not self._error and (self._batch or self._waiting)):
            self._write()
            self._answer()
            self._busy_since_seconds = None
            with self._changed:
                self._changed.wait_for(self._has_work, max(0.0, self._due_seconds - self._clock()))
        self._answer()
        with self._changed:
            lost = [*self._batch, *self._waiting]
            self._batch.clear()
            self._waiting.clear()
        self._drop(lost)
        self._storage.close()

    def _has_work(self) -> bool:
        # If the disk has failed, queued events do not shorten the retry interval.
        return self._stopping or bool(self._readers) or (bool(self._waiting) and not self._error)

    def _write(self) -> None:
        """Store the next events, or maintain the storage, if that is due."""
        with self._changed:
            if self._clock() < self._due_seconds and (self._error or not self._waiting):
                return
            while self._waiting and len(self._batch) < _BATCH:
                self._batch.append(self._waiting.popleft())
                self._shares.drop(self._batch[-1].share, self._batch[-1].size)
        self._store(list(self._batch))

    def _store(self, batch: list[_Waiting]) -> bool:
        """Store the first events of the batch; returns False if the storage fails."""
        self._busy_since_seconds = self._clock()
        try:
            new_events = self._storage.append([each.event for each in batch])
        except StorageError as error:
            self._error = str(error)
            self._failures.failed("events", self._error)
            self._due_seconds = self._clock() + self._retry_seconds
            return False
        except Exception as error:  # noqa: BLE001 - logged below
            if not batch:
                self._error = repr(error)
                self._failures.failed("events", self._error, exc_info=True)
                self._due_seconds = self._clock() + self._retry_seconds
                return False
            # The disk works, but an event cannot be stored. It must not block the others.
            if len(batch) > 1:
                return all(self._store([each]) for each in batch)
            _log.exception("an event cannot be stored", extra={"fields": {"type": batch[0].event.type}})
            self._batch.remove(batch[0])
            self._drop(batch)
            return True
        self._error = ""
        self._due_seconds = self._clock() + _MAINTENANCE_SECONDS
        with self._changed:
            self._failures.recovered("events")
            self._failures.recovered("event queue")
        del self._batch[: len(batch)]
        self._metrics.count_events(new_events)
        for each in batch:
            each.committed.set_result(True)
        return True

    def _answer(self) -> None:
        """Answer the queries that wait now."""
        # Later ones wait for the next commit: clients that ask without end must not delay the events.
        with self._changed:
            readers, self._readers = self._readers, []
        for query, page in readers:
            if page.set_running_or_notify_cancel():
                self._busy_since_seconds = self._clock()
                try:
                    page.set_result(self._storage.read(query))
                except Exception as error:  # noqa: BLE001 - the caller gets the error
                    page.set_exception(error)

    def _drop(self, lost: Sequence[_Waiting]) -> None:
        """Count and complete events that are not stored; in any thread."""
        if not lost:
            return
        with self._changed:
            self._dropped += len(lost)
            self._failures.failed("event queue", "events are dropped; gpumem_events_dropped_total counts them")
        self._metrics.count_dropped(len(lost))
        for each in lost:
            each.committed.set_result(False)
