"""Whether a series grows without end: a robust slope, and whether it is sure. Pure, bounded in memory and cost.

The series is what is allocated at the same point of each step. The slope is Theil and Sen's, the median of the slopes
between pairs, with Sen's bounds (Kendall's variance). Where the series repeats itself every so many steps (gradient
accumulation, an evaluation, a cache that is flushed), pairs are taken a whole number of periods apart; else it is cut
into short blocks and the floor of each is kept, since spikes tell nothing. A series is said to grow when

- the lower bound lies above zero at four standard deviations, and that of its later half at two,
- each quarter of the window has a higher floor than the one before: a sawtooth comes back to its floor,
- the later half grows at least at seven tenths of the earlier's slope: what only fills up (caches, lazily made state)
  slows down, a leak does not,
- the growth is twice the noise, and more than the highest tooth of an irregular sawtooth,
- the window is twice as long as the longest tooth that was seen.

Three windows of different lengths look at once: 192, 1,536 and 12,288 steps. So a fast leak is found soon, and a slow
one at all. A sawtooth whose first tooth fills the whole window is taken for a leak, until it falls.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, pairwise, takewhile
from operator import sub
from statistics import median

__all__ = ["Slope", "Trend", "seasonal_slope"]

_POINTS = 192
_POINTS_MIN = 112
_POINTS_LEAST = 16
_LOOK_EVERY = 8
_BLOCK = 4
_BLOCK_STEPS = (1, 8, 64)
_SURE_DEVIATIONS = 4.0
_LATE_DEVIATIONS = _SUSPICIOUS_DEVIATIONS = 2.0
_STEADY = 0.7
_ABOVE_NOISE = 2.5
_REGULAR = 0.2
_LIKER = 0.7
_FALL_SHARE = 0.5
"""A fall of half of what had grown since the last one is the end of a tooth."""
_PERIODS_MIN = 2
_CLIMB_MIN = 8


@dataclass(frozen=True, slots=True)
class Slope:
    """How a series grows, in bytes a step."""

    slope: float
    lower: float
    """It is not below that, at four standard deviations."""
    upper: float
    steps: int
    """How long it has been looked at."""
    sure: bool

    @property
    def grown(self) -> int:
        """In the time looked at."""
        return round(self.slope * self.steps)


class Trend:
    """Follows one series. `add` costs a microsecond, and some milliseconds every eighth step while the series rises.

    Args:
        warm_up_steps: values at the start that are left out.
        least_growth: growth over a window that is worth telling, in bytes.
    """

    def __init__(self, *, warm_up_steps: int = 20, least_growth: int = 1 << 20) -> None:
        self._left_out = warm_up_steps
        self._windows = tuple(_Window(steps, least_growth) for steps in _BLOCK_STEPS)

    def add(self, value: int) -> Slope | None:
        """Take the next step's value. Returns the slope where the series grows surely or perhaps, else None."""
        if self._left_out > 0:
            self._left_out -= 1
            return None
        found: Slope | None = None
        for window in self._windows:
            slope = window.add(value)
            if slope is not None and (found is None or (slope.sure and not found.sure)):
                found = slope
        return found

    def judge_now(self) -> Slope | None:
        """Judge what there is, even where it is short: sixteen values at least, beside the warm-up."""
        return self._windows[0].judge_now()


class _Window:
    """The last points; each is the floor of so many steps."""

    def __init__(self, point_steps: int, least_growth: int) -> None:
        self._point_steps = point_steps
        self._least_growth = least_growth
        self._points: deque[int] = deque(maxlen=_POINTS)
        self._floor = math.inf
        self._in_point = 0
        self._count = 0
        self._low = math.inf
        self._high = 0.0
        self._longest_tooth = 0
        self._highest_tooth = 0.0

    def add(self, value: int) -> Slope | None:
        self._floor = min(self._floor, value)
        self._in_point += 1
        if self._in_point < self._point_steps:
            return None
        point, self._floor, self._in_point = int(self._floor), math.inf, 0
        self._points.append(point)
        self._count += 1
        self._notice_tooth(point)
        if self._count % _LOOK_EVERY or len(self._points) < max(_POINTS_MIN, 2 * self._longest_tooth):
            return None
        return self._judge(list(self._points))

    def judge_now(self) -> Slope | None:
        """See `Trend`."""
        if len(self._points) < max(_POINTS_LEAST, 2 * self._longest_tooth):
            return None
        return self._judge(list(self._points), block=_BLOCK if len(self._points) >= _POINTS_MIN else 1)

    def _notice_tooth(self, point: int) -> None:
        """The series falls back by a good part of what it had grown: that was a tooth, or a spike."""
        if point < self._low:
            self._low = self._high = point
        elif point > self._high:
            self._high = point
        elif self._high - point > max(self._least_growth, _FALL_SHARE * (self._high - self._low)):
            foot = self._low + (self._high - self._low) / 4
            climbed = sum(1 for _ in takewhile(lambda each: each > foot, islice(reversed(self._points), 1, None)))
            if climbed >= _CLIMB_MIN:
                self._longest_tooth = min(_POINTS // 2, max(self._longest_tooth, climbed * 4 // 3))
                self._highest_tooth = max(self._highest_tooth, self._high - point)
            self._low = self._high = point

    def _judge(self, points: list[int], block: int = _BLOCK) -> Slope | None:
        if not _rises_by_quarters(points):
            return None
        period, each = _period(points), 1
        regular = period > 1
        if period <= block:
            each = period * -(-block // period)
            points = [min(points[end - each : end]) for end in range(len(points), each - 1, -each)][::-1]
            period = 1
        half = len(points) // 2
        slope, lower, upper = seasonal_slope(points, period, _SURE_DEVIATIONS)
        grown, noise = slope * len(points), _noise(points, period, slope)
        if grown < self._least_growth:
            return None
        sure = (
            lower > 0
            and grown >= _ABOVE_NOISE * noise
            # An irregular sawtooth may climb for long: then only what exceeds its highest tooth counts.
            and (grown >= self._highest_tooth or (regular and noise < _REGULAR * self._highest_tooth))
            and seasonal_slope(points[half:], period, _LATE_DEVIATIONS)[1] > 0
            and seasonal_slope(points[half:], period, 1.0)[2] >= _STEADY * seasonal_slope(points[:half], period, 0.0)[0]
        )
        if not sure and seasonal_slope(points, period, _SUSPICIOUS_DEVIATIONS)[1] <= 0:
            return None
        each *= self._point_steps
        return Slope(slope / each, lower / each, upper / each, len(points) * each, sure)


def _rises_by_quarters(points: Sequence[int]) -> bool:
    quarter = len(points) // 4
    lowest = [min(points[end - quarter : end]) for end in range(len(points), len(points) - 4 * quarter, -quarter)]
    return all(later > earlier for later, earlier in pairwise(lowest))


def _period(points: Sequence[int]) -> int:
    """After how many points the series is most like itself, but for its growth."""
    best, unlike = 1, math.inf
    for period in range(1, len(points) // _PERIODS_MIN + 1):
        differences = list(map(sub, points[period:], points))
        usual = sum(differences) / len(differences)
        difference = sum([abs(each - usual) for each in differences]) / len(differences)
        if difference < _LIKER * unlike:
            best, unlike = period, difference
    return best


def _noise(points: Sequence[int], period: int, slope: float) -> float:
    """How far four fifths of the points lie apart, but for growth and seasons."""
    if period == 1:
        rests = [point - slope * at for at, point in enumerate(points)]
    else:
        rests = [(later - now) / math.sqrt(2) for now, later in zip(points, points[period:], strict=False)]
    rests.sort()
    tenth = len(rests) // 10
    return rests[-1 - tenth] - rests[tenth]


def seasonal_slope(points: Sequence[int], period: int, deviations: float) -> tuple[float, float, float]:
    """The median of the slopes between all pairs a whole number of periods apart, and its bounds.

    Sources: P. K. Sen, Estimates of the regression coefficient based on Kendall's tau (1968); R. M. Hirsch et al.,
    Techniques of trend analysis for monthly water quality data (1982), for the seasons.
    """
    count = len(points)
    slopes: list[float] = []
    for distance in range(period, count, period):
        slopes += [(later - now) / distance for now, later in zip(points, points[distance:], strict=False)]
    slopes.sort()
    variance = 0.0
    for phase in range(period):
        in_phase = len(range(phase, count, period))
        variance += in_phase * (in_phase - 1) * (2 * in_phase + 5) / 18
    pairs, spread = len(slopes), deviations * math.sqrt(variance)
    if not pairs:
        return 0.0, -math.inf, math.inf
    low, high = math.floor((pairs - spread) / 2), math.ceil((pairs + spread) / 2)
    return (
        median(slopes),
        slopes[low] if low >= 0 else -math.inf,
        slopes[high] if high < pairs else math.inf,
    )
