"""How far the plan of a job is from what the job takes. Pure."""

from __future__ import annotations

from gpumem_exporter.wire.protocol import DeviceSample

__all__ = ["FULL_STEPS", "plan_error_ratio"]

FULL_STEPS = 2
"""After so many steps a training has reached its peak: optimizers make their state in the first, so the second is the
first in which all is there."""


def plan_error_ratio(sample: DeviceSample, step: int | None) -> float | None:
    """Planned reserved peak / measured one − 1: 0.05 is 5 % too much planned, −0.05 is 5 % too little.

    The measured peak is since whoever last reset it. A reset begins it at what is reserved then, cache included, so
    the error stays as it is unless the cache was emptied, too.

    Args:
        sample: of one device.
        step: how many steps had ended when it was taken.

    Returns:
        None without a plan, without a measured peak, and until the peak can have been reached; so also where steps are
        not counted.
    """
    planned, measured = sample.planned_reserved_peak_bytes, sample.reserved_peak_bytes
    if planned is None or not measured or step is None or step < FULL_STEPS:
        return None
    return planned / measured - 1
