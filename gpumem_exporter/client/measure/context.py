"""`memory_context`: logs the memory use of a block."""

from __future__ import annotations

import functools
import logging

from gpumem_exporter.client.log import log
from gpumem_exporter.client.measure.measured import DeviceUse, Measured, MemoryUse
from gpumem_exporter.units import human_bytes, human_growth

__all__ = ["memory_context"]


def memory_context(name: str, *, reset_peaks: bool = False, level: int = logging.INFO) -> Measured:
    """Measure a block or a function, and log what it used: before, after, growth and peak of each device.

        with gpumem.memory_context("load checkpoint") as use:
            model.load_state_dict(torch.load(path))
        use.growth_bytes

    It measures like `phase`, which describes peaks, threads and costs, but reports nothing to the exporter. The logger
    is `gpumem_exporter.client`, which shows warnings only until the user's code configures logging.

    Args:
        name: prefix of the log lines.
        reset_peaks: reset the allocator's peaks at the start of the block, so that its own peak is exact.
        level: log level.
    """
    return Measured(name, kept=False, reset_peaks=reset_peaks, ended=functools.partial(_log, name, level))


def _log(name: str, level: int, use: MemoryUse) -> None:
    if not log.isEnabledFor(level):
        return
    if not use.devices:
        log.log(level, "%s: no CUDA", name)
    for device in use.devices:
        log.log(level, "%s: %s", name, _text(device))


def _text(device: DeviceUse) -> str:
    peak = human_bytes(device.peak_bytes)
    if not device.exact:
        most = device.peak_at_most_bytes
        peak = f"at least {peak}" + (f", at most {human_bytes(most)}" if most is not None else "")
    return (
        f"cuda:{device.index} {human_bytes(device.before_bytes)} -> {human_bytes(device.after_bytes)}"
        f" ({human_growth(device.growth_bytes)}), peak {peak}"
    )
