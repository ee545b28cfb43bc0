"""The history of the node: what each device and each job used, in a SQLite database in memory."""

from __future__ import annotations

import sqlite3
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

from gpumem_exporter.core.history_series import StoredRow, Subject
from gpumem_exporter.core.samples import KV_PEAK_WINDOWS, KvCachePeak, PartKey, Snapshot, giving_way
from gpumem_exporter.core.shares import Shares
from gpumem_exporter.features.history.points import VALUES, Points, units

MAX_BYTES = 16 << 20
"""The memory of all rows."""
# A full history is freed down to the second size, so that this is seldom. The rest is for growth between two checks.
_FULL_BYTES, _FREED_BYTES = MAX_BYTES - (2 << 20), MAX_BYTES - (3 << 20)
# The part that devices may use, whatever jobs there are.
_DEVICES_SHARE = 0.75
_MINUTE = 60
_MINIMA_SECONDS = 3600
# After a jump of the wall clock, which may be wrong, nothing expires for a while.
_JUMP_SECONDS, _DOUBT_SECONDS = 300, 3600.0

# Each value is the highest of its step. The lowest ones are null if they are equal to the highest.
_RANGES = VALUES[:4]
_LOWS = [f"{name}_low" for name in _RANGES]
_HIGHEST = [f"max({name})" for name in VALUES]
_LOWEST = [f"min(coalesce({low}, {name}))" for low, name in zip(_LOWS, _RANGES, strict=True)]
VERSION = 2
# The columns of `points` after the subject are a `StoredRow`. SQLite sorts the rows of a fold in memory: a container
# with a read-only root has no folder for temporary files.
_SCHEMA = f"""
PRAGMA temp_store = MEMORY;
CREATE TABLE subjects (id INTEGER PRIMARY KEY, key TEXT UNIQUE,
    uuid TEXT, job TEXT, name TEXT, command TEXT, gpu TEXT, owner TEXT, start_time_ticks INTEGER, part TEXT);
CREATE TABLE points (subject INTEGER, step INTEGER, time INTEGER, {", ".join(f"{name} INTEGER" for name in VALUES)},
    {", ".join(f"{low} INTEGER" for low in _LOWS)}, PRIMARY KEY (subject, step, time)) WITHOUT ROWID;
PRAGMA user_version = {VERSION};
"""
_PUT_SUBJECT = "REPLACE INTO subjects VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
_PUT_POINT = "INSERT OR IGNORE INTO points VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
_PUT_MINIMUM = """INSERT INTO points (subject, step, time, allocated) VALUES (?, 60, ?, ?)
    ON CONFLICT (subject, step, time) DO UPDATE SET allocated = excluded.allocated
    WHERE excluded.allocated < allocated"""
# Folds the points of each longer step into one.
_FOLD = f"""INSERT OR IGNORE INTO points SELECT subject, :step, time / :step * :step, {", ".join(_HIGHEST)},
    {", ".join(f"nullif({low}, {high})" for low, high in zip(_LOWEST, _HIGHEST, strict=False))}
    FROM subjects CROSS JOIN points ON subject = id AND step = :fine AND time >= :start AND time < :end
    GROUP BY subject, time / :step"""  # noqa: S608 - the names above
_READ = f"""SELECT (time - :start) / :width, {", ".join(f"{value} << 10" for value in (*_HIGHEST, *_LOWEST))}
    FROM points WHERE subject = :id AND step = :step AND time >= :start AND time < :end GROUP BY 1"""  # noqa: S608
_MINIMA = """SELECT time + 60, allocated << 10 FROM subjects CROSS JOIN points ON subject = id
    WHERE key = ? AND step = 60 AND time >= ? AND time <= ? ORDER BY time"""
# Minutes, and the tens that are not folded yet.
_PEAK = """SELECT max(in_use_peak) << 10, sum(step) FROM subjects CROSS JOIN points ON subject = id
    WHERE key = ? AND in_use_peak IS NOT NULL AND (step = 60 AND time >= ? OR step = 10 AND time >= ?) GROUP BY id"""
_EXPIRED = """DELETE FROM points WHERE step = ? AND time < ? AND subject IN (
    SELECT id FROM subjects WHERE NOT ? OR uuid || job = '')"""
# The oldest quarter of the time of an owner, at one resolution.
_OLDEST = """DELETE FROM points WHERE step = :step AND subject IN (SELECT id FROM subjects WHERE owner = :owner)
    AND time <= (SELECT min(time) + (max(time) - min(time)) / 4 FROM subjects CROSS JOIN points ON subject = id
    WHERE owner = :owner AND step = :step)"""
_UNUSED = "DELETE FROM subjects WHERE id NOT IN (SELECT DISTINCT subject FROM points)"
# The memory of each owner. A point has about 65 bytes, with the space that is free in its page.
_SIZES = """SELECT owner, sum(65 * points + 200 + length(CAST(key || key || name || command AS BLOB)))
    FROM subjects JOIN (SELECT subject, count(*) AS points FROM points GROUP BY 1) ON subject = id GROUP BY 1"""


class History:
    """The values of devices and jobs for `retention_seconds`, one row a second. Thread-safe.

    A row has the wall clock of its second. When the clock is set back, the rows of later times are dropped.
    """

    def __init__(
        self, *, retention_seconds: float, clock: Callable[[], float], wall_clock: Callable[[], float]
    ) -> None:
        self._clock = clock
        self.wall_clock = wall_clock
        # One minute more is kept, so that a request for the last ten minutes gets seconds although it arrives later.
        self.kept = {1: 660.0, 10: min(7200.0, retention_seconds) + 60, _MINUTE: retention_seconds + 60}
        """The seconds for which rows are kept, by step: seconds for ten minutes, ten seconds for two hours."""
        self._points = Points()
        self._lock = threading.Lock()
        self._database = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        self._database.executescript(_SCHEMA)
        self.recorded_seconds = 0
        """The end of the last second that has rows."""
        self._offset_seconds = wall_clock() - clock()
        # The subjects of the last rows by their keys: to find each in the table takes half of the time of a row.
        self._known: dict[str, tuple[int | None, Subject]] = {}
        self._expires_from_seconds = 0.0
        self.kv_cache_peaks: Mapping[tuple[str, str], Mapping[str, KvCachePeak]] = {}
        """By window, for the name of each process and the uuid of each device of the last snapshot that has a key-value
        cache. At most ten seconds old. Replaced, never changed."""

    def add(self, snapshot: Snapshot) -> None:
        """Add a row for each device and job of a snapshot. Snapshots come in their order, about once a second."""
        points = self._points.of(snapshot)
        offset_seconds = self.wall_clock() - self._clock()
        second = int(snapshot.taken_seconds + offset_seconds)
        with self._lock:
            before, now = self.recorded_seconds, second + 1
            self.recorded_seconds = now
            if now < before:
                self._database.execute("DELETE FROM points WHERE time + step > ?", (second,))
            for subject, row in giving_way(points):
                self._put(subject, [(1, second, *row, *[None] * len(_LOWS))])
            for process in giving_way(snapshot.processes):
                for sample in process.report.devices:
                    if (size := units(sample.allocated_bytes)) is not None:
                        id_ = self._id_of(Subject.of_minima(process.part(sample.uuid)))
                        self._database.execute(_PUT_MINIMUM, (id_, second // _MINUTE * _MINUTE, size))
            if before // 10 != now // 10:
                self._fold(before, now)
                self._note_peaks(now, [subject for subject, _ in points if subject.part])
            if offset_seconds - self._offset_seconds > _JUMP_SECONDS:
                self._expires_from_seconds = self._clock() + _DOUBT_SECONDS
            self._offset_seconds = offset_seconds
            if before // _MINUTE != now // _MINUTE and self._clock() >= self._expires_from_seconds:
                self._expire(now)
            self._make_room()

    def restore(self, saved: Iterable[tuple[Subject, Iterable[StoredRow]]]) -> None:
        """Put the series of an earlier run before the rows of this run; the time between them is a gap."""
        now = int(self.wall_clock())
        for subject, rows in saved:
            with self._lock:
                _, present = self._find(subject.key) or (0, subject)
                if present.start_time_ticks == subject.start_time_ticks:  # otherwise, the pid was reused
                    # Rows that the wall clock has not reached would hide the rows of this run.
                    self._put(present, [row for row in rows if row[1] <= now])
                    self._make_room()
        with self._lock:
            self._fold(0, now)
            self._expire(now)

    def copy(self) -> sqlite3.Connection:
        """Return another database in memory with all rows."""
        copy = sqlite3.connect(":memory:")
        with self._lock:
            self._database.backup(copy)
        return copy

    @property
    def size_bytes(self) -> int:
        """The memory of all rows."""
        names = ("page_count", "freelist_count", "page_size")
        pages, free, size = (self._database.execute(f"PRAGMA {name}").fetchone()[0] for name in names)
        return int((pages - free) * size)

    def uuids(self) -> list[str]:
        """Return the devices in the order of their indexes."""
        query = "SELECT uuid FROM subjects WHERE uuid != '' ORDER BY CAST(gpu AS INTEGER), gpu"
        with self._lock:
            return [uuid for (uuid,) in self._database.execute(query)]

    def series(self, key: str, step: int, steps: range) -> tuple[Subject, list[list[int | None]]] | None:
        """Return a device or a job and its values in `steps`, from its rows of one resolution; None if it has no rows.

        The values are in bytes: the highest of each of `VALUES`, then the lowest of the first four. None is unknown.
        """
        with self._lock:
            id_, subject = self._find(key) or (0, None)
            if subject is None or subject.part:
                return None
            values = {"id": id_, "step": step, "start": steps.start, "end": steps.stop, "width": steps.step}
            rows = self._database.execute(_READ, values).fetchall()
        columns: list[list[int | None]] = [[None] * len(steps) for _ in (*VALUES, *_LOWS)]
        for index, *sizes in rows:
            for column, size in zip(columns, sizes, strict=True):
                column[index] = size
        return subject, columns

    def minima(self, part: PartKey) -> list[tuple[int, int]]:
        """Return the smallest allocated bytes of a process on a device in each minute of the last hour, oldest first.

        A minute is its end in Unix seconds. A minute in which the value is unknown is left out, and so is the present
        one. An unknown process has none.
        """
        now = int(self.wall_clock()) - 1  # the last second of a minute may have no row yet
        oldest, newest = now // _MINUTE * _MINUTE - _MINIMA_SECONDS, now - _MINUTE
        with self._lock:
            return self._database.execute(_MINIMA, (Subject.of_minima(part).key, oldest, newest)).fetchall()

    # With the lock

    def _put(self, subject: Subject, rows: Iterable[StoredRow]) -> None:
        """Add rows, except of steps that the subject has."""
        id_ = self._id_of(subject)
        self._database.executemany(_PUT_POINT, ((id_, *row) for row in rows))

    def _id_of(self, subject: Subject) -> int | None:
        """Return the id of a subject, which has no rows yet if its pid was reused."""
        id_, known = self._known.get(subject.key) or self._find(subject.key) or (None, None)
        if known is not None and known.start_time_ticks != subject.start_time_ticks:
            self._database.execute("DELETE FROM points WHERE subject = ?", (id_,))
        if known != subject:
            id_ = self._database.execute(_PUT_SUBJECT, (id_, subject.key, *subject)).lastrowid
        self._known[subject.key] = id_, subject
        return id_

    def _find(self, key: str) -> tuple[int, Subject] | None:
        row = self._database.execute("SELECT * FROM subjects WHERE key = ?", (key,)).fetchone()
        return (row[0], Subject(*row[2:])) if row is not None else None

    def _fold(self, start_seconds: int, end_seconds: int) -> None:
        """Fold the rows of all steps that ended in a time into rows of longer steps, unless these are known."""
        for fine, step in ((1, 10), (10, _MINUTE)):
            start, end = start_seconds // step * step, end_seconds // step * step
            self._database.execute(_FOLD, {"step": step, "fine": fine, "start": start, "end": end})

    def _expire(self, now_seconds: int) -> None:
        """Remove the rows that are older than their resolution keeps, and subjects without a row."""
        kept = [*((step, seconds, False) for step, seconds in self.kept.items()), (_MINUTE, _MINIMA_SECONDS, True)]
        for step, seconds, minima in kept:
            self._database.execute(_EXPIRED, (step, now_seconds - seconds, minima))
        self._drop_unused()

    def _drop_unused(self) -> None:
        self._database.execute(_UNUSED)
        self._known = {}

    def _make_room(self) -> None:
        """If the history is full, remove the oldest rows of the owners with the most."""
        if self.size_bytes <= _FULL_BYTES:
            return
        while self.size_bytes > _FREED_BYTES and (sizes := dict(self._database.execute(_SIZES))):
            jobs, devices = Shares(0), sizes.pop("", 0)
            for owner, size in sizes.items():
                jobs.put(owner, size)
            loser = jobs.over() if devices <= _DEVICES_SHARE * _FREED_BYTES else ""
            for step in self.kept:
                self._database.execute(_OLDEST, {"owner": loser or "", "step": step})
            self._drop_unused()

    def _note_peaks(self, now_seconds: int, caches: Iterable[Subject]) -> None:
        peaks = defaultdict[tuple[str, str], dict[str, KvCachePeak]](dict)
        for subject in caches:
            name, _, uuid = subject.part.partition(" ")
            for window, seconds in KV_PEAK_WINDOWS.items():
                values = (subject.key, now_seconds - seconds, now_seconds // _MINUTE * _MINUTE)
                if (found := self._database.execute(_PEAK, values).fetchone()) is not None:
                    peaks[name, uuid][window] = KvCachePeak(found[0], min(found[1], seconds))
        self.kv_cache_peaks = peaks
