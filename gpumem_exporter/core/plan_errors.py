"""The difference between the planned and the measured peak of a job."""

from __future__ import annotations

from gpumem_client.wire.protocol import DeviceSample

__all__ = ["FULL_STEPS", "plan_error_ratio"]

FULL_STEPS = 2
"""The number of steps after which a training has reached its peak. Optimizers create their state in the first step, so
the second step is the first with all memory in use."""


def plan_error_ratio(sample: DeviceSample, step: int | None) -> float | None:
    """Return planned reserved peak / measured reserved peak − 1: 0.05 means that the plan is 5 % too high.

    The measured peak is the highest value since the last reset. A reset sets it to the bytes reserved at that time,
    including the cache, so the ratio changes only if the cache was emptied as well.

    Args:
        sample: the sample of one device.
        step: the number of steps completed at the time of the sample.

    Returns:
        None without a plan, without a measured peak, before `FULL_STEPS` steps, and where steps are not counted.
    """
    planned, measured = sample.planned_reserved_peak_bytes, sample.reserved_peak_bytes
    if planned is None or not measured or step is None or step < FULL_STEPS:
        return None
    return planned / measured - 1
