"""Decides whether a series of allocated bytes, one value per step, grows without end.

A window keeps the last 192 points. A point is the smallest value of 1, 4, 16 or 64 steps, so spikes do not count. Four
windows judge the series at the same time: the short ones find fast leaks early, and only the long ones find slow leaks.
A window reports a leak if one of three summaries of its points surely rises: the floors of short blocks, the means of
periods, or the floors of long blocks.

A series that looks like a leak for a whole window (a first sawtooth of 170 steps, a cache that fills for 200 steps) is
reported as a leak, until `Growing` sees that its growth has stopped. `benchmarks/leaks.py` measures false alarms and
the steps until a leak is found.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import sub
from statistics import fmean, median

_POINTS_MAX = 192
_POINTS_MIN = 16
_JUDGE_EVERY = 8
"""A judgement takes about a millisecond of a training step."""
_WINDOWS = ((1, 112), (4, 48), (16, 48), (64, 48))
"""Steps per point, and the points that a window needs before it judges."""
_SHORT_BLOCK = 4
_LONG_BLOCK = 12
_BLOCKS_MAX = 48
_BLOCKS_MIN = 4
_STEADY = 0.7
"""A cache that fills up slows down: the later half has to grow at this share of the rate of the earlier half."""
_ABOVE_FALLS = 1.5
"""A sawtooth falls back to its floor: the growth has to be this many times the largest fall."""
_PERIOD_GAIN = 0.7
"""A longer period has to repeat this much better than the best shorter one."""
_CORRELATION_MAX = 0.98
_STOPPED_SHARE = 0.25
"""If a window grows by less than this share of the growth that was found, the growth has stopped."""
_SIGMAS = 4.75
"""Standard errors between the slope and its bounds: a chance of one in a million. A run makes many judgements."""


@dataclass(frozen=True, slots=True)
class Slope:
    """The growth of a series in bytes per step, with its confidence interval."""

    slope: float
    lower: float
    upper: float
    steps: int
    """The length of the window."""

    @property
    def grown(self) -> int:
        """Bytes that the series grew by in the window."""
        return round(self.slope * self.steps)


class Trend:
    """Follows one series. `add` costs about two microseconds, and a millisecond at every eighth step of a rise.

    The first `warm_up_steps` values are ignored. A growth of less than `least_growth` bytes over a window is no leak.
    """

    def __init__(self, *, warm_up_steps: int = 20, least_growth: int = 1 << 20) -> None:
        self._warm_up_left = warm_up_steps
        self._windows = tuple(_Window(steps, points_min, least_growth) for steps, points_min in _WINDOWS)

    def add(self, value: int) -> Slope | None:
        """Add the value of the next step. Returns the slope if a window judges at this step that the series grows."""
        if self._warm_up_left > 0:
            self._warm_up_left -= 1
            return None
        found: Slope | None = None
        for window in self._windows:
            found = window.add(value) or found
        return found

    def judge_now(self) -> Slope | None:
        """Judge the values so far, even if they are few: 16 values after the warm-up are enough."""
        return self._windows[0].judge_now()


class Growing:
    """Follows a series that grows, to see whether the growth continues.

    Compares the floors of windows that are as long as the one in which the growth `slope` was found: spikes and a
    sawtooth do not change them. So the end of a growth, or its release, is seen after three such windows at the latest.
    """

    def __init__(self, slope: Slope) -> None:
        self.slope = slope
        self._floor_before = -math.inf
        self._floor = math.inf
        self._steps = 0

    def goes_on(self, value: int) -> bool:
        """Add the value of the next step. Returns False once the series does not grow any more."""
        self._floor = min(self._floor, value)
        self._steps += 1
        if self._steps % self.slope.steps:
            return True
        grown = self._floor - self._floor_before
        self._floor_before, self._floor = self._floor, math.inf
        return grown >= _STOPPED_SHARE * self.slope.grown


class _Window:
    def __init__(self, point_steps: int, points_min: int, least_growth: int) -> None:
        self._point_steps = point_steps
        self._points_min = points_min
        self._least_growth = least_growth
        self._points: deque[int] = deque(maxlen=_POINTS_MAX)
        self._floor: float = math.inf
        self._steps = 0

    def add(self, value: int) -> Slope | None:
        if value < self._floor:
            self._floor = value
        self._steps += 1
        if self._steps % self._point_steps:
            return None
        self._points.append(int(self._floor))
        self._floor = math.inf
        if self._steps % (_JUDGE_EVERY * self._point_steps) or len(self._points) < self._points_min:
            return None
        return self._judge(_SHORT_BLOCK if self._point_steps == 1 else 1)

    def judge_now(self) -> Slope | None:
        if len(self._points) < _POINTS_MIN:
            return None
        return self._judge(_SHORT_BLOCK if len(self._points) >= self._points_min else 1)

    def _judge(self, short_block: int) -> Slope | None:
        points = list(self._points)
        quarter = len(points) // 4
        # A cheap test first: every series that passes the others passes it.
        if not _rises(_blocks(points[-4 * quarter :], quarter, min)[1]):
            return None
        short_block = max(short_block, math.ceil(len(points) / _BLOCKS_MAX))
        line = self._sure(*_blocks(points, short_block, min))  # noise and short spikes
        if line is None:
            period = _period_of(points)  # gradient accumulation, an evaluation, a regular sawtooth
            line = self._sure(*_blocks(points, period, fmean)) if period > short_block else None
        if line is None and self._point_steps > 1:
            line = self._sure(*_blocks(points, _LONG_BLOCK, min))  # garbage that is collected at irregular times
        if line is None:
            return None
        slope, margin = (each / self._point_steps for each in line)
        return Slope(slope, slope - margin, slope + margin, len(points) * self._point_steps)

    def _sure(self, ats: Sequence[int], values: Sequence[float]) -> tuple[float, float] | None:
        """Return the slope and its margin if the values surely rise."""
        count = len(values)
        if count < _BLOCKS_MIN or values[-1] <= values[0]:
            return None
        slope, margin = fit_line(ats, values)
        growth = slope * (ats[-1] - ats[0])
        largest_fall = max(highest - value for highest, value in zip(accumulate(values, max), values, strict=True))
        if slope <= margin or growth < max(self._least_growth, _ABOVE_FALLS * largest_fall):
            return None
        half = (count + 1) // 2
        early, late = _theil_sen(ats[:half], values[:half]), _theil_sen(ats[-half:], values[-half:])
        return (slope, margin) if late > 0 and late >= _STEADY * early else None


def fit_line(ats: Sequence[int], values: Sequence[float]) -> tuple[float, float]:
    """Return the Theil-Sen slope through four points or more, and the margin on both sides of it.

    The margin is `_SIGMAS` standard errors of the residuals, and wider with few points. Neighboring residuals that are
    correlated widen it too, because a series that wanders slowly does not grow (B. D. Santer et al., Statistical
    significance of trends in layer-average atmospheric temperature time series, 2000).
    """
    count = len(values)
    slope = _theil_sen(ats, values)
    residuals = [value - slope * at for at, value in zip(ats, values, strict=True)]
    mean = fmean(residuals)
    residuals = [residual - mean for residual in residuals]
    squares = sum(residual * residual for residual in residuals)
    correlation = sum(now * later for now, later in pairwise(residuals)) / squares if squares else 0.0
    correlation = min(max(correlation, 0.0) + 2 / math.sqrt(count), _CORRELATION_MAX)  # two standard errors above it
    mean_at = fmean(ats)
    spread = sum((at - mean_at) ** 2 for at in ats)
    error = math.sqrt(squares / (count - 2) * (1 + correlation) / (1 - correlation) / spread)
    return slope, error * _SIGMAS * math.exp(_SIGMAS**2 / (2 * count))


def _theil_sen(ats: Sequence[int], values: Sequence[float]) -> float:
    """Return the median of the slopes between all pairs of points."""
    # The least squares would follow the few steps that an evaluation or a checkpoint lifts.
    points = list(zip(ats, values, strict=True))
    return median(
        [(later - value) / (after - at) for place, (after, later) in enumerate(points) for at, value in points[:place]]
    )


def _period_of(points: Sequence[int]) -> int:
    """Return the number of points after which the series repeats best, apart from its growth; 1 if none stands out."""
    best, best_difference = 1, math.inf
    for period in range(1, len(points) // 2 + 1):
        differences = list(map(sub, points[period:], points))
        growth = fmean(differences)
        difference = sum([abs(each - growth) for each in differences]) / len(differences)
        if difference < _PERIOD_GAIN * best_difference:
            best, best_difference = period, difference
    return best


def _blocks(points: list[int], length: int, summary: Callable[[list[int]], float]) -> tuple[range, list[float]]:
    """Return the ends of the newest blocks, and a summary of each block."""
    ends = range(len(points) % length + length, len(points) + 1, length)
    return ends, [summary(points[end - length : end]) for end in ends]


def _rises(values: Sequence[float]) -> bool:
    return all(later > earlier for earlier, later in pairwise(values))
