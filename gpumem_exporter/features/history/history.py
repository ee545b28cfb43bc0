"""The history of the node: what each device and each job used, in bounded memory."""

from __future__ import annotations

import heapq
import logging
import threading
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from gpumem_exporter.core.samples import KV_PEAK_WINDOWS, KvCachePeak, PartKey, Snapshot, giving_way
from gpumem_exporter.features.history.minima import STEP_SECONDS, Minima
from gpumem_exporter.features.history.points import Points
from gpumem_exporter.features.history.series import (
    UNKNOWN,
    VALUES,
    Series,
    Subject,
    Track,
    bytes_of,
    folded,
    resolutions,
)

MAX_BYTES = 16 << 20
"""The memory of all series."""
# The budget of the series. The rest is for the peaks of `Points`, for `Minima`, and for growth between two checks.
_BUDGET_BYTES = MAX_BYTES - (3 << 20)
# The part of the budget that devices may use, whatever jobs there are.
_DEVICES_SHARE = 0.75
# The part of the budget that is freed at once when it is used up, so that this is seldom.
_FREED_SHARE = 0.05
# A job without a row for this time has ended.
_LIVE_SECONDS = 60
# A smaller series is removed rather than shortened.
_SMALL_BYTES = 4096
# The maximum number of points in a document, of all series together: then it has about 4 MB.
_MAX_POINTS = 64_000
_CLOCK_STEP_SECONDS = 1.0
# Rows that are further in the future show that the wall clock is behind.
_BEHIND_SECONDS = 90.0
# A second without a row is a gap only if the next row is this late.
_LATE_SECONDS = 3.0
_FOLD_SECONDS = 10
_EXPIRY_SECONDS = 60

_log = logging.getLogger(__name__)


class _Steps(NamedTuple):
    """The steps of a document."""

    track: int
    """The index of the track that has its rows."""
    ratio: int
    """The number of the track's steps in a step of the document."""
    start: int
    """The first step of the track."""
    end: int
    """The step of the track after the last one."""


class History:
    """The values of devices and jobs for `retention_seconds`, one row a second. Thread-safe.

    After a step of the wall clock, earlier rows have the times that the new clock would have shown.
    """

    def __init__(
        self, *, retention_seconds: float, clock: Callable[[], float], wall_clock: Callable[[], float]
    ) -> None:
        self._resolutions = resolutions(retention_seconds)
        self._clock = clock
        self._wall_clock = wall_clock
        # Rows are at seconds of an own time: the monotonic clock plus the difference to the wall clock at the start. So
        # a step of the wall clock never changes their order.
        self._origin_seconds = wall_clock() - clock()
        # The wall clock minus the time of the rows.
        self._shift_seconds = 0
        self._points = Points()
        self._minima = Minima()
        self._lock = threading.Lock()
        self._series: dict[str, Series] = {}
        # The bytes of the series of each owner; the devices' owner is empty.
        self._bytes: defaultdict[str, int] = defaultdict(int)
        self._sizes: dict[str, int] = {}
        # The end of the last second that has rows.
        self._recorded_seconds = 0
        self._folded_step = self._expired_step = 0
        self.kv_cache_peaks: Mapping[tuple[str, str], Mapping[str, KvCachePeak]] = {}
        """By window, for the name of each process and the uuid of each device of the last snapshot that has a key-value
        cache. At most ten seconds old. Replaced, never changed."""

    @property
    def now_seconds(self) -> float:
        """The present time of the rows."""
        return self._clock() + self._origin_seconds

    @property
    def size_bytes(self) -> int:
        """The memory of all series."""
        return sum(self._bytes.values())

    def add(self, snapshot: Snapshot) -> None:
        """Add a row for each device and job of a snapshot. Snapshots come in their order, about once a second."""
        second = int((snapshot.taken_seconds + self._origin_seconds) // 1)
        points = self._points.of(snapshot)
        with self._lock:
            self._follow_wall_clock()
            for subject, row in giving_way(points):
                self._series_of(subject).tracks[0].put(second, row)
                self._count(subject.key)
            self._minima.add(second, snapshot.processes)
            self._recorded_seconds = second + 1
            if self._fold(second + 1):
                self._note_peaks(second + 1, (subject for subject, _ in points if subject.cache))
            if self.size_bytes > _BUDGET_BYTES:
                self._make_room(second)

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
            shift_seconds = self._shift_seconds
            # The present second is not a gap.
            late = now_seconds - self._recorded_seconds
            newest_seconds = self._recorded_seconds if 0 < late < _LATE_SECONDS else now_seconds
            keys = self._devices() if uuids is None else list(uuids)
        keys += jobs
        points = max(1, min(points, _MAX_POINTS // max(1, len(keys))))
        oldest_seconds = now_seconds - self._resolutions[-1].kept_seconds
        start_seconds = max(from_unix_seconds - shift_seconds, oldest_seconds)
        end_seconds = max(start_seconds, min(to_unix_seconds - shift_seconds, newest_seconds))
        steps = self._steps(start_seconds, end_seconds, now_seconds, points)
        step_seconds = self._resolutions[steps.track].step_seconds
        ends = [end * step_seconds + shift_seconds for _, end in _groups(steps)]
        return {
            "from_unix_seconds": round(start_seconds + shift_seconds, 3),
            "to_unix_seconds": round(end_seconds + shift_seconds, 3),
            "step_seconds": step_seconds * steps.ratio,
            "unix_seconds": ends,
            "series": [series for key in dict.fromkeys(keys) if (series := self._document(key, steps, names))],
        }

    def minima(self, part: PartKey) -> list[tuple[float, int]]:
        """Return the smallest allocated bytes of a process on a device in each minute of the last hour, oldest first.

        A minute is its end in Unix seconds. A minute in which the value is unknown is left out, and so is the present
        one. An unknown process has none.
        """
        with self._lock:
            return [(end + self._shift_seconds, size) for end, size in self._minima.of(part)]

    # For the file

    def saved(self) -> Iterator[tuple[Subject, list[tuple[int, bytes]]]]:
        """Return each series with the first step and the values of each track, at the wall clock's present times."""
        # The lock is released between two series: the caller compresses each, and rows arrive meanwhile.
        with self._lock:
            keys = list(self._series)
        for key in keys:
            with self._lock:
                if (series := self._series.get(key)) is None:
                    continue
                shift = self._shift_seconds
                tracks = [
                    (track.first + round(shift / track.resolution.step_seconds), track.values.tobytes())
                    for track in series.tracks
                ]
            yield series.subject, tracks

    def is_behind(self, saved: Iterable[tuple[Subject, list[tuple[int, bytes]]]]) -> bool:
        """Return whether the series of an earlier run have rows that the wall clock has not reached."""
        last_seconds = 0.0
        for _, tracks in saved:
            for (first, values), resolution in zip(tracks, self._resolutions, strict=True):
                rows = len(values) // (resolution.width * array("I").itemsize)
                last_seconds = max(last_seconds, (first + rows) * resolution.step_seconds)
        with self._lock:
            self._follow_wall_clock()
            # The last minute of an earlier run may have been folded before its end.
            return last_seconds > self.now_seconds + self._shift_seconds + _BEHIND_SECONDS

    def restore(self, saved: Iterable[tuple[Subject, list[tuple[int, bytes]]]]) -> None:
        """Put the series of an earlier run before the rows of this run; the time between them is a gap.

        Raises ValueError if the values of a track are not whole rows.
        """
        for subject, tracks in saved:
            restored = Series(subject, self._resolutions)
            with self._lock:
                now_seconds = self.now_seconds
                for track, (first, values) in zip(restored.tracks, tracks, strict=True):
                    step_seconds = track.resolution.step_seconds
                    track.first = first - round(self._shift_seconds / step_seconds)
                    track.values.frombytes(values)
                    if len(track.values) % track.resolution.width:
                        raise ValueError("a row is not complete")
                    # Rows that the wall clock has not reached would hide the rows of this run.
                    track.drop_from(int(now_seconds // step_seconds))
                restored.expire(now_seconds)
                present = self._series.get(subject.key)
                if present is not None:
                    if present.subject.start_time_ticks != subject.start_time_ticks:
                        continue
                    for track, later in zip(restored.tracks, present.tracks, strict=True):
                        track.append(later)
                    restored.subject = present.subject
                if restored.empty:
                    continue
                self._series[subject.key] = restored
                self._count(subject.key)
                if self.size_bytes > _BUDGET_BYTES:
                    self._make_room(self.now_seconds)

    def saved_minima(self) -> list[tuple[PartKey, int, list[int]]]:
        """Return the minima of each part with their first minute, at the wall clock's present times."""
        with self._lock:
            shift = round(self._shift_seconds / STEP_SECONDS)
            return [(part, first + shift, values) for part, first, values in self._minima.saved()]

    def restore_minima(self, saved: Iterable[tuple[PartKey, int, list[int]]]) -> None:
        """Put the minima of an earlier run before the minima of this run."""
        with self._lock:
            shift = round(self._shift_seconds / STEP_SECONDS)
            for part, first, values in saved:
                self._minima.restore(part, first - shift, values, int(self.now_seconds // STEP_SECONDS) + 1)

    # With the lock

    def _follow_wall_clock(self) -> None:
        shift_seconds = self._wall_clock() - self.now_seconds
        if abs(shift_seconds - self._shift_seconds) > _CLOCK_STEP_SECONDS:
            _log.debug("the wall clock was set by %+.1f s", shift_seconds - self._shift_seconds)
            self._shift_seconds = round(shift_seconds)

    def _series_of(self, subject: Subject) -> Series:
        series = self._series.get(subject.key)
        if series is not None and series.subject.start_time_ticks != subject.start_time_ticks:
            self._remove(subject.key)  # the pid was reused
            series = None
        if series is None:
            series = self._series[subject.key] = Series(subject, self._resolutions)
        elif series.subject != subject:
            self._bytes[series.subject.owner] -= self._sizes.pop(subject.key, 0)
            series.subject = subject
        return series

    def _count(self, key: str) -> None:
        """Count the bytes of a series again; of a removed one, they are subtracted."""
        series = self._series[key]
        size = series.size_bytes
        self._bytes[series.subject.owner] += size - self._sizes.get(key, 0)
        self._sizes[key] = size

    def _remove(self, key: str) -> None:
        owner = self._series.pop(key).subject.owner
        self._bytes[owner] -= self._sizes.pop(key, 0)
        if self._bytes[owner] <= 0:
            del self._bytes[owner]

    def _note_peaks(self, now_seconds: int, caches: Iterable[Subject]) -> None:
        peaks: dict[tuple[str, str], Mapping[str, KvCachePeak]] = {}
        for subject in caches:
            name, _, uuid = subject.cache.partition(" ")
            series = self._series.get(subject.key)
            found = {
                window: KvCachePeak(peak[0], min(peak[1], seconds))
                for window, seconds in KV_PEAK_WINDOWS.items()
                if series is not None and (peak := series.peak(now_seconds - seconds)) is not None
            }
            if found:
                peaks[name, uuid] = found
        self.kv_cache_peaks = peaks

    def _fold(self, now_seconds: int) -> bool:
        """Fold the rows into longer steps, every ten seconds; returns whether it did."""
        if self._folded_step == (step := now_seconds // _FOLD_SECONDS):
            return False
        self._folded_step = step
        expires = self._expired_step != (minute := now_seconds // _EXPIRY_SECONDS)
        self._expired_step = minute
        for key, series in list(self._series.items()):
            series.fold(now_seconds)
            if expires:
                series.expire(now_seconds)
                if series.empty:
                    self._remove(key)
                    continue
            self._count(key)
        return True

    def _make_room(self, now_seconds: float) -> None:
        """Free a part of the budget, from the owners with the most bytes."""
        # So no user can shorten the history of another one. An owner loses first its ended jobs in the order of their
        # ends, then the oldest rows of its largest jobs.
        target = _BUDGET_BYTES * (1 - _FREED_SHARE)
        by_end: dict[str, list[str]] = {}
        """The series of each owner; the series that ended first is the last."""
        for key, series in sorted(self._series.items(), key=lambda item: -item[1].last_seconds):
            by_end.setdefault(series.subject.owner, []).append(key)
        by_size: dict[str, list[tuple[int, str]]] = {}
        """The running series of each owner as a heap; the largest one is the first."""
        while self.size_bytes > target:
            owner = self._largest_owner(target)
            keys = by_end[owner]
            if owner and now_seconds - self._series[keys[-1]].last_seconds >= _LIVE_SECONDS:
                self._remove(keys.pop())
                continue
            if owner not in by_size:
                by_size[owner] = [(-self._sizes[key], key) for key in keys]
                heapq.heapify(by_size[owner])
            size, key = by_size[owner][0]
            if -size < _SMALL_BYTES:
                self._remove(keys.pop())  # names that a user invents: each has a few rows
                continue
            self._series[key].shorten()
            self._count(key)
            heapq.heapreplace(by_size[owner], (-self._sizes[key], key))

    def _largest_owner(self, target: float) -> str:
        owners = {owner: size for owner, size in self._bytes.items() if owner}
        if not owners or self._bytes.get("", 0) > _DEVICES_SHARE * target:
            return ""
        return max(owners, key=lambda owner: owners[owner])

    # Documents

    def _devices(self) -> list[str]:
        devices = [series.subject for series in self._series.values() if series.subject.uuid]
        return [subject.uuid for subject in sorted(devices, key=lambda subject: _gpu_order(subject.gpu))]

    def _steps(self, start_seconds: float, end_seconds: float, now_seconds: float, points: int) -> _Steps:
        """Return the shortest steps that reach back to the start and are at most `points`.

        A step is in the range if its end is. If even minutes are too many, each step of the document has several.
        """
        for number, resolution in enumerate(self._resolutions):
            start, end = (int(time // resolution.step_seconds) for time in (start_seconds, end_seconds))
            if end - start <= points and start_seconds >= now_seconds - resolution.kept_seconds:
                return _Steps(number, 1, start, end)
        ratio = -(-(end - start) // points)
        if ratio > 1:
            # Each step starts at a multiple of its length, so the same minutes are together in the next document.
            start += -start % ratio
        return _Steps(number, max(1, ratio), start, end)

    def _document(self, key: str, steps: _Steps, names: Mapping[str, str] | None) -> dict[str, Any] | None:
        with self._lock:
            series = self._series.get(key)
            if series is None or series.subject.cache:
                return None
            track = Track(self._resolutions[steps.track])
            track.first, track.values = series.tracks[steps.track].rows(steps.start, steps.end)
            subject = series.subject
        width = track.resolution.width
        if steps.ratio > 1:
            rows = array("I")
            for start, end in _groups(steps):
                _, parts = track.rows(start, end)
                rows.extend(folded(parts, width) if parts else _unknown(width))
            before = after = 0
        else:
            rows, before, after = track.values, track.first - steps.start, steps.end - track.end
            if not rows:
                before, after = steps.end - steps.start, 0
        columns = [[None] * before + bytes_of(rows[column::width]) + [None] * after for column in range(width)]
        return {
            "device": subject.uuid or None,
            "job": subject.job or None,
            "name": _name(subject, names),
            "gpu": subject.gpu or None,
            **_named(columns),
        }


def _groups(steps: _Steps) -> list[tuple[int, int]]:
    """Return start and end of each step of a document, in steps of the track. The last one may be shorter."""
    return [(start, min(start + steps.ratio, steps.end)) for start in range(steps.start, steps.end, steps.ratio)]


def _named(columns: list[list[int | None]]) -> dict[str, dict[str, list[int | None]]]:
    """Return the values of rows by name. Rows of one second have one value of each."""
    if len(columns) == len(VALUES):
        return {name: {"max": column} for name, column in zip(VALUES, columns, strict=True)}
    *ranges, peak = VALUES
    named = {name: {"min": columns[2 * i], "max": columns[2 * i + 1]} for i, name in enumerate(ranges)}
    return {**named, peak: {"max": columns[-1]}}


def _name(subject: Subject, names: Mapping[str, str] | None) -> str:
    shown = subject.name or (subject.command if names is None else names.get(subject.job, ""))
    return shown or f"pid {subject.job.rpartition('~')[2]}"


def _gpu_order(gpu: str) -> list[int]:
    return [int(part) if part.isdecimal() else 1 << 30 for part in gpu.split(":")]


def _unknown(width: int) -> list[int]:
    return [UNKNOWN] * width
