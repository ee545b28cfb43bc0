"""The points of a history in a SQLite database, in memory or in a file. Not thread-safe."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

from gpumem_exporter.core.series import StoredRow, Subject

MINUTE = 60
MINIMA_SECONDS = 3600
"""The time for which the minima of processes are kept."""
MAX_BYTES = 16 << 20
"""The memory of all points."""
# The budget of the points. The rest is for growth between two checks.
_BUDGET_BYTES = MAX_BYTES - (2 << 20)
# The part of the budget that devices may use, whatever jobs there are.
_DEVICES_SHARE = 0.75
# The part of the budget that is freed at once when it is used up, so that this is seldom.
_FREED_SHARE = 0.05
# An owner who has to make room keeps this part of the time before, at each resolution.
_KEPT_SHARE = 0.75
# The maximum number of subjects whose ids are remembered.
_MAX_IDS = 4096

_VERSION = 2
# The columns of `points` after the subject are a `StoredRow`.
_SCHEMA = """
CREATE TABLE subjects (id INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT UNIQUE,
    uuid TEXT, job TEXT, name TEXT, command TEXT, gpu TEXT, owner TEXT, start_time_ticks INTEGER, part TEXT);
CREATE TABLE points (subject INTEGER, step INTEGER, time INTEGER,
    used INTEGER, allocated INTEGER, idle_cache INTEGER, other_cache INTEGER, in_use_peak INTEGER,
    used_low INTEGER, allocated_low INTEGER, idle_cache_low INTEGER, other_cache_low INTEGER,
    PRIMARY KEY ({})) WITHOUT ROWID;
PRAGMA user_version = {};
"""
_INSERT_SUBJECT = "INSERT INTO subjects VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
_UPDATE_SUBJECT = """UPDATE subjects SET (uuid, job, name, command, gpu, owner, start_time_ticks, part)
    = (?, ?, ?, ?, ?, ?, ?, ?) WHERE id = ?"""
_PUT_MINIMUM = """INSERT INTO points (subject, step, time, allocated) VALUES (?, 60, ?, ?)
    ON CONFLICT (subject, step, time) DO UPDATE SET allocated = excluded.allocated
    WHERE excluded.allocated < allocated"""
# Folds the points of each longer step into one.
_FOLD = """INSERT OR IGNORE INTO points SELECT subject, :step, time / :step * :step,
    max(used), max(allocated), max(idle_cache), max(other_cache), max(in_use_peak),
    nullif(min(coalesce(used_low, used)), max(used)),
    nullif(min(coalesce(allocated_low, allocated)), max(allocated)),
    nullif(min(coalesce(idle_cache_low, idle_cache)), max(idle_cache)),
    nullif(min(coalesce(other_cache_low, other_cache)), max(other_cache))
    FROM subjects CROSS JOIN points ON subject = id AND step = :fine AND time >= :start AND time < :end
    GROUP BY subject, time / :step"""
_VALUES = """SELECT (time - :start) / :width,
    max(used) << 10, max(allocated) << 10, max(idle_cache) << 10, max(other_cache) << 10, max(in_use_peak) << 10,
    min(coalesce(used_low, used)) << 10, min(coalesce(allocated_low, allocated)) << 10,
    min(coalesce(idle_cache_low, idle_cache)) << 10, min(coalesce(other_cache_low, other_cache)) << 10
    FROM points WHERE subject = :id AND step = :step AND time >= :start AND time < :end GROUP BY 1"""
_MINIMA = """SELECT time + 60, allocated << 10 FROM subjects CROSS JOIN points ON subject = id
    WHERE key = ? AND step = 60 AND time >= ? AND time <= ? ORDER BY time"""
# Minutes, and the tens that are not folded yet.
_PEAK = """SELECT max(in_use_peak) << 10, sum(step) FROM subjects CROSS JOIN points ON subject = id
    WHERE key = ? AND in_use_peak IS NOT NULL AND (step = 60 AND time >= ? OR step = 10 AND time >= ?)"""
_SINCE = "SELECT * FROM points WHERE subject = ? AND step IN (1, 10, 60) AND time > ?"
_EXPIRED = """DELETE FROM points WHERE step = :step AND time < :oldest AND subject IN (
    SELECT id FROM subjects WHERE owner = coalesce(:owner, owner) AND (NOT :minima OR uuid || job = ''))"""
_UNUSED = "DELETE FROM subjects WHERE id NOT IN (SELECT DISTINCT subject FROM points)"
# The memory of each owner. A point has about 65 bytes, with the space that is free in its page.
_SIZES = """SELECT owner, sum(65 * points + 200 + length(CAST(key || key || name || command AS BLOB)))
    FROM subjects JOIN (SELECT subject, count(*) AS points FROM points GROUP BY 1) ON subject = id GROUP BY 1"""


class PointTable:
    """Series of points, each of one subject, for `retention_seconds`."""

    def __init__(self, path: str = ":memory:", *, retention_seconds: float) -> None:
        """Open the database. Raises sqlite3.Error, of another version and of a damaged file, too."""
        # One minute more is kept, so that a request for the last ten minutes gets seconds although it arrives later.
        spans = ((1, 600), (10, 7200), (MINUTE, int(retention_seconds)))
        self.kept = {step: min(span, int(retention_seconds)) + MINUTE for step, span in spans}
        """The seconds for which points are kept, by step: seconds for ten minutes, ten seconds for two hours."""
        # The end of the folded points, by step.
        self._folded: dict[int, int] = {}
        # The part of the time that is kept of each owner who had to make room.
        self._shares: dict[str, float] = {}
        # The ids of the subjects that have had rows since the last call of `expire`.
        self._ids: dict[Subject, int] = {}
        self._database = sqlite3.connect(path, timeout=0, check_same_thread=False)
        (version,) = self._one("PRAGMA user_version")
        if version == 0:
            # In memory, the points of a series are together, because all points of an owner are removed at once. In a
            # file, the points of a minute are together, so that few pages are written.
            order = "subject, step, time" if path == ":memory:" else "step, time, subject"
            self._database.executescript(_SCHEMA.format(order, _VERSION))
        elif version != _VERSION:
            raise sqlite3.DatabaseError(f"another version wrote it: {version}, not {_VERSION}")

    @property
    def size_bytes(self) -> int:
        """The memory of all pages in use."""
        pages, free, size = (self._one(f"PRAGMA {name}")[0] for name in ("page_count", "freelist_count", "page_size"))
        return int((pages - free) * size)

    @property
    def last_seconds(self) -> int:
        """The end of the newest point; 0 without a point."""
        return int(self._one("SELECT coalesce(max(time + step), 0) FROM points")[0])

    def check(self) -> None:
        """Raise sqlite3.DatabaseError if the database is damaged."""
        (found,) = self._one("PRAGMA quick_check(1)")
        if found != "ok":
            raise sqlite3.DatabaseError(found)

    def commit(self) -> None:
        """Commit what was written since the last commit."""
        self._database.commit()

    def close(self) -> None:
        """Close the database; what was not committed is lost."""
        self._database.close()

    def clear(self) -> None:
        """Remove everything."""
        self._database.execute("DELETE FROM points")
        self._database.execute("DELETE FROM subjects")

    def put(self, subject: Subject, rows: Iterable[StoredRow], *, replace: bool = True) -> None:
        """Add rows of a subject; they replace the rows of the same steps or not."""
        id_ = self._known_id_of(subject)
        verb = "REPLACE" if replace else "IGNORE"
        values = ((id_, *row) for row in rows)
        places = ", ".join("?" * 12)
        self._database.executemany(f"INSERT OR {verb} INTO points VALUES ({places})", values)  # noqa: S608

    def put_minimum(self, subject: Subject, second: int, value: int) -> None:
        """Put the value of a second into its minute, unless a smaller one is there."""
        self._database.execute(_PUT_MINIMUM, (self._known_id_of(subject), second // MINUTE * MINUTE, value))

    def fold(self, now_seconds: int, *, from_start: bool = False) -> None:
        """Fold the points of all steps that have ended into points of longer steps, unless these are known."""
        for fine, step in ((1, 10), (10, MINUTE)):
            start, end = 0 if from_start else self._folded.get(step, 0), now_seconds // step * step
            if start < end:
                self._database.execute(_FOLD, {"step": step, "fine": fine, "start": start, "end": end})
            self._folded[step] = end

    def shift(self, seconds: int) -> None:
        """Give all points later times, by whole steps."""
        # Twice, because two points must not have the same time in between.
        shifted = "UPDATE points SET time = -(time + CAST(round(? * 1.0 / step) AS INTEGER) * step)"
        self._database.execute(shifted, (seconds,))
        self._database.execute("UPDATE points SET time = -time")
        self._folded = {}

    def expire(self, now_seconds: float, *, owner: str | None = None, share: float = 1.0) -> None:
        """Remove the points that are older than their resolution keeps, and subjects without a point."""
        kept = [*((step, seconds, False) for step, seconds in self.kept.items()), (MINUTE, MINIMA_SECONDS, True)]
        for step, seconds, minima in kept:
            oldest = now_seconds - share * seconds
            self._database.execute(_EXPIRED, {"owner": owner, "minima": minima, "step": step, "oldest": oldest})
        self._database.execute(_UNUSED)
        self._ids = {}
        if owner is None:
            self._shares = {name: kept / _KEPT_SHARE for name, kept in self._shares.items() if kept < _KEPT_SHARE}

    def make_room(self, now_seconds: float) -> None:
        """If the budget is used up, remove the oldest points of the owners with the most."""
        # So no user can shorten the history of another one.
        if self.size_bytes <= _BUDGET_BYTES:
            return
        target = _BUDGET_BYTES * (1 - _FREED_SHARE)
        while self.size_bytes > target and (sizes := dict(self._database.execute(_SIZES))):
            devices = sizes.pop("", 0)
            owner = max(sizes, key=sizes.__getitem__) if sizes and devices <= _DEVICES_SHARE * target else ""
            self._shares[owner] = _KEPT_SHARE * self._shares.get(owner, 1.0)
            self.expire(now_seconds, owner=owner, share=self._shares[owner])

    def subjects(self) -> dict[int, Subject]:
        """Return all subjects by their ids."""
        return {id_: Subject(*fields) for id_, _, *fields in self._database.execute("SELECT * FROM subjects")}

    def subject(self, key: str) -> tuple[int, Subject] | None:
        """Return the id of a key, and its subject; None if the key has no series."""
        row = self._one("SELECT * FROM subjects WHERE key = ?", key)
        return (row[0], Subject(*row[2:])) if row is not None else None

    def values(self, id_: int, step: int, start: int, end: int, width: int) -> list[tuple[int, ...]]:
        """Return the points of a series from `start` to before `end` in steps of `width` seconds, in bytes.

        A row has the number of its step, five values and four lows.
        """
        values = {"id": id_, "step": step, "start": start, "end": end, "width": width}
        return self._database.execute(_VALUES, values).fetchall()

    def minima(self, key: str, now_seconds: int) -> list[tuple[int, int]]:
        """Return the ends and the values of the minutes of a subject that have ended, of the last hour."""
        oldest, newest = now_seconds // MINUTE * MINUTE - MINIMA_SECONDS, now_seconds - MINUTE
        return self._database.execute(_MINIMA, (key, oldest, newest)).fetchall()

    def peak(self, key: str, start_seconds: int, now_seconds: int) -> tuple[int | None, int | None]:
        """Return the highest in-use peak since a time in bytes, and the seconds in which it is known."""
        peak, seconds = self._one(_PEAK, key, start_seconds, now_seconds // MINUTE * MINUTE)
        return peak, seconds

    def rows(self, id_: int, since_seconds: float) -> list[StoredRow]:
        """Return the rows of a series that may have changed since a time."""
        return [row[1:] for row in self._database.execute(_SINCE, (id_, since_seconds - 2 * MINUTE))]

    def series(self) -> Iterator[tuple[Subject, list[StoredRow]]]:
        """Yield each subject with all its rows."""
        subjects = self.subjects()
        rows = self._database.execute("SELECT * FROM points ORDER BY subject, step, time")
        for id_, of_subject in groupby(rows, key=lambda row: row[0]):
            if id_ in subjects:
                yield subjects[id_], [row[1:] for row in of_subject]

    def _known_id_of(self, subject: Subject) -> int:
        if (id_ := self._ids.get(subject)) is None:
            if len(self._ids) >= _MAX_IDS:
                self._ids = {}
            id_ = self._ids[subject] = self._id_of(subject)
        return id_

    def _id_of(self, subject: Subject) -> int:
        """Return the id of a subject: a new one if its pid was reused."""
        found = self.subject(subject.key)
        if found is not None and found[1].start_time_ticks != subject.start_time_ticks:
            for table, column in (("points", "subject"), ("subjects", "id")):
                self._database.execute(f"DELETE FROM {table} WHERE {column} = ?", (found[0],))  # noqa: S608
            self._ids, found = {}, None
        if found is None:
            self._database.execute(_INSERT_SUBJECT, (subject.key, *subject))
            return int(self._one("SELECT last_insert_rowid()")[0])
        if found[1] != subject:
            self._database.execute(_UPDATE_SUBJECT, (*subject, found[0]))
        return found[0]

    def _one(self, query: str, *values: object) -> Any:
        return self._database.execute(query, values).fetchone()
