"""The smallest allocated bytes of each process on each device in each minute of the last hour, in bounded memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from gpumem_exporter.core.samples import PartKey, ReportingProcess
from gpumem_exporter.features.history.series import Resolution, Track, bytes_of, row_of

STEP_SECONDS = 60
_MINUTES = Resolution(STEP_SECONDS, 60, 1)
# The maximum number of parts, about 1.5 MiB. Beyond that, the share with the most parts loses its newest ones.
_MAX_PARTS = 2048
# A part without a value for this number of minutes has ended.
_ENDED_STEPS = 5


class Minima:
    """One value for each minute of each part; the last value is of the present minute. Not thread-safe."""

    def __init__(self) -> None:
        self._tracks: dict[PartKey, Track] = {}
        self._step = 0

    def add(self, second: int, processes: Iterable[ReportingProcess]) -> None:
        """Add the samples of one second."""
        step = second // STEP_SECONDS
        if step != self._step:
            self._step = step
            self._expire(step)
        for process in processes:
            for sample in process.report.devices:
                if (row := row_of((sample.allocated_bytes,))) is None:
                    continue
                key = process.part(sample.uuid)
                track = self._tracks.get(key)
                if track is None:
                    track = self._tracks[key] = Track(_MINUTES)
                if track.values and track.end == step + 1:
                    track.values[-1] = min(track.values[-1], *row)
                else:
                    track.put(step, row)
        self._make_room()

    def of(self, key: PartKey) -> Sequence[tuple[int, int]]:
        """Return the whole minutes of a part in which its value is known: the end in seconds, and the minimum."""
        track = self._tracks.get(key)
        if track is None:
            return ()
        _, rows = track.rows(0, self._step)
        return [
            ((track.first + index + 1) * STEP_SECONDS, size)
            for index, size in enumerate(bytes_of(rows))
            if size is not None
        ]

    def saved(self) -> Iterator[tuple[PartKey, int, list[int]]]:
        """Yield each part with its first minute and its values."""
        for key, track in self._tracks.items():
            yield key, track.first, track.values.tolist()

    def restore(self, key: PartKey, first: int, values: Iterable[int], end: int) -> None:
        """Put the values of an earlier run, without the minutes from `end` on, before the values of this run."""
        restored = Track(_MINUTES)
        restored.first = first
        restored.values.extend(values)
        restored.drop_from(end)
        if (present := self._tracks.get(key)) is not None:
            restored.append(present)
        if restored.values:
            self._tracks[key] = restored
            self._make_room()

    def _expire(self, step: int) -> None:
        self._tracks = {key: track for key, track in self._tracks.items() if track.end >= step - _ENDED_STEPS}
        for track in self._tracks.values():
            track.drop_before(step - _MINUTES.kept_steps)

    def _make_room(self) -> None:
        # So no user can hide the growth of another user's process.
        if (excess := len(self._tracks) - _MAX_PARTS) <= 0:
            return
        counts = Counter(key.share for key in self._tracks)
        for key in list(reversed(self._tracks)):
            if counts[key.share] == max(counts.values()):
                del self._tracks[key]
                counts[key.share] -= 1
                if not (excess := excess - 1):
                    return
