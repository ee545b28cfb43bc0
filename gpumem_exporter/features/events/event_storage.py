"""The SQLite database of events: a file in the folder of `--storage.path`, or memory.

Committed events survive SIGKILL, and power loss if the disk honors syncs.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from gpumem_client.wire.errors import StorageError
from gpumem_exporter.core.event import AUDIT_TYPES, Event, Page, Query, detail_json
from gpumem_exporter.core.naming import json_pid
from gpumem_exporter.core.shares import Shares

T = TypeVar("T")

FILE_NAME = "events.db"
MEMORY_BYTES = 8 << 20
"""The largest size of the database without a folder."""

_VERSION = 1
_PAGE_BYTES = 4096
_WAL_PAGES = 256
# The largest size of the write-ahead log between checkpoints, which is subtracted from the limit of the file.
_WAL_BYTES = 2 << 20
# WAL mode with `synchronous=FULL` writes and syncs a commit before any reader sees it. The file is locked while it is
# open, so that a second exporter on the same folder gets an error.
_SETTINGS = (
    f"page_size = {_PAGE_BYTES}",
    "locking_mode = EXCLUSIVE",
    "journal_mode = WAL",
    "synchronous = FULL",
    f"wal_autocheckpoint = {_WAL_PAGES}",
    f"journal_size_limit = {_WAL_BYTES // 2}",
)
# The maximum number of characters of detail in one page, so that a reply does not block the event loop for long.
_PAGE_TEXT = 1 << 20

# A file of version 0.2 has this table. Later exporters have added the rest, so that the earlier ones can still use the
# file: the format stays 1.
_SCHEMA = """
CREATE TABLE IF NOT EXISTS events (
    id INTEGER PRIMARY KEY,
    type TEXT NOT NULL,
    time REAL NOT NULL,
    gpu TEXT, uuid TEXT, pid TEXT, workload TEXT, rank TEXT,
    detail TEXT NOT NULL,
    subject TEXT
);
"""
_LATER_COLUMNS = {"owner": "TEXT", "stored": "REAL", "job": "TEXT"}
_LATER_SCHEMA = """
CREATE TABLE IF NOT EXISTS running_time (seconds REAL NOT NULL, monotonic_seconds REAL NOT NULL);
CREATE INDEX IF NOT EXISTS events_time ON events (time);
CREATE INDEX IF NOT EXISTS events_subject ON events (subject, id) WHERE subject IS NOT NULL;
CREATE INDEX IF NOT EXISTS events_owner ON events (owner);
CREATE INDEX IF NOT EXISTS events_stored ON events (stored);
CREATE INDEX IF NOT EXISTS events_job ON events (job) WHERE job != '';
CREATE INDEX IF NOT EXISTS events_slurm_job ON events (json_extract(detail, '$.slurm_job_id'))
    WHERE type = 'process_ended';
CREATE INDEX IF NOT EXISTS events_ray_job ON events (json_extract(detail, '$.ray_job_id'))
    WHERE type = 'process_ended';
"""
# The processes and devices of events whose columns do not have them, because they are several. Triggers fill the table,
# so that it is complete also after an earlier exporter has used the file.
_PLACES_OF_EVENTS = """INSERT INTO places
    SELECT DISTINCT events.id, json_extract(value, '$.uuid'), CAST(json_extract(value, '$.pid') AS TEXT),
        json_extract(value, '$.workload')
    FROM events, json_each(detail, CASE events.type WHEN 'action' THEN '$.results' ELSE '$.devices' END)
    WHERE events.type IN ('action', 'process_started', 'process_ended')
    AND (uuid IS NULL OR pid IS NULL OR workload IS NULL)"""
_PLACES_SCHEMA = f"""
CREATE TABLE places (event INTEGER NOT NULL, uuid TEXT, pid TEXT, workload TEXT);
CREATE INDEX places_event ON places (event);
{_PLACES_OF_EVENTS};
CREATE TRIGGER event_stored AFTER INSERT ON events BEGIN {_PLACES_OF_EVENTS} AND events.id = new.id; END;
CREATE TRIGGER event_deleted AFTER DELETE ON events BEGIN DELETE FROM places WHERE event = old.id; END;
"""  # noqa: S608 - constant names
_COLUMNS = (
    *("id", "type", "time", "gpu", "uuid", "pid", "workload", "rank"),
    *("detail", "subject", "owner", "stored", "job"),
)
_INSERT = f"INSERT INTO events ({', '.join(_COLUMNS)}) VALUES ({', '.join(f':{name}' for name in _COLUMNS)})"  # noqa: S608
_IS_AUDIT = f"type IN ({', '.join(map(repr, AUDIT_TYPES))})"
# The bytes of each owner's events, of the audit trail and of the others. 256 bytes are the other columns.
_SIZES = f"SELECT {_IS_AUDIT}, owner, sum(length(detail) + 256) FROM events GROUP BY 1, 2"  # noqa: S608 - constant names
_OLDEST_OF_OWNER = f"""SELECT id, length(detail) + 256 FROM events
    WHERE owner = ? AND ({_IS_AUDIT}) = ? ORDER BY id"""  # noqa: S608 - constant names
# More is deleted than is needed, because each time the size of every event is read.
_SPARE_PART = 32
_OF_PROCESS = "(pid = :pid OR id IN (SELECT event FROM places WHERE pid = :pid))"
_OF_DEVICE = "(uuid = :device OR id IN (SELECT event FROM places WHERE uuid = :device))"
_PIDS_OF_JOB = "(SELECT pid FROM events WHERE job = :job AND job != '')"
# Events of version 0.2 have no job.
_OF_JOB = f"""(job = :job OR workload = :job
    OR ((job IS NULL OR type IN ('action', 'policy_stopped')) AND pid IN {_PIDS_OF_JOB})
    OR id IN (SELECT event FROM places WHERE workload = :job OR pid IN {_PIDS_OF_JOB}))"""  # noqa: S608 - constant names
_LAST_OF_SUBJECT = """NOT EXISTS (
    SELECT 1 FROM events AS later WHERE later.subject = events.subject AND later.id > events.id)"""
# A number is an id of Slurm or Ray: users choose the names of workloads.
_OF_JOB_ID = """id IN (
    SELECT id FROM events WHERE type = 'process_ended' AND json_extract(detail, '$.slurm_job_id') = :job_id
    UNION SELECT id FROM events WHERE type = 'process_ended' AND json_extract(detail, '$.ray_job_id') = :job_id
    UNION SELECT id FROM events WHERE type = 'process_ended' AND (job = :job_id OR workload = :job_id)
        AND :job_id GLOB '*[^0-9]*')"""
# The ids of events: first all events of one owner, then one event of each other owner in turn.
_IN_TURN = """SELECT id FROM (SELECT id, owner IS NOT :first_owner AS other,
        row_number() OVER (PARTITION BY owner ORDER BY id) AS turn FROM events WHERE {where})
    ORDER BY other, other * turn, id LIMIT :limit OFFSET :skip"""


class Storage:
    """Stores events for a limited time in limited space, in memory without a `folder`. Not thread-safe.

    The retention time does not count while the machine is off. It uses no wall clock, which may be wrong after a start.
    `max_bytes` limits the file with its write-ahead log. The audit trail and the other events have half of it each, and
    may use what the other half does not need. In each half, the owner with the most bytes loses its oldest events.
    An error closes the file, and the next call opens it again. `clock` has the seconds since the machine's start.
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
        # On the clock, the start of the running time: the time in which exporters have had this file open.
        self._running_since_seconds = 0.0
        self._connection: sqlite3.Connection | None = None

    def __str__(self) -> str:
        return "memory" if self._path is None else str(self._path)

    def append(self, events: Sequence[Event]) -> list[Event]:
        """Delete expired events, and store the events that are not duplicates; return these. Raises StorageError.

        All of that is one commit, which also opens the file if necessary. Without events, it is maintenance.
        """
        rows = [(event, _row(event)) for event in events]
        return self._attempt(lambda connection: self._transaction(connection, rows))

    def read(self, query: Query) -> Page:
        """Return the events that match a query. Raises StorageError."""
        return self._attempt(lambda connection: _read(connection, query))

    def close(self) -> None:
        """Close the file. Without a folder, all events are lost."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(sqlite3.Error):
                connection.close()

    def _attempt(self, operation: Callable[[sqlite3.Connection], T]) -> T:
        """Run an operation on the open file."""
        try:
            return operation(self._open())
        except (sqlite3.Error, OSError) as error:
            if self._path is not None:
                self.close()
            raise StorageError(self._error_text(error)) from error

    def _open(self) -> sqlite3.Connection:
        if self._connection is not None:
            return self._connection
        if self._path is not None:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._path.touch(mode=0o600)  # the mode of SQLite's other files too
            with contextlib.suppress(PermissionError):
                self._path.chmod(0o600)  # an older exporter created it
        # No timeout: another exporter keeps its lock for as long as it runs.
        connection = sqlite3.connect(":memory:" if self._path is None else self._path, timeout=0, isolation_level=None)
        connection.row_factory = sqlite3.Row
        try:
            for setting in _SETTINGS:
                connection.execute(f"PRAGMA {setting}")
            self._prepare(connection)
        except BaseException:
            connection.close()
            raise
        self._connection = connection
        return connection

    def _prepare(self, connection: sqlite3.Connection) -> None:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version not in (0, _VERSION):
            raise StorageError(f"{self._path} was written by another version (its format is {version}, not {_VERSION})")
        (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            raise sqlite3.DatabaseError(found)
        known = {row["name"] for row in connection.execute("PRAGMA table_info(events)")}
        later = [
            f"ALTER TABLE events ADD COLUMN {name} {_LATER_COLUMNS[name]};" for name in _LATER_COLUMNS.keys() - known
        ]
        places = "" if connection.execute("PRAGMA table_info(places)").fetchone() else _PLACES_SCHEMA
        schema = (_SCHEMA, *later, _LATER_SCHEMA, places, f"PRAGMA user_version = {_VERSION};")
        connection.executescript(f"BEGIN IMMEDIATE; {' '.join(schema)} COMMIT;")
        self._start_running_time(connection)

    def _start_running_time(self, connection: sqlite3.Connection) -> None:
        """Continue the running time of the file."""
        # While the machine stays on, its clock shows how long the file was closed. If the clock shows less than when
        # the file was last used, the machine has been restarted, and the file was closed for at least what the clock
        # shows.
        now = self._clock()
        first = "INSERT INTO running_time SELECT 0.0, ? WHERE NOT EXISTS (SELECT 1 FROM running_time)"
        connection.execute(first, (now,))
        seconds, last_seconds = connection.execute("SELECT seconds, monotonic_seconds FROM running_time").fetchone()
        running_seconds = seconds + (now - last_seconds if now >= last_seconds else now)
        self._running_since_seconds = now - running_seconds
        # Events of an earlier exporter count from now on.
        connection.execute(
            "UPDATE events SET owner = coalesce(owner, json_extract(detail, '$.caller'), ''), stored = ? "
            "WHERE stored IS NULL",
            (running_seconds,),
        )

    def _transaction(self, connection: sqlite3.Connection, rows: Sequence[tuple[Event, dict[str, Any]]]) -> list[Event]:
        stored: list[Event] = []
        with connection:  # commits, or rolls back
            connection.execute("BEGIN IMMEDIATE")
            running_seconds = self._clock() - self._running_since_seconds
            connection.execute("DELETE FROM events WHERE stored < ?", (running_seconds - self._retention_seconds,))
            self._make_room(connection, sum(_PAGE_BYTES + 2 * len(row["detail"]) for _, row in rows))
            times = (running_seconds, running_seconds + self._running_since_seconds)
            connection.execute("UPDATE running_time SET seconds = ?, monotonic_seconds = ?", times)
            (last,) = connection.execute("SELECT coalesce(max(id), 0) FROM events").fetchone()
            for event, row in rows:
                if _is_new(connection, event):
                    # Ids are based on the clock, so that they increase after a restart also without a folder.
                    last = row["id"] = max(last + 1, int(self._wall_clock() * 1000))
                    row["stored"] = running_seconds
                    connection.execute(_INSERT, row)
                    stored.append(event)
        return stored

    def _make_room(self, connection: sqlite3.Connection, needed_bytes: int) -> None:
        """Delete old events of the audit trail or of the others, whichever use more space.

        The owner with the most loses first, so that no user can push out the events of others. SQLite reuses the
        space; the file never shrinks.
        """
        if self._free_bytes(connection) >= needed_bytes:
            return
        halves = Shares(0), Shares(0)
        for is_audit, owner, size in connection.execute(_SIZES):
            halves[is_audit].put(owner, size)
        while self._free_bytes(connection) < needed_bytes + self._bytes // _SPARE_PART:
            audit = halves[True].total > halves[False].total
            loser = halves[audit].over()
            if loser is None:
                return
            ids, goal = [], halves[audit][loser] * (_SPARE_PART - 1) // _SPARE_PART
            for id_, size in connection.execute(_OLDEST_OF_OWNER, (loser, audit)):
                ids.append((id_,))
                halves[audit].drop(loser, size)
                if halves[audit][loser] <= goal:
                    break
            connection.executemany("DELETE FROM events WHERE id = ?", ids)

    def _free_bytes(self, connection: sqlite3.Connection) -> int:
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        (unused,) = connection.execute("PRAGMA freelist_count").fetchone()
        return self._bytes - (int(pages) - int(unused)) * _PAGE_BYTES

    def _error_text(self, error: Exception) -> str:
        if isinstance(error, sqlite3.OperationalError) and "locked" in str(error):
            return f"{self}: another exporter uses it"
        # Python raises the base class only for SQLITE_CORRUPT and SQLITE_NOTADB, a subclass for other errors.
        if type(error) is sqlite3.DatabaseError:
            return f"{self}: the file is damaged; move it away, and a new one is created"
        reason = error.strerror if isinstance(error, OSError) else ""
        return f"{self}: {reason or error}"


def _is_new(connection: sqlite3.Connection, event: Event) -> bool:
    """Return whether an event is not a duplicate, by its `subject` and `only_after`."""
    if not event.subject:
        return True
    row = connection.execute(
        "SELECT type FROM events WHERE subject = ? ORDER BY id DESC LIMIT 1", (_text(event.subject),)
    ).fetchone()
    before = row[0] if row is not None else ""
    return before != event.type and event.only_after in ("", before)


def _row(event: Event) -> dict[str, Any]:
    return {
        "type": event.type,
        "time": event.time_unix_seconds,
        "pid": None if event.pid is None else str(event.pid),
        "detail": detail_json(event.detail),
        "subject": _text(event.subject or None),
        **{name: _text(getattr(event, name)) for name in ("gpu", "uuid", "workload", "rank", "owner", "job")},
    }


def _event(row: sqlite3.Row) -> Event:
    columns: dict[str, Any] = {name: row[name] for name in ("id", "type", "gpu", "uuid", "workload", "rank")}
    columns |= {name: row[name] or "" for name in ("subject", "owner", "job")}
    pid = None if row["pid"] is None else json_pid(row["pid"])
    return Event(time_unix_seconds=row["time"], pid=pid, detail=json.loads(row["detail"]), **columns)


def _text(value: str | None) -> str | None:
    """Return a string that SQLite accepts: a name from the system may not be valid UTF-8."""
    return None if value is None else value.encode("utf-8", "replace").decode()


def _where(query: Query) -> str:
    """Return the condition of a query in SQL; the names in it are fields of the query, and `type0` and so on."""
    filters = {
        "time >= :since_unix_seconds": query.since_unix_seconds,
        _OF_PROCESS: query.pid,
        _OF_JOB: query.job,
        _OF_DEVICE: query.device,
        _OF_JOB_ID: query.job_id,
        "subject = :subject": query.subject,
        "json_extract(detail, '$.uid') = :uid": query.uid,
        "owner = :owner": query.owner,
    }
    types = f"type IN ({', '.join(f':type{i}' for i in range(len(query.types)))})"
    where = " AND ".join([types, *(condition for condition, value in filters.items() if value is not None)])
    if query.newest_of_each:
        where += f" AND id IN (SELECT max(id) FROM events WHERE {where} GROUP BY uuid, pid)"  # noqa: S608 - constant names
    if query.last_of_subject:
        where += f" AND {_LAST_OF_SUBJECT}"
    # Which event is the newest one does not depend on the page.
    if query.after is not None:
        where += " AND id > :after"
    if query.before is not None:
        where += " AND id < :before"
    return where


def _read(connection: sqlite3.Connection, query: Query) -> Page:
    (newest,) = connection.execute("SELECT coalesce(max(id), 0) FROM events").fetchone()
    latest = query.after is None and query.since_unix_seconds is None
    after = query.after or 0
    where = _where(query)
    values = {field.name: getattr(query, field.name) for field in fields(query)}
    values |= {f"type{i}": type_ for i, type_ in enumerate(query.types)}
    values["limit"] = query.limit + 1
    select = f"SELECT {', '.join(_COLUMNS)} FROM events WHERE"  # noqa: S608 - constant names
    rows: Iterable[sqlite3.Row]
    if query.first_owner is None:
        order = "DESC" if latest else "ASC"
        rows = connection.execute(f"{select} {where} ORDER BY id {order} LIMIT :limit", values)
    else:
        # The details are read one by one: sorted with them, thousands of ends would take as many times their size.
        ids = connection.execute(_IN_TURN.format(where=where), values)
        rows = (connection.execute(f"{select} id = ?", id_).fetchone() for id_ in ids)
    found: list[Event] = []
    size, more = 0, False
    for row in rows:
        size += len(row["detail"])
        more = len(found) == query.limit or (bool(found) and size > _PAGE_TEXT)
        if more:
            break
        found.append(_event(row))
    if latest:
        return Page(tuple(reversed(found)), max(newest, after), more=False)
    return Page(tuple(found), found[-1].id if more else max(newest, after), more)
