"""The queue of events and the one thread, `gpumem-events`, that keeps them: nobody else waits for a disk.

An event is acknowledged when it is committed, and not before: `EventLog.read` gives only what is committed, and the
future of `EventLog.put` is true only then. What the disk does not take waits in the queue, in memory, and is tried
again until it does; what finds the queue full is dropped and counted.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from typing import TypeVar

from gpumem_exporter.errors import StorageError
from gpumem_exporter.events.model import Event, Page, Query
from gpumem_exporter.events.storage import Storage
from gpumem_exporter.nvml.trouble_log import TroubleLog

__all__ = ["EventLog", "EventLogStatus"]

T = TypeVar("T")

MAX_WAITING = 4096
"""Events that wait for the disk; an action on many processes is the largest, at some tens of KiB."""
MAX_READERS = 16
_BATCH = 256
"""Events of one commit."""
_TEND_SECONDS = 60.0
_RETRY_SECONDS = 1.0
_TELL_SECONDS = 60.0
_SLOW_SECONDS = 1.0
"""A disk that takes longer is not waited for."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EventLogStatus:
    """How it is doing."""

    where: str
    """`memory`, or the file."""
    alive: bool
    error: str
    """Why nothing can be kept at the moment; empty while it can."""
    busy_seconds: float | None
    """How long the disk has been working; None while it does not."""
    waiting: int
    """Events that are not kept yet."""
    dropped: int
    """Events that were lost, since the exporter was started."""
    put_aside: str
    """Where a damaged file was put; empty when there was none."""

    @property
    def prompt(self) -> bool:
        """Whoever waits for a commit will not wait long."""
        return self.alive and not self.error and (self.busy_seconds is None or self.busy_seconds < _SLOW_SECONDS)


@dataclass(frozen=True, slots=True)
class _Waiting:
    events: tuple[Event, ...]
    kept: Future[bool]


class EventLog:
    """Takes events from any thread, keeps them in its own, and gives them back.

    Args:
        storage: where they are kept; only the log's thread uses it.
        clock: monotonic seconds.
        on_dropped: told how many events were lost; called in whichever thread lost them.
        on_kept: told which events are kept now and were news, before anybody can read them; called in the log's thread.
        retry_seconds: how soon a disk that failed is tried again.
    """

    def __init__(
        self,
        storage: Storage,
        *,
        clock: Callable[[], float],
        on_dropped: Callable[[int], None],
        on_kept: Callable[[Sequence[Event]], None],
        retry_seconds: float = _RETRY_SECONDS,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        self._storage = storage
        self._clock = clock
        self._on_dropped = on_dropped
        self._on_kept = on_kept
        self._retry_seconds = retry_seconds
        self._max_waiting = max_waiting
        self._troubles = TroubleLog(_log, clock)
        self._changed = threading.Condition()
        self._waiting: deque[_Waiting] = deque()
        self._waiting_events = 0
        self._readers: deque[tuple[Query, Future[Page]]] = deque()
        self._dropped = 0
        self._stopping = False
        self._error = ""
        self._busy_since_seconds: float | None = None
        self._due_seconds = float("-inf")
        """When the storage is to be opened, or tried again, or rid of what is old."""
        self._one_by_one = 0
        self._told_seconds = float("-inf")
        self._thread = threading.Thread(target=self._run, name="gpumem-events", daemon=True)

    def start(self) -> None:
        """Open the storage and begin to keep events. A log is started once."""
        self._thread.start()

    def stop(self, timeout_seconds: float) -> bool:
        """Keep what still waits and end; returns whether that was done within the timeout. Any thread may call it."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread.ident is None:
            return True
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def put(self, events: Sequence[Event]) -> Future[bool]:
        """Have these kept, together. Never waits.

        Returns:
            True once they are committed; False when that will take an unknown time, or will not come about.
        """
        kept: Future[bool] = Future()
        with self._changed:
            taken = not self._stopping and self._waiting_events + len(events) <= self._max_waiting
            if taken:
                self._waiting.append(_Waiting(tuple(events), kept))
                self._waiting_events += len(events)
                self._changed.notify_all()
        if not taken:
            self._drop([_Waiting(tuple(events), kept)])
        elif self._error:
            _resolve(kept, False)
        return kept

    def read(self, query: Query) -> Future[Page]:
        """Ask for events. Never waits; the future may.

        The future raises:
            StorageError: they cannot be read, or too many are reading.
        """
        page: Future[Page] = Future()
        with self._changed:
            if self._stopping or len(self._readers) >= MAX_READERS:
                page.set_exception(StorageError("the exporter stops" if self._stopping else "too many are reading"))
            else:
                self._readers.append((query, page))
                self._changed.notify_all()
        return page

    def status(self) -> EventLogStatus:
        """How it is doing now. Any thread may ask, and is not kept waiting."""
        busy_since = self._busy_since_seconds
        return EventLogStatus(
            where=str(self._storage),
            alive=self._thread.is_alive(),
            error=self._error,
            busy_seconds=None if busy_since is None else max(0.0, self._clock() - busy_since),
            waiting=self._waiting_events,
            dropped=self._dropped,
            put_aside=self._storage.put_aside,
        )

    def _run(self) -> None:
        while not self._stopping:
            self._write()
            self._answer()
            with self._changed:
                self._changed.wait_for(self._has_work, max(0.0, self._due_seconds - self._clock()))
        while self._waiting:
            self._due_seconds = float("-inf")
            if not self._write():
                break
        self._end()

    def _has_work(self) -> bool:
        # While the disk is in trouble, that something waits is no reason to try more often.
        return self._stopping or bool(self._readers) or (bool(self._waiting) and not self._error)

    def _write(self) -> bool:
        """Keep the next batch, if there is one; False when the storage did not take it."""
        due = self._clock() >= self._due_seconds
        if self._error and not due:
            return False
        batch = self._batch()
        if not batch and not due:
            return True
        self._due_seconds = self._clock() + self._retry_seconds
        news: list[Event] = []
        try:
            if batch:
                news = self._do(lambda: self._storage.append([event for each in batch for event in each.events]))
            else:
                self._do(self._storage.tend)
        except StorageError as error:
            self._fail(str(error))
            return False
        except Exception:  # noqa: BLE001 - told below
            # No fault of the disk: an event that cannot be written would stand in everybody's way for ever.
            if len(batch) > 1:
                self._one_by_one = len(batch)
                return True
            _log.exception("an event cannot be kept", extra={"fields": {"types": _types(batch)}})
            self._remove(batch)
            self._drop(batch)
            return True
        self._due_seconds = self._clock() + _TEND_SECONDS
        self._error = ""
        self._troubles.end("events")
        self._tell_what_was_put_aside()
        self._remove(batch)
        self._on_kept(news)
        for each in batch:
            _resolve(each.kept, True)
        return True

    def _batch(self) -> list[_Waiting]:
        batch: list[_Waiting] = []
        with self._changed:
            size = 0
            for each in self._waiting:
                size += len(each.events)
                if batch and (size > _BATCH or self._one_by_one):
                    break
                batch.append(each)
            self._one_by_one = max(0, self._one_by_one - 1)
        return batch

    def _remove(self, batch: list[_Waiting]) -> None:
        with self._changed:
            for each in batch:
                self._waiting.popleft()
                self._waiting_events -= len(each.events)

    def _fail(self, text: str) -> None:
        with self._changed:
            self._error = text
            waiting = list(self._waiting)
        self._troubles.begin("events", text)
        for each in waiting:
            _resolve(each.kept, False)

    def _answer(self) -> None:
        while self._readers:
            with self._changed:
                query, page = self._readers.popleft()
            try:
                found = self._do(lambda query=query: self._storage.read(query))  # type: ignore[misc]
            except Exception as error:  # noqa: BLE001 - whoever asked is told
                _refuse(page, error)
            else:
                _resolve(page, found)

    def _do(self, what: Callable[[], T]) -> T:
        self._busy_since_seconds = self._clock()
        try:
            return what()
        finally:
            self._busy_since_seconds = None

    def _tell_what_was_put_aside(self) -> None:
        if self._storage.put_aside:
            self._troubles.begin(
                "events file", f"it was damaged and is now {self._storage.put_aside}; a new one begins"
            )

    def _drop(self, lost: Sequence[_Waiting]) -> None:
        count = sum(len(each.events) for each in lost)
        now = self._clock()
        with self._changed:
            self._dropped += count
            dropped = self._dropped
            tell = now - self._told_seconds >= _TELL_SECONDS
            if tell:
                self._told_seconds = now
        self._on_dropped(count)
        if tell:
            _log.warning("events are lost", extra={"fields": {"dropped": dropped, "reason": self._error}})
        for each in lost:
            _resolve(each.kept, False)

    def _end(self) -> None:
        with self._changed:
            lost, self._waiting = list(self._waiting), deque()
            self._waiting_events = 0
            readers, self._readers = self._readers, deque()
        for _, page in readers:
            _refuse(page, StorageError("the exporter stops"))
        if lost:
            self._told_seconds = float("-inf")
            self._drop(lost)
        self._storage.close()


def _resolve(future: Future[T], value: T) -> None:
    """Whoever asked may have given up waiting."""
    try:
        future.set_result(value)
    except InvalidStateError:
        return


def _refuse(future: Future[Page], error: Exception) -> None:
    try:
        future.set_exception(error)
    except InvalidStateError:
        return


def _types(batch: Sequence[_Waiting]) -> str:
    return ",".join(sorted({event.type for each in batch for event in each.events}))
