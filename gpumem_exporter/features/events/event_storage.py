"""The SQLite database of events: a file in the folder of `--storage.path`, or memory.

Committed events survive SIGKILL, and power loss if the disk honors syncs.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from gpumem_client.wire.errors import StorageError
from gpumem_exporter.core.event import AUDIT_TYPES, MAX_DETAIL_BYTES, PLACE, Event, Page, Query, detail_json
from gpumem_exporter.core.naming import json_pid

FILE_NAME = "events.db"
MEMORY_BYTES = 8 << 20
"""The largest size of the database without a folder."""

_VERSION = 1
_PAGE_BYTES = 4096
# The largest size of the write-ahead log between checkpoints, which is subtracted from the limit of the file.
_WAL_BYTES = 2 << 20
# WAL mode with `synchronous=FULL` writes and syncs a commit before any reader sees it. The file is locked while it is
# open, so that a second exporter on the same folder gets an error. A container with a read-only root has no folder for
# temporary files.
_SETTINGS = (
    f"page_size = {_PAGE_BYTES}",
    "locking_mode = EXCLUSIVE",
    "journal_mode = WAL",
    "synchronous = FULL",
    "wal_autocheckpoint = 256",
    f"journal_size_limit = {_WAL_BYTES // 2}",
    "foreign_keys = ON",
    "temp_store = MEMORY",
)
# The maximum number of characters of detail in one page, so that a reply does not block the event loop for long.
_PAGE_TEXT = 1 << 20
# `about` has what each event is about, such as `pid:4711` or `job:llm`: a field of `Query`, and its value. `stored` is
# the running time at that moment: how long exporters have had the file open.
_SCHEMA = (
    """CREATE TABLE IF NOT EXISTS events (
        id INTEGER PRIMARY KEY,
        type TEXT NOT NULL,
        time REAL NOT NULL,
        gpu TEXT, uuid TEXT, pid TEXT, workload TEXT, rank TEXT,
        detail TEXT NOT NULL,
        subject TEXT, owner TEXT, stored REAL, job TEXT
    )""",
    """CREATE TABLE IF NOT EXISTS about (
        event INTEGER NOT NULL REFERENCES events ON DELETE CASCADE,
        name TEXT NOT NULL,
        PRIMARY KEY (event, name)
    ) WITHOUT ROWID""",
    # The second column is for version 0.3.
    "CREATE TABLE IF NOT EXISTS running_time (seconds REAL NOT NULL, monotonic_seconds REAL NOT NULL)",
    "INSERT INTO running_time SELECT 0.0, 0.0 WHERE NOT EXISTS (SELECT 1 FROM running_time)",
    # Instead of `about`, version 0.3 has these, which it makes again. It knows no empty texts.
    "DROP TRIGGER IF EXISTS event_stored",
    "DROP TRIGGER IF EXISTS event_deleted",
    "DROP TABLE IF EXISTS places",
    *(f"DROP INDEX IF EXISTS events_{name}" for name in ("job", "owner", "slurm_job", "ray_job")),
    """UPDATE events SET subject = coalesce(subject, ''), owner = coalesce(owner, ''), job = coalesce(job, ''),
        stored = coalesce(stored, 0.0) WHERE subject IS NULL OR owner IS NULL OR job IS NULL OR stored IS NULL""",
    "DELETE FROM about WHERE event NOT IN (SELECT id FROM events)",
    "CREATE INDEX IF NOT EXISTS about_name ON about (name)",
    "CREATE INDEX IF NOT EXISTS events_time ON events (time)",
    "CREATE INDEX IF NOT EXISTS events_subject ON events (subject, id)",
    "CREATE INDEX IF NOT EXISTS events_stored ON events (stored)",
    f"PRAGMA user_version = {_VERSION}",
)
_TEXTS = ("gpu", "uuid", "workload", "rank", "owner", "job", "subject")
_COLUMNS = ("id", "type", "time", "pid", "detail", "stored", *_TEXTS)
_INSERT = f"INSERT INTO events ({', '.join(_COLUMNS)}) VALUES ({', '.join(f':{name}' for name in _COLUMNS)})"  # noqa: S608
_BY_ID = "SELECT * FROM events WHERE id = ?"
_LAST_TYPE = "SELECT type FROM events WHERE subject = ? ORDER BY id DESC LIMIT 1"
_WITHOUT_NAMES = "SELECT id FROM events WHERE id NOT IN (SELECT event FROM about) ORDER BY id"
_IS_AUDIT = f"type IN ({', '.join(map(repr, AUDIT_TYPES))})"
# `of_owner` has the bytes that an owner keeps if this event is its oldest one, and `of_half` the bytes that the audit
# trail or the other events keep then. The largest of them lose first; `lost` has the bytes that are deleted before.
# 256 bytes are the other columns.
_DELETE = f"""DELETE FROM events WHERE id IN (SELECT id FROM (
    SELECT id, sum(size) OVER (ORDER BY of_half DESC, id) - size AS lost FROM (
        SELECT id, size, sum(size) OVER (PARTITION BY audit ORDER BY of_owner, id DESC) AS of_half FROM (
            SELECT id, audit, size, sum(size) OVER (PARTITION BY audit, owner ORDER BY id DESC) AS of_owner FROM (
                SELECT id, owner, {_IS_AUDIT} AS audit, length(detail) + 256 AS size FROM events)))
    ) WHERE lost < ?)"""  # noqa: S608 - constant names
_USED_PAGES = "SELECT page_count - freelist_count FROM pragma_page_count, pragma_freelist_count"
# More is deleted than is needed, because each time the size of every event is read.
_SPARE_PART = 32
_STORE_NAME = "INSERT OR IGNORE INTO about VALUES (?, ?)"
_STORE_LAST_JOB = """INSERT OR IGNORE INTO about SELECT ?, 'job:' || job FROM events
    WHERE id IN (SELECT event FROM about WHERE name = ?) AND job != '' ORDER BY id DESC LIMIT 1"""
# The number of events of an earlier version whose names are stored in one commit.
_NAMED_AT_ONCE = 256
_OF_TYPES = "type IN (SELECT value FROM json_each(:types))"
_ABOUT = ("pid", "device", "job", "job_id", "uid")
# The condition of each field of `Query`, which it has if the field is not None or False.
_CONDITIONS = {
    "types": _OF_TYPES,
    "since_unix_seconds": "time >= :since_unix_seconds",
    "after": "id > :after",
    "before": "id < :before",
    "subject": "subject = :subject",
    "owner": "owner = :owner",
    **{name: f"id IN (SELECT event FROM about WHERE name = '{name}:' || :{name})" for name in _ABOUT},  # noqa: S608
    "newest_of_each": f"id IN (SELECT max(id) FROM events WHERE {_OF_TYPES} GROUP BY uuid, pid)",  # noqa: S608
    "last_of_subject": "id IN (SELECT max(id) FROM events WHERE subject != '' GROUP BY subject)",
}
# First all events of one owner, then one event of each other owner in turn.
_IN_TURN = """owner IS NOT :first_owner,
    (owner IS NOT :first_owner) * row_number() OVER (PARTITION BY owner ORDER BY id), id"""

# The errors of a detail that is not valid.
_INVALID = (ValueError, TypeError, AttributeError, RecursionError)

_log = logging.getLogger(__name__)


class Storage:
    """Stores events for a limited time in limited space, in memory without a `folder`. Not thread-safe.

    The retention time is running time, so that it depends on no wall clock, which may be wrong after a start.
    `max_bytes` limits the file with its write-ahead log. The audit trail and the other events have half of it each, and
    may use what the other half does not need. In each half, the owner with the most bytes loses its oldest events.
    An error closes the file, and the next call opens it again. `clock` is monotonic.
    """

    def __init__(
        self,
        folder: Path | None,
        *,
        retention_seconds: float,
        max_bytes: int,
        wall_clock: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = None if folder is None else folder / FILE_NAME
        self._retention_seconds = retention_seconds
        self._bytes = min(max_bytes, MEMORY_BYTES) if folder is None else max(max_bytes - _WAL_BYTES, max_bytes // 2)
        self._wall_clock = wall_clock
        self._clock = clock
        # On the clock, the start of the running time.
        self._running_since_seconds = 0.0
        self._connection: sqlite3.Connection | None = None

    def __str__(self) -> str:
        return "memory" if self._path is None else str(self._path)

    def append(self, events: Sequence[Event]) -> list[bool | None]:
        """Delete expired events, and store new ones, in one commit, which also opens the file if necessary.

        Return whether each event is new, or None if it cannot be stored. Without events, it is maintenance. Raises
        StorageError.
        """
        with self._opened() as connection, connection:  # commits, or rolls back
            connection.execute("BEGIN IMMEDIATE")
            now = self._clock() - self._running_since_seconds
            connection.execute("UPDATE running_time SET seconds = ?, monotonic_seconds = ?", (now, self._clock()))
            connection.execute("DELETE FROM events WHERE stored < ?", (now - self._retention_seconds,))
            return [self._store(connection, event, now) for event in events]

    def _store(self, connection: sqlite3.Connection, event: Event, running_seconds: float) -> bool | None:
        try:
            row = _row(event)
            names = _names(_event(row))
        except _INVALID:
            _log.exception("an event cannot be stored", extra={"fields": {"type": event.type}})
            return None
        if event.subject:
            (before,) = connection.execute(_LAST_TYPE, (row["subject"],)).fetchone() or ("",)
            if before == event.type or event.only_after not in ("", before):
                return False
        # For each event: room for all of them, of which few are large, would delete the events of others.
        self._make_room(connection, _PAGE_BYTES + 4 * len(row["detail"]))
        # Ids are based on the clock, so that they increase after a restart also without a folder.
        (last,) = connection.execute("SELECT coalesce(max(id), 0) FROM events").fetchone()
        row.update(id=max(last + 1, int(self._wall_clock() * 1000)), stored=running_seconds)
        connection.execute(_INSERT, row)
        _store_names(connection, row, names)
        return True

    def read(self, query: Query) -> Page:
        """Return the events that match a query. Raises StorageError."""
        latest = query.after is None and query.since_unix_seconds is None
        order = "id DESC" if latest else "id" if query.first_owner is None else _IN_TURN
        given = asdict(query)
        has = {name for name, value in given.items() if value is not None and value is not False}  # 0 is a value
        where = " AND ".join(text for name, text in _CONDITIONS.items() if name in has)
        select = f"SELECT id FROM events WHERE {where} ORDER BY {order} LIMIT :limit OFFSET :skip"  # noqa: S608
        values = {**given, "types": json.dumps(query.types), "limit": query.limit + 1}
        found: list[Event] = []
        size, more = 0, False
        with self._opened() as connection:
            (newest,) = connection.execute("SELECT coalesce(max(id), 0) FROM events").fetchone()
            # The details are read one by one: sorted with them, thousands of ends would take as many times their size.
            for (id_,) in connection.execute(select, values):
                row = connection.execute(_BY_ID, (id_,)).fetchone()
                size += len(row["detail"])
                more = len(found) == query.limit or (bool(found) and size > _PAGE_TEXT)
                if more:
                    break
                found.append(_event(row))
        if latest:
            return Page(tuple(reversed(found)), newest, more=False)
        return Page(tuple(found), found[-1].id if more else max(newest, query.after or 0), more)

    def close(self) -> None:
        """Close the file. Without a folder, all events are lost."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(sqlite3.Error):
                connection.close()

    @contextlib.contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        try:
            yield self._connection or self._open()
        except Exception as error:
            if self._path is not None:
                self.close()
            if not isinstance(error, (sqlite3.Error, OSError)):
                raise
            reason = getattr(error, "strerror", None) or str(error)
            if isinstance(error, sqlite3.OperationalError) and "locked" in str(error):
                reason = "another exporter uses it"
            # Python raises the base class only for SQLITE_CORRUPT and SQLITE_NOTADB, a subclass for other errors.
            elif type(error) is sqlite3.DatabaseError:
                reason = "the file is damaged; move it away, and a new one is created"
            raise StorageError(f"{self}: {reason}") from error

    def _open(self) -> sqlite3.Connection:
        if self._path is not None:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._path.touch(mode=0o600)  # the mode of SQLite's other files too
            with contextlib.suppress(PermissionError):
                self._path.chmod(0o600)  # an older exporter created it
        # No timeout: another exporter keeps its lock for as long as it runs.
        connection = sqlite3.connect(":memory:" if self._path is None else self._path, timeout=0, isolation_level=None)
        self._connection = connection
        connection.row_factory = sqlite3.Row
        # SQLite does not check texts. A damaged one is read as far as possible.
        connection.text_factory = partial(str, encoding="utf-8", errors="replace")
        for setting in _SETTINGS:
            connection.execute(f"PRAGMA {setting}")
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        columns = {row["name"] for row in connection.execute("PRAGMA table_info(events)")}
        if version not in (0, _VERSION) or (columns and not columns.issuperset(_COLUMNS)):  # a later one, or 0.2
            raise sqlite3.NotSupportedError("another version wrote it; move it away, and a new one is created")
        (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            raise sqlite3.DatabaseError(found)
        with connection:
            connection.execute("BEGIN IMMEDIATE")
            for statement in _SCHEMA:
                connection.execute(statement)
        self._complete_names(connection)
        (running_seconds,) = connection.execute("SELECT seconds FROM running_time").fetchone()
        self._running_since_seconds = self._clock() - running_seconds
        return connection

    def _complete_names(self, connection: sqlite3.Connection) -> None:
        """Store what the events of an earlier version are about.

        The names need room, which a full file of an earlier version does not have. Each commit has a part of the
        events, so that the write-ahead log stays small.
        """
        ids = connection.execute(_WITHOUT_NAMES).fetchall()
        for start in range(0, len(ids), _NAMED_AT_ONCE):
            with connection:
                connection.execute("BEGIN IMMEDIATE")
                for id_ in ids[start : start + _NAMED_AT_ONCE]:
                    self._make_room(connection, _PAGE_BYTES + 4 * MAX_DETAIL_BYTES)
                    for row in connection.execute(_BY_ID, id_).fetchall():  # none if it was deleted to make room
                        with contextlib.suppress(*_INVALID):
                            _store_names(connection, row, _names(_event(row)))

    def _make_room(self, connection: sqlite3.Connection, needed_bytes: int) -> None:
        """Delete old events of the audit trail or of the others, whichever use more space.

        The owner with the most loses first, so that no user can push out the events of others. SQLite reuses the
        space; the file never shrinks.
        """
        while True:
            (used_pages,) = connection.execute(_USED_PAGES).fetchone()
            missing_bytes = needed_bytes + used_pages * _PAGE_BYTES - self._bytes
            wanted_bytes = missing_bytes + self._bytes // _SPARE_PART
            if missing_bytes <= 0 or not connection.execute(_DELETE, (wanted_bytes,)).rowcount:
                return


def _row(event: Event) -> dict[str, Any]:
    return {
        "id": event.id,
        "type": event.type,
        "time": event.time_unix_seconds,
        "pid": None if event.pid is None else str(event.pid),
        "detail": detail_json(event.detail),
        **{name: value and _text(value) for name in _TEXTS for value in (getattr(event, name),)},
    }


def _event(row: Mapping[str, Any] | sqlite3.Row) -> Event:
    columns: dict[str, Any] = {name: row[name] for name in ("id", "type", *_TEXTS)}
    pid = None if row["pid"] is None else json_pid(row["pid"])
    try:
        detail = json.loads(row["detail"])
    except (ValueError, RecursionError):  # it is damaged; its page must not be unreadable
        detail = {}
    return Event(time_unix_seconds=row["time"], pid=pid, detail=detail, **columns)


def _text(value: str) -> str:
    """Return a string that SQLite accepts: a name from the system may not be valid UTF-8."""
    return value.encode("utf-8", "replace").decode()


def _names(event: Event) -> list[str]:
    """Return what an event is about."""
    detail = event.detail
    own = {name: getattr(event, name) for name in PLACE}
    parts = [own, *detail.get("results", ()), *detail.get("devices", ())]
    about: list[tuple[str, Any]] = [("job", event.job)]
    for of, column in {"pid": "pid", "device": "uuid", "job": "workload"}.items():
        about += [(of, part.get(column)) for part in parts]
    if event.type == "process_ended":
        # A number is an id of Slurm or Ray: users choose the names of workloads.
        chosen = [name for name in (event.job, event.workload) if name and not name.isdecimal()]
        about += [("job_id", name) for name in (detail.get("slurm_job_id"), detail.get("ray_job_id"), *chosen)]
        about += [("uid", detail.get("uid"))]
    return [_text(f"{of}:{name}") for of, name in about if name not in (None, "")]


def _store_names(connection: sqlite3.Connection, row: Mapping[str, Any] | sqlite3.Row, names: Sequence[str]) -> None:
    connection.executemany(_STORE_NAME, [(row["id"], name) for name in names])
    if not row["job"]:  # as of an action: the last jobs of its processes
        connection.executemany(_STORE_LAST_JOB, [(row["id"], name) for name in names if name.startswith("pid:")])
