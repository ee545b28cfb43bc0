"""Events in SQLite: a file in the folder of `--storage.path`, or memory.

A commit is on the disk before it is anything else: WAL with `synchronous=FULL` writes and syncs it before a reader, or
whoever waits for it, can see it. So what was committed survives SIGKILL, and loss of power where the disk keeps its
word. The file is locked for as long as it is open: a second exporter in the same folder is told so.

One thread uses a storage.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from gpumem_exporter.core.naming import json_pid
from gpumem_exporter.errors import StorageError
from gpumem_exporter.events.model import Event, Page, Query

__all__ = ["FILE_NAME", "MEMORY_BYTES", "Storage"]

T = TypeVar("T")

FILE_NAME = "events.db"
MEMORY_BYTES = 8 << 20
"""The most that is kept without a folder."""

_VERSION = 1
_PAGE_BYTES = 4096
_WAL_PAGES = 256
_WAL_BYTES = 2 << 20
"""What the write-ahead log may grow to between checkpoints, taken off the bound of the file itself."""
_PAGE_TEXT = 1 << 20
"""Characters of detail in one page: an answer stays of a size that the event loop can bear."""

_SCHEMA = """
CREATE TABLE events (
    id INTEGER PRIMARY KEY,
    type TEXT NOT NULL,
    time REAL NOT NULL,
    gpu TEXT, uuid TEXT, pid TEXT, workload TEXT, rank TEXT,
    detail TEXT NOT NULL,
    subject TEXT
);
CREATE INDEX events_time ON events (time);
CREATE INDEX events_subject ON events (subject, id) WHERE subject IS NOT NULL;
"""
_COLUMNS = "id, type, time, gpu, uuid, pid, workload, rank, detail, subject"
_OF_PID = """(pid = :pid OR (type = 'action' AND EXISTS (
    SELECT 1 FROM json_each(detail, '$.results') WHERE CAST(json_extract(value, '$.pid') AS TEXT) = :pid)))"""


class Storage:
    """Keeps events for a while, in a bounded space. What goes wrong closes the file; the next call opens it again.

    Args:
        folder: made if it is not there; None for memory.
        retention_seconds: events older than this go.
        max_bytes: the oldest events go when the file and its write-ahead log would become larger.
        wall_clock: seconds of the Unix epoch.
    """

    def __init__(
        self, folder: Path | None, *, retention_seconds: float, max_bytes: int, wall_clock: Callable[[], float]
    ) -> None:
        self._path = None if folder is None else folder / FILE_NAME
        self._retention_seconds = retention_seconds
        self._bytes = min(max_bytes, MEMORY_BYTES) if folder is None else max(max_bytes - _WAL_BYTES, max_bytes // 2)
        self._wall_clock = wall_clock
        self._connection: sqlite3.Connection | None = None
        self._inode = 0
        self.put_aside = ""
        """Where the last file went that was found damaged; empty when there was none."""

    def __str__(self) -> str:
        return "memory" if self._path is None else str(self._path)

    def tend(self) -> None:
        """Open what is not open, and let go what is too old.

        Raises:
            StorageError: it cannot be opened or written.
        """
        self._attempt(lambda connection: self._transaction(connection, ()))

    def append(self, events: Sequence[Event]) -> list[Event]:
        """Keep all of these that are news, or none of them. They are committed when this returns.

        Returns:
            Those that were news.

        Raises:
            StorageError: nothing of it was kept.
        """
        rows = [(event, _row(event)) for event in events]
        return self._attempt(lambda connection: self._transaction(connection, rows))

    def read(self, query: Query) -> Page:
        """The events that are asked for.

        Raises:
            StorageError: they cannot be read.
        """
        return self._attempt(lambda connection: _read(connection, query))

    def close(self) -> None:
        """Close the file. Memory forgets."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(sqlite3.Error):
                connection.close()

    def _attempt(self, what: Callable[[sqlite3.Connection], T]) -> T:
        """Do something with the open file; a damaged one is put aside and a new one begun."""
        try:
            try:
                return what(self._open())
            except sqlite3.DatabaseError as error:
                # Python's own class for SQLITE_CORRUPT and SQLITE_NOTADB alone; all else is one of its subclasses.
                if type(error) is not sqlite3.DatabaseError or self._path is None:
                    raise
                self._put_aside(self._path)
                return what(self._open())
        except (sqlite3.Error, OSError) as error:
            if self._path is not None:
                self.close()
            raise StorageError(self._said(error)) from error

    def _open(self) -> sqlite3.Connection:
        if self._connection is not None and not self._was_replaced():
            return self._connection
        self.close()
        if self._path is not None:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        connection = sqlite3.connect(":memory:" if self._path is None else self._path, timeout=0, isolation_level=None)
        try:
            connection.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
            connection.execute("PRAGMA locking_mode = EXCLUSIVE")
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute(f"PRAGMA wal_autocheckpoint = {_WAL_PAGES}")
            connection.execute(f"PRAGMA journal_size_limit = {_WAL_BYTES // 2}")
            self._prepare(connection)
        except BaseException:
            connection.close()
            raise
        self._inode = 0 if self._path is None else self._path.stat().st_ino
        self._connection = connection
        return connection

    def _prepare(self, connection: sqlite3.Connection) -> None:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version not in (0, _VERSION):
            raise StorageError(f"{self._path} was written by another version (its format is {version}, not {_VERSION})")
        (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            raise sqlite3.DatabaseError(found)
        if version == 0:
            connection.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA user_version = {_VERSION}; COMMIT;")

    def _was_replaced(self) -> bool:
        """Somebody removed the file, or put another in its place: what is written to it now, nobody will find."""
        if self._path is None:
            return False
        try:
            return self._path.stat().st_ino != self._inode
        except FileNotFoundError:
            return True

    def _put_aside(self, path: Path) -> None:
        self.close()
        damaged = path.with_name(path.name + ".damaged")
        for suffix in ("-wal", "-shm", ""):
            with contextlib.suppress(FileNotFoundError):
                path.with_name(path.name + suffix).replace(damaged.with_name(damaged.name + suffix))
        self.put_aside = str(damaged)

    def _transaction(self, connection: sqlite3.Connection, rows: Sequence[tuple[Event, dict[str, Any]]]) -> list[Event]:
        news: list[Event] = []
        connection.execute("BEGIN IMMEDIATE")
        try:
            self._prune(connection, sum(_PAGE_BYTES + 2 * len(row["detail"]) for _, row in rows))
            (last,) = connection.execute("SELECT coalesce(max(id), 0) FROM events").fetchone()
            for event, row in rows:
                if _is_news(connection, event):
                    # From the clock, so that ids rise also where the events before a restart were in memory.
                    last = row["id"] = max(last + 1, int(self._wall_clock() * 1000))
                    names = ", ".join(row)
                    values = ", ".join(f":{name}" for name in row)
                    connection.execute(f"INSERT INTO events ({names}) VALUES ({values})", row)  # noqa: S608 - our names
                    news.append(event)
            connection.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                connection.execute("ROLLBACK")
            raise
        return news

    def _prune(self, connection: sqlite3.Connection, needed_bytes: int) -> None:
        """Let the oldest go until there is room; what they took is used again, the file does not shrink."""
        connection.execute("DELETE FROM events WHERE time < ?", (self._wall_clock() - self._retention_seconds,))
        while True:
            (pages,) = connection.execute("PRAGMA page_count").fetchone()
            (unused,) = connection.execute("PRAGMA freelist_count").fetchone()
            if (pages - unused) * _PAGE_BYTES + needed_bytes <= self._bytes:
                return
            (count,) = connection.execute("SELECT count(*) FROM events").fetchone()
            if count == 0:
                return
            oldest = "SELECT id FROM events ORDER BY id LIMIT ?"
            connection.execute(f"DELETE FROM events WHERE id IN ({oldest})", (max(1, count // 32),))  # noqa: S608

    def _said(self, error: Exception) -> str:
        if isinstance(error, sqlite3.OperationalError) and "locked" in str(error):
            return f"{self}: another exporter uses it"
        reason = error.strerror if isinstance(error, OSError) else ""
        return f"{self}: {reason or error}"


def _is_news(connection: sqlite3.Connection, event: Event) -> bool:
    if not event.subject:
        return True
    row = connection.execute(
        "SELECT type FROM events WHERE subject = ? ORDER BY id DESC LIMIT 1", (_text(event.subject),)
    ).fetchone()
    before = row[0] if row is not None else ""
    return before != event.type and event.only_after in ("", before)


def _row(event: Event) -> dict[str, Any]:
    return {
        "id": 0,
        "type": event.type,
        "time": event.time_unix_seconds,
        "gpu": _text(event.gpu),
        "uuid": _text(event.uuid),
        "pid": None if event.pid is None else str(event.pid),
        "workload": _text(event.workload),
        "rank": _text(event.rank),
        "detail": json.dumps(event.detail, allow_nan=False),
        "subject": _text(event.subject or None),
    }


def _text(value: str | None) -> str | None:
    """As SQLite takes it: a name that the system gave as it found it may not be UTF-8."""
    return None if value is None else value.encode("utf-8", "replace").decode()


def _read(connection: sqlite3.Connection, query: Query) -> Page:
    (newest,) = connection.execute("SELECT coalesce(max(id), 0) FROM events").fetchone()
    latest = query.after is None and query.since_unix_seconds is None
    after = query.after or 0
    wanted = []
    if query.since_unix_seconds is not None:
        wanted.append("time >= :since")
    if query.types:
        wanted.append(f"type IN ({', '.join(f':type{i}' for i in range(len(query.types)))})")
    if query.pid is not None:
        wanted.append(_OF_PID)
    if query.newest_of_each:
        wanted.append(f"id IN (SELECT max(id) FROM events WHERE {' AND '.join(wanted) or 'TRUE'} GROUP BY uuid, pid)")  # noqa: S608
    wanted.append("id > :after")
    order = "DESC" if latest else "ASC"
    rows = connection.execute(
        f"SELECT {_COLUMNS} FROM events WHERE {' AND '.join(wanted)} ORDER BY id {order} LIMIT :limit",  # noqa: S608
        {
            "after": after,
            "since": query.since_unix_seconds,
            "pid": query.pid,
            "limit": query.limit + 1,
            **{f"type{i}": type_ for i, type_ in enumerate(query.types)},
        },
    )
    found = list(_bounded(rows, query.limit))
    events = [event for event in found if event is not None]
    if latest:
        return Page(tuple(reversed(events)), max(newest, after), more=False)
    more = len(events) < len(found)
    return Page(tuple(events), events[-1].id if more else max(newest, after), more)


def _bounded(rows: sqlite3.Cursor, limit: int) -> Iterator[Event | None]:
    """As many as fit, and None at the end if that was not all."""
    text = 0
    for number, row in enumerate(rows):
        text += len(row[8])
        if number == limit or (number and text > _PAGE_TEXT):
            yield None
            return
        yield Event(
            id=row[0],
            type=row[1],
            time_unix_seconds=row[2],
            gpu=row[3],
            uuid=row[4],
            pid=None if row[5] is None else json_pid(row[5]),
            workload=row[6],
            rank=row[7],
            detail=json.loads(row[8]),
            subject=row[9] or "",
        )
