"""The history of the node: what each device and each job used, in bounded memory."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from gpumem_exporter.core.samples import KV_PEAK_WINDOWS, KvCachePeak, PartKey, Snapshot, giving_way
from gpumem_exporter.core.series import StoredRow, Subject
from gpumem_exporter.features.history.point_table import MINUTE, PointTable
from gpumem_exporter.features.history.points import VALUES, Points, units

# The maximum number of points in a document, of all series together: then it has about 4 MB.
_MAX_POINTS = 64_000
_CLOCK_STEP_SECONDS = 1.0
# A second without a row is a gap only if the next row is this late.
_LATE_SECONDS = 3.0
_FOLD_SECONDS = 10
_NO_LOWS = (None, None, None, None)

_log = logging.getLogger(__name__)


class _Steps(NamedTuple):
    """The steps of a document."""

    step_seconds: int
    """The length of the stored steps."""
    ratio: int
    """The number of stored steps in a step of the document."""
    start: int
    """The first stored step."""
    end: int
    """The stored step after the last one."""

    @property
    def ends(self) -> list[int]:
        """The end of each step of the document in Unix seconds. The last step may be shorter."""
        starts = range(self.start, self.end, self.ratio)
        return [min(start + self.ratio, self.end) * self.step_seconds for start in starts]


class History:
    """The values of devices and jobs for `retention_seconds`, one row a second. Thread-safe.

    After a step of the wall clock, earlier rows have the times that the new clock would have shown.
    """

    def __init__(
        self, *, retention_seconds: float, clock: Callable[[], float], wall_clock: Callable[[], float]
    ) -> None:
        self.retention_seconds = retention_seconds
        self._clock = clock
        self._wall_clock = wall_clock
        self._offset_seconds = wall_clock() - clock()
        self.clock_steps = 0
        """How often the wall clock was set."""
        self._points = Points()
        self._lock = threading.Lock()
        self._table = PointTable(retention_seconds=retention_seconds)
        # The end of the last second that has rows.
        self._recorded_seconds = 0
        self.kv_cache_peaks: Mapping[tuple[str, str], Mapping[str, KvCachePeak]] = {}
        """By window, for the name of each process and the uuid of each device of the last snapshot that has a key-value
        cache. At most ten seconds old. Replaced, never changed."""

    @property
    def now_seconds(self) -> float:
        """The present time of the rows, in Unix seconds."""
        return self._wall_clock()

    @property
    def size_bytes(self) -> int:
        """The memory of all rows."""
        with self._lock:
            return self._table.size_bytes

    def add(self, snapshot: Snapshot) -> None:
        """Add a row for each device and job of a snapshot. Snapshots come in their order, about once a second."""
        points = self._points.of(snapshot)
        with self._lock:
            self._follow_wall_clock()
            second = int((snapshot.taken_seconds + self._offset_seconds) // 1)
            before, self._recorded_seconds = self._recorded_seconds, second + 1
            for subject, row in giving_way(points):
                self._table.put(subject, [(1, second, *row, *_NO_LOWS)], replace=False)
            for process in giving_way(snapshot.processes):
                for sample in process.report.devices:
                    if (size := units(sample.allocated_bytes)) is not None:
                        self._table.put_minimum(Subject.of_minima(process.part(sample.uuid)), second, size)
            if before // _FOLD_SECONDS != (second + 1) // _FOLD_SECONDS:
                self._table.fold(second + 1)
                self._note_peaks(second + 1, [subject for subject, _ in points if subject.part])
            if before // MINUTE != (second + 1) // MINUTE:
                self._table.expire(second + 1)
            self._table.make_room(second + 1)
            self._table.commit()

    def document(
        self,
        *,
        uuids: Sequence[str] | None,
        jobs: Sequence[str],
        from_unix_seconds: float,
        to_unix_seconds: float,
        points: int,
        names: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """Return devices, all of them without `uuids`, and jobs as JSON. A subject without a row has no series.

        The steps are the shortest ones that reach back to the start and are at most `points`. `names` has the names of
        the jobs whose commands may be shown; None shows all.
        """
        now_seconds = self.now_seconds
        with self._lock:
            # The present second is not a gap.
            late = now_seconds - self._recorded_seconds
            newest_seconds = self._recorded_seconds if 0 < late < _LATE_SECONDS else now_seconds
            devices = [subject for subject in self._table.subjects().values() if subject.uuid] if uuids is None else []
        devices.sort(key=lambda subject: _gpu_order(subject.gpu))
        keys = dict.fromkeys([*(uuids or ()), *(subject.uuid for subject in devices), *jobs])
        points = max(1, min(points, _MAX_POINTS // max(1, len(keys))))
        start_seconds = max(from_unix_seconds, now_seconds - self._table.kept[MINUTE])
        end_seconds = max(start_seconds, min(to_unix_seconds, newest_seconds))
        steps = self._steps(start_seconds, end_seconds, now_seconds, points)
        ends = steps.ends
        return {
            "from_unix_seconds": round(start_seconds, 3),
            "to_unix_seconds": round(end_seconds, 3),
            "step_seconds": steps.step_seconds * steps.ratio,
            "unix_seconds": ends,
            "series": [series for key in keys if (series := self._series(key, steps, len(ends), names))],
        }

    def minima(self, part: PartKey) -> list[tuple[int, int]]:
        """Return the smallest allocated bytes of a process on a device in each minute of the last hour, oldest first.

        A minute is its end in Unix seconds. A minute in which the value is unknown is left out, and so is the present
        one. An unknown process has none.
        """
        with self._lock:
            return self._table.minima(Subject.of_minima(part).key, self._recorded_seconds)

    # For the file

    def rows(self, since_seconds: float) -> Iterator[tuple[Subject, list[StoredRow]]]:
        """Yield each series with the rows that may have changed since a time."""
        # The lock is released between two series: the caller writes each, and rows arrive meanwhile.
        with self._lock:
            subjects = self._table.subjects()
        for id_, subject in subjects.items():
            with self._lock:
                rows = self._table.rows(id_, since_seconds)
            if rows:
                yield subject, rows

    def restore(self, saved: Iterable[tuple[Subject, Iterable[StoredRow]]]) -> None:
        """Put the series of an earlier run before the rows of this run; the time between them is a gap."""
        for subject, rows in saved:
            with self._lock:
                _, present = self._table.subject(subject.key) or (0, subject)
                if present.start_time_ticks == subject.start_time_ticks:  # otherwise, the pid was reused
                    # Rows that the wall clock has not reached would hide the rows of this run.
                    reached = [row for row in rows if row[1] <= self.now_seconds]
                    self._table.put(present, reached, replace=False)
                    self._table.make_room(self.now_seconds)
        with self._lock:
            self._table.fold(int(self.now_seconds), from_start=True)
            self._table.expire(self.now_seconds)
            self._table.commit()
            # So that growth is found before the first row of this run.
            self._recorded_seconds = max(self._recorded_seconds, min(self._table.last_seconds, int(self.now_seconds)))

    # With the lock

    def _follow_wall_clock(self) -> None:
        before, self._offset_seconds = self._offset_seconds, self._wall_clock() - self._clock()
        step_seconds = self._offset_seconds - before
        if abs(step_seconds) > _CLOCK_STEP_SECONDS:
            _log.debug("the wall clock was set by %+.1f s", step_seconds)
            self._table.shift(round(step_seconds))
            self.clock_steps += 1

    def _note_peaks(self, now_seconds: int, caches: Iterable[Subject]) -> None:
        peaks: dict[tuple[str, str], dict[str, KvCachePeak]] = {}
        for subject in caches:
            name, _, uuid = subject.part.partition(" ")
            for window, window_seconds in KV_PEAK_WINDOWS.items():
                peak, known_seconds = self._table.peak(subject.key, now_seconds - window_seconds, now_seconds)
                if peak is not None and known_seconds is not None:
                    known = KvCachePeak(peak, min(known_seconds, window_seconds))
                    peaks.setdefault((name, uuid), {})[window] = known
        self.kv_cache_peaks = peaks

    # Documents

    def _steps(self, start_seconds: float, end_seconds: float, now_seconds: float, points: int) -> _Steps:
        """Return the shortest steps that reach back to the start and are at most `points`.

        A step is in the range if its end is. If even minutes are too many, each step of the document has several.
        """
        for step, kept in self._table.kept.items():
            start, end = int(start_seconds // step), int(end_seconds // step)
            if end - start <= points and start_seconds >= now_seconds - kept:
                return _Steps(step, 1, start, end)
        ratio = -(-(end - start) // points)
        if ratio > 1:
            # Each step starts at a multiple of its length, so the same minutes are together in the next document.
            start += -start % ratio
        return _Steps(step, max(1, ratio), start, end)

    def _series(self, key: str, steps: _Steps, count: int, names: Mapping[str, str] | None) -> dict[str, Any] | None:
        step, ratio, start, end = steps
        with self._lock:
            id_, subject = self._table.subject(key) or (0, None)
            if subject is None or subject.part:
                return None
            rows = self._table.values(id_, step, start * step, end * step, ratio * step)
        columns: list[list[int | None]] = [[None] * count for _ in (*VALUES, *_NO_LOWS)]
        for index, *values in rows:
            for column, value in zip(columns, values, strict=True):
                column[index] = value
        highs, lows = columns[: len(VALUES)], columns[len(VALUES) :] if step * ratio > 1 else []
        return {
            "device": subject.uuid or None,
            "job": subject.job or None,
            "name": _name(subject, names),
            "gpu": subject.gpu or None,
            **{name: {"max": high} for name, high in zip(VALUES, highs, strict=True)},
            **{name: {"min": low, "max": high} for name, low, high in zip(VALUES, lows, highs, strict=False)},
        }


def _name(subject: Subject, names: Mapping[str, str] | None) -> str:
    shown = subject.name or (subject.command if names is None else names.get(subject.job, ""))
    return shown or f"pid {subject.job.rpartition('~')[2]}"


def _gpu_order(gpu: str) -> list[int]:
    return [int(part) if part.isdecimal() else 1 << 30 for part in gpu.split(":")]
