"""`summary`: the GPU memory of this process as values and as a table."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gpumem_client.allocator.allocator import Allocator
from gpumem_client.allocator.allocator_environment import VARIABLES, in_force
from gpumem_client.driver_memory import read_driver
from gpumem_client.guest_safety import log
from gpumem_client.phases.observed import process_observed
from gpumem_client.phases.peaks import PhasePeak
from gpumem_client.torch_access import allocator_settings, initialized_torch
from gpumem_client.wire.protocol import DeviceSample
from gpumem_client.wire.units import UNKNOWN, ShownAsText, human_bytes, human_ratio

# The rows of the table that a line of the log has, too.
_IN_LINE = (
    *("allocated", "allocated peak", "reserved", "reclaimable", "fragmented", "cache, may be released", "non-torch"),
    *("device free", "device total", "allocation retries", "out of memory"),
)


@dataclass
class DeviceSummary(ShownAsText, DeviceSample):
    """One device, as the allocator of this process, CUDA and the driver report it. None is unknown.

    `allocated_bytes`, `reserved_bytes` and the other fields of a sample describe the allocator; resets of the peaks by
    phases do not count.
    """

    index: int = 0
    name: str = ""
    device_free_bytes: int | None = None
    """Free bytes of the device, from `cudaMemGetInfo`."""
    device_total_bytes: int | None = None
    process_bytes: int | None = None
    """Bytes of this process on the device, from the driver; None in a container with its own PID namespace."""
    other_processes_bytes: int | None = None
    utilization_ratio: float | None = None
    """Share of the last sampling period in which a kernel ran."""
    phases: Mapping[str, PhasePeak] = field(default_factory=dict)

    def __str__(self) -> str:
        return "\n".join(_table(self))

    @property
    def components(self) -> Mapping[str, int]:
        """The last counts of `watch`."""
        return self.component_bytes

    @property
    def slack_bytes(self) -> int | None:
        """Reserved bytes that are not allocated."""
        return _less(self.reserved_bytes, self.allocated_bytes)

    @property
    def fragmented_bytes(self) -> int | None:
        """Slack that cannot be released: parts of segments with live tensors, and pools of CUDA graphs."""
        return _less(self.slack_bytes, self.reclaimable_bytes)

    @property
    def non_torch_bytes(self) -> int | None:
        """Bytes of this process outside PyTorch's allocator: CUDA context, NCCL, libraries, other allocators."""
        return _less(self.process_bytes, self.reserved_bytes)

    @property
    def device_used_bytes(self) -> int | None:
        """Bytes that all processes use."""
        return _less(self.device_total_bytes, self.device_free_bytes)


@dataclass(frozen=True)
class Summary(ShownAsText):
    """The GPU memory of this process at one time. `print` it for a table.

    Attributes:
        devices: the devices on which this process has a context; none without CUDA.
        reason: why there are no devices, otherwise empty.
        pinned_host_bytes: bytes of PyTorch's caching host allocator.
        allocator_settings: the settings in force.
        allocator_settings_source: the environment variable that set them, `the program`, or empty for the defaults.
        allocator_settings_ignored: an environment variable that is set and ignored.
        allocator_backend: `native` or `cudaMallocAsync`.
    """

    devices: tuple[DeviceSummary, ...] = ()
    reason: str = ""
    torch_version: str = ""
    pinned_host_bytes: int | None = None
    allocator_backend: str = ""
    allocator_settings: str = ""
    allocator_settings_source: str = ""
    allocator_settings_ignored: str = ""

    def __str__(self) -> str:
        if self.reason:
            return self.reason
        lines = [f"PyTorch {self.torch_version}, allocator {self.allocator_backend}: {self._settings()}"]
        if self.pinned_host_bytes is not None:
            lines.append(f"pinned host memory {human_bytes(self.pinned_host_bytes)}")
        for device in self.devices:
            lines += ["", *_table(device)]
        return "\n".join(lines)

    def _settings(self) -> str:
        source = f" (from {self.allocator_settings_source})" if self.allocator_settings_source else ""
        ignored = f"; {self.allocator_settings_ignored} is ignored" if self.allocator_settings_ignored else ""
        return f"{self.allocator_settings or 'default settings'}{source}{ignored}"


def memory_summary() -> Summary:
    """Return the GPU memory of this process now: `print(gpumem.memory_summary())` shows it as a table.

    Takes a few milliseconds, and half a microsecond per block of the allocator's heap if the statistics do not show the
    reclaimable memory. Resets nothing, initializes nothing and creates no context. Any thread may call it. While
    another thread empties the cache, it waits, and holds the GIL.
    """
    torch, allocator = initialized_torch(), Allocator.attach()
    if torch is None or allocator is None:
        return Summary(reason="no CUDA: PyTorch has not initialized it in this process")
    try:
        return _summarize(torch, allocator)
    finally:
        allocator.detach()


def log_summary(prefix: str = "", *, level: int = logging.INFO) -> Summary:
    """Log one line per device of `memory_summary()`, and return the summary.

    The logger is `gpumem_client`, which shows warnings only until the user's code configures logging.

    Args:
        prefix: start of each line.
        level: log level.
    """
    result = memory_summary()
    start = f"{prefix}: " if prefix else ""
    for line in [_line(device) for device in result.devices] or [result.reason or "no device is used"]:
        log.log(level, "%s%s", start, line)
    return result


def _summarize(torch: Any, allocator: Allocator) -> Summary:
    samples = {sample.uuid: sample for sample in allocator.samples()}
    settings, source, ignored = settings_in_force(allocator_settings(torch), os.environ)
    return Summary(
        devices=tuple(
            _device(torch, allocator, index, samples.get(allocator.uuid(index)) or allocator.sample_now(index))
            for index in allocator.devices()
        ),
        torch_version=allocator.torch_version,
        pinned_host_bytes=allocator.pinned_host_bytes(),
        allocator_backend=torch.cuda.get_allocator_backend(),
        allocator_settings=settings,
        allocator_settings_source=source,
        allocator_settings_ignored=ignored,
    )


def _device(torch: Any, allocator: Allocator, index: int, sample: DeviceSample) -> DeviceSummary:
    return DeviceSummary(
        **vars(sample),
        **vars(read_driver(sample.uuid)),
        index=index,
        name=str(torch.cuda.get_device_properties(index).name),
        device_free_bytes=allocator.free_bytes(index),
        device_total_bytes=allocator.total_bytes(index),
        phases=process_observed().phases(index),
    )


def settings_in_force(reported: str | None, environ: Mapping[str, str]) -> tuple[str, str, str]:
    """Return the allocator's settings, their source, and an environment variable that is ignored.

    Args:
        reported: the settings that PyTorch reports; None before 2.10, which reads only the older variable.
        environ: the environment.
    """
    old, new = VARIABLES
    if reported is None:
        settings = environ.get(old, "")
        return settings, (old if settings else ""), (new if new in environ else "")
    variable, settings = in_force(environ)
    ignored = new if variable == old and new in environ else ""
    if reported == settings:
        return reported, (variable if reported else ""), ignored
    return reported, "the program", ignored


def _less(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one - other


def _line(device: DeviceSummary) -> str:
    known = [f"{name} {value}" for name, value in _rows(device) if name in _IN_LINE and value != UNKNOWN]
    return f"cuda:{device.index} {', '.join(known)}"


def _table(device: DeviceSummary) -> list[str]:
    rows = _rows(device)
    width = max(len(name) for name, _ in rows)
    return [
        f"cuda:{device.index} {device.name} {device.uuid}",
        *(f"  {name:<{width}}  {value:>10}" for name, value in rows),
    ]


def _rows(device: DeviceSummary) -> list[tuple[str, str]]:
    # Nothing shows what a clear releases of the cache of cudaMallocAsync.
    unclear = device.reclaimable_bytes is None and device.slack_bytes is not None
    values = (
        *("allocated", "requested", "active", "reserved", "inactive split", "allocated peak", "reserved peak"),
        *("private pools", *(() if unclear else ("slack", "reclaimable", "fragmented")), "non-torch"),
        *("other processes", "device used", "device free", "device total"),
    )
    return [
        *((name, human_bytes(getattr(device, f"{re.sub('[ -]', '_', name)}_bytes"))) for name in values),
        *([("cache, may be released", human_bytes(device.slack_bytes))] if unclear else []),
        ("utilization", human_ratio(device.utilization_ratio)),
        ("allocation retries", UNKNOWN if device.alloc_retries is None else str(device.alloc_retries)),
        ("out of memory", UNKNOWN if device.ooms is None else str(device.ooms)),
        *((f"phase {name}, peak", _peak(peak)) for name, peak in sorted(device.phases.items())),
        *((name.replace("_", " "), human_bytes(value)) for name, value in device.components.items()),
    ]


def _peak(peak: PhasePeak) -> str:
    return human_bytes(peak.at_least_bytes) if peak.exact else f"at least {human_bytes(peak.at_least_bytes)}"
