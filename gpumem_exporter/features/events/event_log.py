"""The queue of events, and the thread `gpumem-events` that stores them, so that no other thread waits for the disk.

An event is acknowledged only when it is committed: `EventLog.page` returns committed events only.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from time import monotonic  # the thread waits in real time, whatever clock the other parts use

from gpumem_client.wire.errors import StorageError
from gpumem_exporter.core.event import AUDIT_TYPES, EVENT_TYPES, Event, Page, Query
from gpumem_exporter.core.recorders import Journal
from gpumem_exporter.core.shares import Shares
from gpumem_exporter.features.events.event_storage import Storage
from gpumem_exporter.metrics.collector_types import Metric
from gpumem_exporter.metrics.instruments import Counter, Registry
from gpumem_exporter.node.failures import FailureLog
from gpumem_exporter.page.health import Check, check

EVENTS = Metric(
    "gpumem_events_total",
    "counter",
    "Events on the node since the exporter started, by type. An event counts once it is stored and available at"
    " /api/v1/events; gpumem_events_dropped_total counts the others.",
    ("type",),
)
DROPPED = Metric(
    "gpumem_events_dropped_total",
    "counter",
    "Events that were not stored: the disk failed and the queue was full, which /health shows, or a process had more "
    "than 60 out-of-memory errors in a minute.",
)
METRICS = (EVENTS, DROPPED)
MAX_WAITING = 4096
"""The maximum number of events in the queue. The largest event, an action on many processes, has tens of KiB."""
MAX_READERS = 16
RETRY_SECONDS = 1.0
# An event with long lists, such as an action on many processes, counts once for each of this number of items.
_ITEMS = 16
# The maximum number of events in one commit.
_BATCH = 256
_MAINTENANCE_SECONDS = 60.0
# A disk operation that takes longer counts as slow, and no caller waits for it.
_SLOW_SECONDS = 1.0
# The longest time that a reply waits for a commit.
_KEPT_SECONDS = 1.0
_READ_SECONDS = 5.0

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Waiting:
    """An event that waits for its commit."""

    event: Event
    committed: Future[bool] = field(default_factory=Future)

    def __post_init__(self) -> None:
        self.committed.set_running_or_notify_cancel()  # no caller can cancel it
        self.share = f"{self.event.type in AUDIT_TYPES}:{self.event.owner}"
        self.size = 1 + self.event.items // _ITEMS


class EventLog(Journal):
    """Stores and reads events in its own thread, which alone uses the storage. Thread-safe.

    If more than `max_waiting` events are in the queue while the disk hangs, the owner with the most loses its latest
    events. An owner's actions and its other events have a share each.
    """

    def __init__(self, storage: Storage, registry: Registry, *, max_waiting: int = MAX_WAITING) -> None:
        self._storage = storage
        self._stored, self._lost = Counter.of(EVENTS, registry), Counter.of(DROPPED, registry)
        for type_ in EVENT_TYPES:  # the series start at 0
            self._stored.labels(type_)
        self._failures = FailureLog(_log, monotonic)
        # A query and its page. None wakes the thread.
        self._queries: queue.SimpleQueue[tuple[Query, Future[Page]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        # With the lock: the queue.
        self._waiting: deque[_Waiting] = deque()
        self._shares = Shares(max_waiting)
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
        self._stopping = True
        self._queries.put(None)
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def put(self, event: Event) -> Future[bool]:
        """Queue an event. Never blocks. The future is true after the commit, and false if the event is dropped."""
        new, lost = _Waiting(event), []
        with self._lock:
            self._waiting.append(new)
            self._shares.put(new.share, new.size)
            while (loser := self._shares.over()) is not None:
                lost.append(next(each for each in reversed(self._waiting) if each.share == loser))
                self._waiting.remove(lost[-1])
                self._shares.drop(loser, lost[-1].size)
            if lost:
                self._failures.failed("event queue", "events are dropped; gpumem_events_dropped_total counts them")
        if self._queries.empty():
            self._queries.put(None)
        for each in lost:
            self._drop(each)
        return new.committed

    def count_left_out(self, count: int) -> None:
        """Count events that are not recorded as dropped ones."""
        self._lost.inc(count)

    def read(self, query: Query) -> Future[Page]:
        """Query events without blocking. The future raises StorageError on an error, or if too many queries wait."""
        page: Future[Page] = Future()
        if self._queries.qsize() >= MAX_READERS:
            page.set_exception(StorageError("too many queries"))
        else:
            self._queries.put((query, page))
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

    async def pages(self, query: Query, *, last: int | None = None) -> list[Event]:
        """Return the events of all pages, or of the `last` ones, oldest first. Waits until the storage can be read."""
        pages: deque[Page] = deque(maxlen=last)
        while True:
            try:
                pages.append(await self.page(query))
            except StorageError:
                await asyncio.sleep(RETRY_SECONDS)  # an earlier exporter may still use the file
                continue
            if not pages[-1].more:
                return [event for page in pages for event in page.events]
            query = replace(query, after=pages[-1].next_after)

    def check(self) -> Check:
        """Return whether events are stored. Never waits for the disk."""
        busy_since, now = self._busy_since_seconds, monotonic()
        problem = self._error or ("" if self._thread.is_alive() else "the event log has stopped")
        if not problem and busy_since is not None and now - busy_since >= _SLOW_SECONDS:
            problem = f"{self._storage} has not answered for {now - busy_since:.0f} s"
        waiting = len(self._batch) + len(self._waiting)
        detail = (problem or f"stored in {self._storage}") + (f"; {waiting} waiting" if waiting else "")
        return check("degraded" if problem else "ok", detail)

    # In the log's thread

    def _run(self) -> None:
        while not self._stopping or (not self._error and (self._batch or self._waiting)):
            self._write()
            self._busy_since_seconds = None
            # If the disk has failed, queued events do not shorten the retry interval. One query is answered before the
            # next commit: clients that ask without end must not delay the events.
            ready = self._waiting and not self._error
            wait_seconds = 0.0 if ready else max(0.0, self._due_seconds - monotonic())
            with contextlib.suppress(queue.Empty):
                if (asked := self._queries.get(timeout=wait_seconds)) is not None:
                    self._answer(*asked)
        self._storage.close()

    def _write(self) -> None:
        """Store the next events, or maintain the storage, if that is due."""
        with self._lock:
            if monotonic() < self._due_seconds and (self._error or not self._waiting):
                return
            while self._waiting and len(self._batch) < _BATCH:
                self._batch.append(self._waiting.popleft())
                self._shares.drop(self._batch[-1].share, self._batch[-1].size)
        self._busy_since_seconds = monotonic()
        try:
            outcomes = self._storage.append([each.event for each in self._batch])
        except Exception as error:  # noqa: BLE001 - the thread tries again
            self._error = str(error) or repr(error)
            self._failures.failed("events", self._error, exc_info=not isinstance(error, StorageError))
            self._due_seconds = monotonic() + RETRY_SECONDS
            return
        self._error = ""
        self._due_seconds = monotonic() + _MAINTENANCE_SECONDS
        self._failures.recovered("events")
        with self._lock:
            self._failures.recovered("event queue")
        batch, self._batch = self._batch, []
        for each, is_new in zip(batch, outcomes, strict=True):
            if is_new is None:
                self._drop(each)
                continue
            if is_new and each.event.type in EVENT_TYPES:
                self._stored.labels(each.event.type).inc()
            each.committed.set_result(True)

    def _answer(self, query: Query, page: Future[Page]) -> None:
        if page.set_running_or_notify_cancel():
            self._busy_since_seconds = monotonic()
            try:
                page.set_result(self._storage.read(query))
            except Exception as error:  # noqa: BLE001 - the caller gets the error
                page.set_exception(error)

    def _drop(self, event: _Waiting) -> None:
        """Count and complete an event that is not stored; in any thread."""
        self._lost.inc()
        event.committed.set_result(False)
