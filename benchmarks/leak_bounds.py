"""Computes how many leaks any test could find in some of the seeded runs.

The ideal test here knows more than a real one: the noise, the rate of the leak and its start. It does not know the
memory use without the leak. It decides between two cases only. No test finds more leaks at the same rate of false
alarms (Neyman and Pearson).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean

from tests.support.seeded_runs import DEVICE_BYTES, MIB

__all__ = ["cache_errors", "drift_errors", "found_share"]

FALSE_ALARMS = 1e-4
_WARM_UP = 20
_DRIFT, _DRIFT_SHOCK = 0.9, 3.0
_CACHE_NOISE = math.sqrt(2 / 3)
_CACHE = ((200.0, 60.0),)
_CACHES = {
    200: ((28.4, 40.0), (141.7, 60.0), (59.6, 140.0)),
    300: ((61.7, 40.0), (93.9, 60.0), (81.2, 140.0)),
}
"""Size in MiB and time constant in steps of caches that fill in 140 steps or less. Of all such caches, these look most
like a leak of one percent in 1,000 steps."""


def drift_errors(percent: float, steps: int) -> float:
    """Return the leak in standard errors of the best linear estimate (Aitken), in "drifting about"."""
    times = range(_WARM_UP, steps)
    scale = math.sqrt(1 - _DRIFT**2)
    levels = [scale, *([1 - _DRIFT] * (len(times) - 1))]
    slopes = [scale * times[0], *(time - _DRIFT * (time - 1) for time in times[1:])]
    along = sum(level * slope for level, slope in zip(levels, slopes, strict=True)) / sum(
        each * each for each in levels
    )
    left = sum((slope - along * level) ** 2 for level, slope in zip(levels, slopes, strict=True))
    return _a_step(percent) * math.sqrt(left) / _DRIFT_SHOCK


def cache_errors(steps: int) -> float:
    """Return the distance between a leak of 1 % with one cache and no leak with three, in deviations of the noise.

    Args:
        steps: 200 or 300.
    """
    apart = [
        _a_step(1.0) * step + _filled(_CACHE, step) - _filled(_CACHES[steps], step) for step in range(_WARM_UP, steps)
    ]
    middle = fmean(apart)
    return math.sqrt(sum((each - middle) ** 2 for each in apart)) / _CACHE_NOISE


def found_share(errors: float) -> float:
    """Return the share of such leaks that the test finds in one look."""
    normal = NormalDist()
    return 1 - normal.cdf(normal.inv_cdf(1 - FALSE_ALARMS) - errors)


def _a_step(percent: float) -> float:
    return DEVICE_BYTES / MIB * percent / 100 / 1000


def _filled(caches: Sequence[tuple[float, float]], step: int) -> float:
    return sum(size * (1 - math.exp(-step / lasts)) for size, lasts in caches)
