"""Whether a series grows without end: a robust slope, and whether it is sure. Pure, bounded in memory and cost.

The series is what is allocated at the same point of each step. It is cut into short blocks and the floor of each is
kept, since spikes tell nothing; where that is not clear, one point is taken for each period of a series that repeats
itself (gradient accumulation, an evaluation, a cache that is flushed), and one for the foot of each tooth of an
irregular sawtooth (garbage that is collected now and then). Through such points goes Theil and Sen's line (`_lines`). A
series is said to grow when

- the slope lies above zero, but for a chance of three in a million: by the points' distances from the line, how alike
  neighbours are, and how few points there are. Many looks are taken at a run, so the chance of each has to be small,
- it has grown two and a half times as much as four fifths of the points lie apart otherwise,
- each quarter of the window has a higher floor than the one before: a sawtooth comes back to its floor; or each of the
  last six feet is higher than the one before,
- the later half grows at least at seven tenths of the earlier's slope: what only fills up (caches, lazily made state)
  slows down, a leak does not,
- it has grown half as much again as the highest tooth that was seen, where it is not judged by its periods; by its
  feet, half as much, and for half as long, again as these rose before they fell,
- the window is twice as long as the longest tooth that was seen.

Windows of 192 steps, and of 4, 16 and 64 times as many, look at once. So a fast leak is found soon, and a slow one at
all. What cannot be told from a leak is taken for one, until it falls or slows down: a sawtooth whose first tooth fills
the window, a cache that takes longer than the window to fill, sometimes what wanders about over a window's length.

How soon a leak of 84 KiB a step can be found at all, by a test that knows the noise exactly and is wrong in one look of
ten thousand (`benchmarks/leak_bounds.py`), beside what tests/support/seeded_runs.py calls

- "drifting about": noise of 7 MiB that lasts ten steps. After 200 steps the leak stands 2.2 standard errors above zero
  at best: six in a hundred are found, and nine in ten after 345 steps,
- "a cache that fills up to 200 MiB": after 200 steps three caches that fill at different rates would look the same
  but for 0.8 standard errors. After 300 steps it is 5,
- "garbage collected at irregular times": six feet stand there after 200 steps, on average. Six stand in rising order
  once in 720 times, so fewer would prove nothing; and six count only where they lie on a line.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, pairwise, takewhile

from gpumem_exporter.client.leaks.line_fit import Line, period_of, seasons, theil_sen, through

__all__ = ["Slope", "Trend"]

_POINTS = 192
_POINTS_LEAST = 16
_LOOK_EVERY = 8
_WINDOWS = ((1, 112), (4, 48), (16, 48), (64, 48))
"""Steps in a point, and how many points there have to be."""
_BLOCK = 4
_BLOCKS_MAX = 48
_HALVED_MIN = 8
_PERIODS_MIN = 4
_STEADY = 0.7
_FALL_SHARE = 0.5
"""A fall of half of what had grown since the last one is the end of a tooth."""
_ABOVE_NOISE = 2.5
_ABOVE_TEETH = 1.5
_CLIMB_MIN = 8
_FEET_MIN = 6
_FEET_MAX = 24
_FEET_POINTS = 2 * _POINTS
_FOOT_POINTS = 4


@dataclass(frozen=True, slots=True)
class Slope:
    """How a series grows, in bytes a step."""

    slope: float
    lower: float
    """It is below that by a chance of three in a million."""
    upper: float
    steps: int
    """How long it has been looked at."""

    @property
    def grown(self) -> int:
        """In the time looked at."""
        return round(self.slope * self.steps)


class Trend:
    """Follows one series. `add` costs two microseconds, and a millisecond or two every eighth step while it rises.

    Args:
        warm_up_steps: values at the start that are left out.
        least_growth: growth over a window that is worth telling, in bytes.
    """

    def __init__(self, *, warm_up_steps: int = 20, least_growth: int = 1 << 20) -> None:
        self._left_out = warm_up_steps
        self._windows = tuple(_Window(steps, least, least_growth) for steps, least in _WINDOWS)

    def add(self, value: int) -> Slope | None:
        """Take the next step's value. Returns the slope in each look at which the series surely grows, else None."""
        if self._left_out > 0:
            self._left_out -= 1
            return None
        found: Slope | None = None
        for window in self._windows:
            found = window.add(value) or found
        return found

    def judge_now(self) -> Slope | None:
        """Judge what there is, even where it is short: sixteen values at least, beside the warm-up."""
        return self._windows[0].judge_now()


class _Window:
    """The last points; each is the floor of so many steps."""

    def __init__(self, point_steps: int, points_min: int, least_growth: int) -> None:
        self._point_steps = point_steps
        self._points_min = points_min
        self._least_growth = least_growth
        self._points: deque[int] = deque(maxlen=_POINTS)
        self._floor = math.inf
        self._in_point = 0
        self._count = 0
        self._teeth = _Teeth(least_growth)

    def add(self, value: int) -> Slope | None:
        if value < self._floor:
            self._floor = value
        self._in_point += 1
        if self._in_point < self._point_steps:
            return None
        point, self._floor, self._in_point = int(self._floor), math.inf, 0
        self._points.append(point)
        self._count += 1
        self._teeth.add(self._points)
        if self._count % _LOOK_EVERY or len(self._points) < max(self._points_min, 2 * self._teeth.longest):
            return None
        return self._judge(_BLOCK if self._point_steps == 1 else 1)

    def judge_now(self) -> Slope | None:
        """See `Trend`."""
        if len(self._points) < max(_POINTS_LEAST, 2 * self._teeth.longest):
            return None
        return self._judge(_BLOCK if len(self._points) >= self._points_min else 1)

    def _judge(self, block: int) -> Slope | None:
        points = list(self._points)
        feet = self._teeth.feet()
        line = self._by_feet(feet) if len(feet) >= _FEET_MIN else None
        if line is None and len(feet) > _FEET_MIN:
            line = self._by_feet(feet[-_FEET_MIN:])  # since when it leaks
        if line is None and _rises_by_quarters(points):
            line = self._by_blocks(points, max(block, -(-len(points) // _BLOCKS_MAX)))
            line = line or self._by_periods(points, block)
        if line is None:
            return None
        steps = self._point_steps
        return Slope(line.slope / steps, line.lower / steps, line.upper / steps, len(points) * steps)

    def _by_blocks(self, points: list[int], block: int) -> Line | None:
        ends = range(len(points) % block + block, len(points) + 1, block)
        floors = [min(points[end - block : end]) for end in ends]
        return self._sure(ends, floors, _ABOVE_TEETH * self._teeth.highest)

    def _by_feet(self, feet: Sequence[tuple[int, int]]) -> Line | None:
        ats, floors = zip(*feet, strict=True)
        if ats[-1] - ats[0] < _ABOVE_TEETH * self._teeth.feet_climbed:
            return None
        return self._sure(ats, floors, _ABOVE_TEETH * self._teeth.feet_fell)

    def _by_periods(self, points: list[int], block: int) -> Line | None:
        period = period_of(points)
        if period <= block or len(points) < _PERIODS_MIN * period:
            return None
        return self._sure(*seasons(points, period), 0.0)

    def _sure(self, ats: Sequence[int], values: Sequence[float], least: float) -> Line | None:
        """The line through them, where it surely rises, by that much at least, and does not slow down."""
        span = ats[-1] - ats[0]
        if values[-1] <= values[0]:
            return None
        line = through(ats, values)
        if line.lower <= 0 or line.slope * span < max(least, self._least_growth, _ABOVE_NOISE * line.spread):
            return None
        half = (len(values) + 1) // 2 if len(values) >= _HALVED_MIN else len(values) // 2 + 1
        early, late = theil_sen(ats[:half], values[:half]), theil_sen(ats[-half:], values[-half:])
        return line if late > 0 and late >= _STEADY * early else None


class _Teeth:
    """The teeth of a sawtooth, seen point by point: how long and how high they are, and where their feet stand."""

    def __init__(self, least_growth: int) -> None:
        self.longest = 0
        self.highest = 0.0
        self.feet_fell = 0.0
        """How far one foot lay below one before it, at most."""
        self.feet_climbed = 0
        """The longest time that passed before one did."""
        self._feet_from = 0
        self._least_growth = least_growth
        self._count = 0
        self._low = math.inf
        self._low_at = 0
        self._high = 0.0
        self._feet: deque[tuple[int, int]] = deque(maxlen=_FEET_MAX)

    def add(self, points: deque[int]) -> None:
        """The last of these is new. Where it lies below a good part of what had grown, that was a tooth, or a spike."""
        point = points[-1]
        self._count += 1
        if point < self._low:
            self._begin(point)
        elif point > self._high:
            self._high = point
        elif self._high - point > max(self._least_growth, _FALL_SHARE * (self._high - self._low)):
            foot = self._low + (self._high - self._low) / 4
            climbed = sum(1 for _ in takewhile(lambda each: each > foot, islice(reversed(points), 1, None)))
            if climbed >= _CLIMB_MIN:
                self.longest = min(_POINTS // 2, max(self.longest, climbed * 4 // 3))
                self.highest = max(self.highest, self._high - point)
                if self._low_at > 1:  # else it only began there to be looked at
                    self._stand(self._low_at, int(self._low))
            self._begin(point)

    def feet(self) -> Sequence[tuple[int, int]]:
        """Where the last feet stand, and how high, as far back as each is higher than the one before."""
        found = [(self._low_at, int(self._low))] if self._stands() else []
        for foot in reversed(self._feet):
            if self._count - foot[0] > _FEET_POINTS or (found and foot[1] >= found[-1][1]):
                break
            found.append(foot)
        return found[::-1]

    def _stands(self) -> bool:
        return self._count - self._low_at >= _FOOT_POINTS and self._high - self._low > self._least_growth

    def _begin(self, point: int) -> None:
        self._low = self._high = point
        self._low_at = self._count

    def _stand(self, at: int, low: int) -> None:
        if self._feet:
            self.feet_fell = max(self.feet_fell, max(each for _, each in self._feet) - low)
            if self._feet[-1][1] - low > self._least_growth:
                self.feet_climbed = max(self.feet_climbed, at - self._feet_from)
                self._feet_from = at
        self._feet.append((at, low))


def _rises_by_quarters(points: Sequence[int]) -> bool:
    quarter = len(points) // 4
    lowest = [min(points[end - quarter : end]) for end in range(len(points), len(points) - 4 * quarter, -quarter)]
    return all(later > earlier for later, earlier in pairwise(lowest))
