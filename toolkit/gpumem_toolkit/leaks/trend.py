"""Decides whether a series of allocated bytes, one value per step, grows without end.

A window keeps the last 192 points. A point is the smallest value of 1, 4, 16 or 64 steps, so spikes do not count. Four
windows judge the series at the same time: the short ones find fast leaks early, and only the long ones find slow leaks.
A window is divided into blocks, and reports a leak if the smallest values of the blocks surely rise. Blocks of several
lengths are tried: what rises and falls back within a block, such as noise, garbage, gradient accumulation or an
evaluation, does not count. The last length is the period of the series.

Before the first window is full, growth that would fill the device in 200 steps is found in 30 steps, if each of them is
higher than the one before.

A series that looks like a leak for a whole window (a first sawtooth of 170 steps, a cache that fills for 200 steps) is
judged to grow, until `Growing` sees that its growth has stopped. `benchmarks/leaks.py` measures false alarms and the
steps until a leak is found.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import sub
from statistics import fmean, median

POINTS_MAX = 192
POINTS_MIN = 16
# A judgement takes about a millisecond of a training step.
_JUDGE_EVERY = 8
# Steps per point, and the points that a window needs before it judges.
_WINDOWS = ((1, 112), (4, 48), (16, 48), (64, 48))
# The numbers of blocks into which a window is divided. Fewer blocks rise evenly by chance, unless a block is a period.
_BLOCKS = (48, 16, 12, 9)
# A longer period has to repeat this much better than the best shorter one.
_PERIOD_GAIN = 0.7
# The later half has to grow at this share of the rate of the earlier half.
_STEADY = 0.7
# A sawtooth falls back to its floor: the growth has to be this many times the largest fall.
_ABOVE_FALLS = 1.5
_CORRELATION_MAX = 0.98
# If half a window grows by less than this share of the growth that was found for it, the growth has stopped.
_STOPPED_SHARE = 0.25
# Blocks of a window in which the end of a growth is looked for.
_END_BLOCKS = 8
# A short window, for growth by at least this share of the device per step.
_FAST_POINTS = 30
_FAST_SHARE = 0.005
# The standard errors by which a slope must exceed 0: a chance of one in a million. A run makes many judgements.
_SIGMAS = 4.75


@dataclass(frozen=True, slots=True)
class Slope:
    """The growth of a series."""

    per_step: float
    steps: int
    """The length of the window in which it was measured."""

    @property
    def grown(self) -> int:
        """Bytes that the series grew by in the window."""
        return round(self.per_step * self.steps)


class Trend:
    """Follows one series. `add` costs about two microseconds, and a millisecond at every eighth step of a rise.

    The first `warm_up_steps` values are ignored. A growth of less than `least_growth` bytes over a window is no leak.
    """

    def __init__(self, *, warm_up_steps: int = 20, least_growth: int = 1 << 20) -> None:
        self._warm_up_left = warm_up_steps
        self._least_growth = least_growth
        self._last = 0
        self.restart()

    def restart(self) -> None:
        """Forget the values until now, as after the end of a growth."""
        self._windows = tuple(_Window(steps, points_min) for steps, points_min in _WINDOWS)
        self._rises: deque[int] = deque(maxlen=_FAST_POINTS)

    def add(self, value: int, total_bytes: Callable[[], int | None] = lambda: None) -> Slope | None:
        """Add the value of the next step. Returns the slope if a window judges at this step that the series grows.

        `total_bytes` returns the size of the device. It is called only while each step is higher than the one before.
        """
        if self._warm_up_left > 0:
            self._warm_up_left -= 1
            self._last = value
            return None
        self._rises.append(value - self._last)
        self._last = value
        found = self._fast_slope(total_bytes)
        for window in self._windows:
            if window.add(value):
                slope = slope_of(window.points, self._least_growth)
                if slope is not None:
                    found = Slope(slope / window.point_steps, len(window.points) * window.point_steps)
        return found

    def _fast_slope(self, total_bytes: Callable[[], int | None]) -> Slope | None:
        if len(self._rises) < _FAST_POINTS or min(self._rises) <= 0:
            return None
        rises, total = list(self._rises), total_bytes()
        half = _FAST_POINTS // 2
        early, late = median(rises[:half]), median(rises[half:])
        steady = late >= _STEADY * early and total is not None and min(early, late) >= _FAST_SHARE * total
        return Slope(median(rises), _FAST_POINTS) if steady else None


class Growing:
    """Follows a series that grows, to see whether the growth continues.

    The end of a growth, or its release, is seen after a quarter more than the window of `slope` at the latest.
    """

    def __init__(self, slope: Slope) -> None:
        self.slope = slope
        self._block = slope.steps // _END_BLOCKS
        self._floors: deque[float] = deque([math.inf], maxlen=_END_BLOCKS)
        self._steps = 0

    def goes_on(self, value: int) -> bool:
        """Add the value of the next step. Returns False once the series does not grow any more."""
        self._floors[-1] = min(self._floors[-1], value)
        self._steps += 1
        if self._steps % self._block:
            return True
        # The floors of half a window each: spikes and a sawtooth do not change them.
        half = _END_BLOCKS // 2
        floors = list(self._floors)
        grown = min(floors[half:]) - min(floors[:half]) if len(floors) == _END_BLOCKS else math.inf
        self._floors.append(math.inf)
        return grown >= _STOPPED_SHARE * self.slope.grown / 2


class _Window:
    def __init__(self, point_steps: int, points_min: int) -> None:
        self.points: deque[int] = deque(maxlen=POINTS_MAX)
        self.point_steps = point_steps
        self._points_min = points_min
        self._floor: float = math.inf
        self._steps = 0

    def add(self, value: int) -> bool:
        """Add the value of the next step. Returns whether the window is to be judged now."""
        if value < self._floor:
            self._floor = value
        self._steps += 1
        if self._steps % self.point_steps:
            return False
        self.points.append(int(self._floor))
        self._floor = math.inf
        return self._steps % (_JUDGE_EVERY * self.point_steps) == 0 and len(self.points) >= self._points_min


def slope_of(series: Sequence[int], least_growth: int) -> float | None:
    """Return the growth per point if `POINTS_MIN` points or more surely grow, by `least_growth` bytes at least."""
    points = list(series)
    quarters = _floors(points, len(points) // 4)[1][-4:]
    if not all(later > earlier for earlier, later in pairwise(quarters)):
        return None  # most series end here, without the cost of the other tests
    shortest, *longer = (max(1, len(points) // blocks) for blocks in _BLOCKS)
    slope = _sure_slope(*_floors(points, shortest), least_growth)
    if slope is not None:
        return slope  # before the search for the period, which takes most of the time
    lengths = sorted({*longer, max(shortest, _period_of(points))} - {shortest})
    return next((slope for length in lengths if (slope := _sure_slope(*_floors(points, length), least_growth))), None)


def _period_of(points: Sequence[int]) -> int:
    """Return the number of points after which the series repeats best, apart from its growth; 1 if none stands out."""
    best, best_difference = 1, math.inf
    for period in range(1, len(points) // 4 + 1):
        differences = list(map(sub, points[period:], points))
        growth = fmean(differences)
        difference = sum([abs(each - growth) for each in differences]) / len(differences)
        if difference < _PERIOD_GAIN * best_difference:
            best, best_difference = period, difference
    return best


def _floors(points: list[int], length: int) -> tuple[range, list[int]]:
    """Return the ends of the newest blocks, and the smallest value of each block."""
    ends = range(len(points) % length + length, len(points) + 1, length)
    return ends, [min(points[end - length : end]) for end in ends]


def _sure_slope(ats: Sequence[int], values: Sequence[int], least_growth: int) -> float | None:
    slope = _theil_sen(ats, values)
    growth = slope * (ats[-1] - ats[0])
    largest_fall = max(highest - value for highest, value in zip(accumulate(values, max), values, strict=True))
    if growth < max(least_growth, _ABOVE_FALLS * largest_fall) or slope <= _margin(ats, values, slope):
        return None
    # A cache that fills up slows down.
    half = (len(values) + 1) // 2
    early, late = _theil_sen(ats[:half], values[:half]), _theil_sen(ats[-half:], values[-half:])
    return slope if late > 0 and late >= _STEADY * early else None


def _theil_sen(ats: Sequence[int], values: Sequence[int]) -> float:
    """Return the median of the slopes between all pairs of points."""
    # The least squares would follow the few steps that an evaluation or a checkpoint lifts.
    points = list(zip(ats, values, strict=True))
    return median(
        [(later - value) / (after - at) for place, (after, later) in enumerate(points) for at, value in points[:place]]
    )


def _margin(ats: Sequence[int], values: Sequence[int], slope: float) -> float:
    """Return `_SIGMAS` standard errors of a slope through four points or more, and more with few points."""
    count = len(values)
    residuals = [value - slope * at for at, value in zip(ats, values, strict=True)]
    mean, mean_at = fmean(residuals), fmean(ats)
    residuals = [residual - mean for residual in residuals]
    squares = sum(residual * residual for residual in residuals)
    # Neighboring residuals that are correlated widen the margin, because a series that wanders slowly does not grow
    # (B. D. Santer et al., Statistical significance of trends in layer-average atmospheric temperature time series,
    # 2000).
    correlation = sum(now * later for now, later in pairwise(residuals)) / squares if squares else 0.0
    correlation = min(max(correlation, 0.0) + 2 / math.sqrt(count), _CORRELATION_MAX)  # two standard errors above it
    spread = sum((at - mean_at) ** 2 for at in ats)
    error = math.sqrt(squares / (count - 2) * (1 + correlation) / (1 - correlation) / spread)
    return error * _SIGMAS * math.exp(_SIGMAS**2 / (2 * count))
