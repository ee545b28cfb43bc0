"""A line through points that may hang together, and how far it can be trusted. Pure, at most some hundred points."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import sub
from statistics import fmean, median

__all__ = ["Line", "period_of", "seasons", "theil_sen", "through"]

_ALIKE_MAX = 0.98
_ALIKE_DEVIATIONS = 2.0
_LIKER = 0.7
_PERIODS_MIN = 2
_STUDENT = (
    (40, 5.2),
    (30, 5.5),
    (24, 5.8),
    (20, 6.1),
    (16, 6.6),
    (14, 7.0),
    (12, 7.6),
    (10, 8.6),
    (9, 9.4),
    (8, 10.5),
    (7, 12.1),
    (6, 14.8),
    (5, 19.8),
    (4, 31.6),
    (3, 71.6),
    (0, 408.2),
)
"""By degrees of freedom, the last for two: what Student's t exceeds three times in a million."""


@dataclass(frozen=True, slots=True)
class Line:
    """How steep, and how surely."""

    slope: float
    error: float
    """One standard error of the slope."""
    lower: float
    """The slope is below that by a chance of three in a million, and above `upper` as seldom."""
    upper: float
    spread: float
    """How far four fifths of the points lie apart, but for the slope."""


def through(ats: Sequence[int], values: Sequence[int] | Sequence[float]) -> Line:
    """Theil and Sen's line through four points or more.

    Its error is that of the points' distances from it, as if they were drawn anew each time, made larger for what
    neighbours have in common: by how alike they are (two standard errors above what was measured), and by the degrees
    of freedom that leaves (source: B. D. Santer et al., Statistical significance of trends in layer-average
    atmospheric temperature time series, 2000). So a series that wanders far and slowly is not taken for one that grows.
    """
    count = len(values)
    slope = theil_sen(ats, values)
    rests = [value - slope * at for at, value in zip(ats, values, strict=True)]
    middle = fmean(rests)
    rests = [rest - middle for rest in rests]
    squares = sum(rest * rest for rest in rests)
    alike = sum(now * later for now, later in pairwise(rests)) / squares if squares else 0.0
    alike = min(max(alike, 0.0), _ALIKE_MAX)
    perhaps = min(alike + _ALIKE_DEVIATIONS * math.sqrt((1 - alike * alike) / count), _ALIKE_MAX)
    middle_at = fmean(ats)
    width = sum((at - middle_at) ** 2 for at in ats)
    error = math.sqrt(squares / (count - 2) * (1 + perhaps) / (1 - perhaps) / width)
    freedom = count * (1 - alike) / (1 + alike) - 2
    margin = error * next(quantile for least, quantile in _STUDENT if freedom >= least or not least)
    rests.sort()
    tenth = count // 10
    return Line(slope, error, slope - margin, slope + margin, rests[-1 - tenth] - rests[tenth])


def theil_sen(ats: Sequence[int], values: Sequence[int] | Sequence[float]) -> float:
    """The median of the slopes between all pairs.

    Source: P. K. Sen, Estimates of the regression coefficient based on Kendall's tau (1968).
    """
    points = list(zip(ats, values, strict=True))
    return median(
        [(later - value) / (after - at) for place, (after, later) in enumerate(points) for at, value in points[:place]]
    )


def seasons(points: Sequence[int], period: int) -> tuple[list[int], list[float]]:
    """One point a period: where it ends, and the median of how far its values lie from what is usual in their season.

    The values of one period are one witness and no more: what was left over before it lies below all of them.
    """
    ends = range(len(points) % period + period, len(points) + 1, period)
    rows = [points[end - period : end] for end in ends]
    usual = [fmean(season) for season in zip(*rows, strict=True)]
    return list(ends), [median(map(sub, row, usual)) for row in rows]


def period_of(points: Sequence[int]) -> int:
    """After how many points the series is most like itself, but for its growth."""
    best, unlike = 1, math.inf
    for period in range(1, len(points) // _PERIODS_MIN + 1):
        differences = list(map(sub, points[period:], points))
        usual = sum(differences) / len(differences)
        difference = sum([abs(each - usual) for each in differences]) / len(differences)
        if difference < _LIKER * unlike:
            best, unlike = period, difference
    return best
