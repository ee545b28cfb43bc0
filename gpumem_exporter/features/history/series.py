"""The values of one device or one job over time, at three resolutions. Pure.

A value is a number of whole KiB in 4 bytes, in arrays that grow with the values. A full day of one series has 76 KB.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

VALUES = ("used", "allocated", "idle_cache", "in_use_peak")
"""The values of a row of one second. A row of a longer step has minimum and maximum, of the peak the maximum."""

UNKNOWN = (1 << 32) - 1
"""No value. It is larger than every value, so `min` ignores it."""
_UNIT_BITS = 10
# The Python objects of a series without its arrays and texts, as tracemalloc counts them.
_FIXED_BYTES = 640


class Resolution(NamedTuple):
    """Rows of one length of step."""

    step_seconds: int
    kept_steps: int
    """The number of steps that are kept. Rows that are older stay for up to a minute more."""
    width: int
    """The number of values of a row."""

    @property
    def kept_seconds(self) -> int:
        """The time that the kept steps cover."""
        return self.step_seconds * self.kept_steps


def resolutions(retention_seconds: float) -> tuple[Resolution, ...]:
    """Return the resolutions, the finest first: seconds for ten minutes, ten seconds for two hours, then minutes."""
    # One minute more is kept, so that a request for the last ten minutes gets seconds although it arrives later.
    spans = ((1, 600), (10, 7200), (60, int(retention_seconds)))
    return tuple(
        Resolution(step, -(-min(span, int(retention_seconds)) // step) + -(-60 // step), 4 if step == 1 else 7)
        for step, span in spans
    )


class Subject(NamedTuple):
    """What a series is about."""

    uuid: str
    """Of a device; empty for a job."""
    job: str
    """The id of a job; empty for a device."""
    name: str
    """The name of the device's model, or the workload of the job."""
    command: str = ""
    """Of a job; `--web.hide-identities` hides it."""
    gpu: str = ""
    """The NVML index of the device."""
    owner: str = ""
    """The user whose share of the memory the series of a job uses."""
    start_time_ticks: int = 0
    """Of a job that is one process without a workload, and of a cache: differs for a later process with the same pid.
    """
    cache: str = ""
    """Of the key-value cache of one process of the job on one device: the process's name, a space and the uuid. The
    values of such a series are `used` and `in_use_peak` for what running requests use, `allocated` for the size."""

    @property
    def key(self) -> str:
        """The key of the series: a device's uuid or a job's id. A space, which no id has, is before a cache."""
        return f"{self.job} {self.cache}" if self.cache else self.uuid or self.job

    @property
    def size_bytes(self) -> int:
        """The memory of its texts."""
        return sum(sys.getsizeof(text) for text in self if isinstance(text, str) and text)


class Track:
    """Rows at one resolution, one for each step without a hole. A row of unknown values is a gap. Not thread-safe."""

    __slots__ = ("first", "resolution", "values")

    def __init__(self, resolution: Resolution) -> None:
        self.resolution = resolution
        self.first = 0
        """The step of the first row: its start in seconds, divided by the seconds of a step."""
        self.values = array("I")

    @property
    def end(self) -> int:
        """The step after the last row."""
        return self.first + len(self.values) // self.resolution.width

    def put(self, step: int, row: Iterable[int]) -> None:
        """Append the row of a step, after unknown rows for the steps between. A step that has a row keeps it."""
        if self._reach(step):
            self.values.extend(row)

    def append(self, later: Track) -> None:
        """Append all rows of another track, which replace rows of the same steps."""
        if not later.values:
            return
        self.drop_from(later.first)
        if self._reach(later.first):
            self.values.extend(later.values)

    def rows(self, start: int, end: int) -> tuple[int, array[int]]:
        """Return a copy of the rows from `start` to before `end`, and the step of the first one."""
        width, first = self.resolution.width, self.first
        start = min(max(start, first), self.end)
        return start, self.values[(start - first) * width : max(0, end - first) * width]

    def drop_before(self, step: int) -> None:
        """Drop the rows of earlier steps."""
        count = min(step, self.end) - self.first
        if count > 0:
            del self.values[: count * self.resolution.width]
            self.first += count

    def drop_from(self, step: int) -> None:
        """Drop the rows of this step and of later ones."""
        del self.values[max(0, step - self.first) * self.resolution.width :]

    def _reach(self, step: int) -> bool:
        """Make `step` the next row; return whether it can be."""
        missing = step - self.end
        if not self.values or missing >= self.resolution.kept_steps:
            self.values = array("I")
            self.first = step
        elif missing > 0:
            self.values.extend(array("I", [UNKNOWN]) * (missing * self.resolution.width))
        return step == self.end


class Series:
    """The rows of one subject at each resolution. Not thread-safe."""

    __slots__ = ("subject", "tracks")

    def __init__(self, subject: Subject, kept: Sequence[Resolution]) -> None:
        self.subject = subject
        self.tracks = tuple(map(Track, kept))

    @property
    def size_bytes(self) -> int:
        """The memory that the series uses."""
        return _FIXED_BYTES + self.subject.size_bytes + sum(sys.getsizeof(track.values) for track in self.tracks)

    @property
    def last_seconds(self) -> int:
        """The end of the newest row."""
        return max((t.end * t.resolution.step_seconds for t in self.tracks if t.values), default=0)

    @property
    def empty(self) -> bool:
        """Whether there is no row."""
        return not any(track.values for track in self.tracks)

    def peak(self, start_seconds: float) -> tuple[int, int] | None:
        """Return the highest in-use peak in bytes since a time, and the number of seconds in which it is known.

        The first step may start before that time. None if it is not known at any time.
        """
        known: list[int] = []
        seconds = 0
        for track in reversed(self.tracks):  # the steps that are not folded yet are in finer tracks
            step_seconds, width = track.resolution.step_seconds, track.resolution.width
            _, rows = track.rows(int(start_seconds // step_seconds), track.end)
            of_track = [unit for unit in rows[width - 1 :: width] if unit != UNKNOWN]
            known += of_track
            seconds += step_seconds * len(of_track)
            if track.values:
                start_seconds = max(start_seconds, track.end * step_seconds)
        return (max(known) << _UNIT_BITS, seconds) if known else None

    def fold(self, now_seconds: float) -> None:
        """Fold the rows of all steps that have ended into rows of longer steps."""
        for fine, coarse in zip(self.tracks, self.tracks[1:], strict=False):
            ratio = coarse.resolution.step_seconds // fine.resolution.step_seconds
            ended = int(now_seconds // coarse.resolution.step_seconds)
            start = max(fine.first // ratio, coarse.end if coarse.values else 0)
            for step in range(start, min(ended, -(-fine.end // ratio))) if fine.values else ():
                _, rows = fine.rows(step * ratio, (step + 1) * ratio)
                coarse.put(step, folded(rows, fine.resolution.width))

    def expire(self, now_seconds: float) -> None:
        """Drop the rows that are older than their resolution keeps."""
        for track in self.tracks:
            track.drop_before(int(now_seconds // track.resolution.step_seconds) - track.resolution.kept_steps)

    def shorten(self) -> None:
        """Drop a quarter of the rows of the largest resolution, the oldest ones."""
        # Seconds count half, so that they are kept longest.
        largest = max(self.tracks, key=lambda track: len(track.values) / (2 if track is self.tracks[0] else 1))
        largest.drop_before(largest.first + max(1, (largest.end - largest.first) // 4))


def row_of(values: Iterable[int | None]) -> list[int] | None:
    """Return the row of one second from bytes; None if no value is known. Values of 4 TiB and more are unknown."""
    units = [UNKNOWN if value is None else value >> _UNIT_BITS for value in values]
    row = [unit if 0 <= unit < UNKNOWN else UNKNOWN for unit in units]
    return None if all(unit == UNKNOWN for unit in row) else row


def folded(rows: array[int], width: int) -> list[int]:
    """Return the row of a step from the rows of its parts: the minima, maxima and the peak of the known values."""
    fine = width == len(VALUES)
    row = []
    for column in range(len(VALUES) - 1):
        low = column if fine else 2 * column
        row += [min(rows[low::width]), _highest(rows[low if fine else low + 1 :: width])]
    return [*row, _highest(rows[width - 1 :: width])]


def bytes_of(units: Iterable[int]) -> list[int | None]:
    """Return values of a track in bytes; None is unknown."""
    return [None if unit == UNKNOWN else unit << _UNIT_BITS for unit in units]


def _highest(units: array[int]) -> int:
    highest = max(units)
    return highest if highest != UNKNOWN else max((unit for unit in units if unit != UNKNOWN), default=UNKNOWN)
