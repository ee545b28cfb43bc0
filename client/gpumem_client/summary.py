"""`summary`: the GPU memory of this process as values and as a table."""

from __future__ import annotations

import logging
import os
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
from gpumem_client.wire.units import ShownAsText, human_bytes

# Attributes of `DeviceSummary` that are the same in `DeviceSample`.
_FROM_SAMPLE = (
    *("allocated_bytes", "reserved_bytes", "active_bytes", "inactive_split_bytes", "requested_bytes"),
    *("allocated_peak_bytes", "reserved_peak_bytes", "private_pools_bytes", "reclaimable_bytes"),
    *("alloc_retries", "ooms"),
)


@dataclass(frozen=True)
class DeviceSummary(ShownAsText):
    """One device, as the allocator of this process, CUDA and the driver report it. None is unknown."""

    index: int
    uuid: str
    name: str
    allocated_bytes: int | None
    """Bytes in tensors."""
    reserved_bytes: int | None
    """Bytes that PyTorch has allocated from the driver."""
    active_bytes: int | None
    inactive_split_bytes: int | None
    requested_bytes: int | None
    """Allocated bytes before the allocator's rounding."""
    allocated_peak_bytes: int | None
    """Peak since the last reset by the user's code. Resets by phases do not count."""
    reserved_peak_bytes: int | None
    private_pools_bytes: int | None
    reclaimable_bytes: int | None
    """Bytes that `torch.cuda.empty_cache()` would release to the driver now."""
    alloc_retries: int | None
    ooms: int | None
    device_free_bytes: int | None
    """Free bytes of the device, from `cudaMemGetInfo`."""
    device_total_bytes: int | None
    process_bytes: int | None
    """Bytes of this process on the device, from the driver; None in a container with its own PID namespace."""
    other_processes_bytes: int | None
    utilization_ratio: float | None
    """Share of the last sampling period in which a kernel ran."""
    phases: Mapping[str, PhasePeak] = field(default_factory=dict)
    components: Mapping[str, int] = field(default_factory=dict)
    """The last counts of `watch`."""

    def __str__(self) -> str:
        return "\n".join(_table(self))

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
        index=index,
        uuid=sample.uuid,
        name=str(torch.cuda.get_device_properties(index).name),
        **{name: getattr(sample, name) for name in _FROM_SAMPLE},
        device_free_bytes=allocator.free_bytes(index),
        device_total_bytes=allocator.total_bytes(index),
        **vars(read_driver(sample.uuid)),
        phases=process_observed().phases(index),
        components=sample.component_bytes,
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
    values: tuple[tuple[str, int | None], ...] = (
        ("allocated", device.allocated_bytes),
        ("peak", device.allocated_peak_bytes),
        ("reserved", device.reserved_bytes),
        ("reclaimable", device.reclaimable_bytes),
        ("fragmented", device.fragmented_bytes),
        ("cache that may be released", device.slack_bytes if device.reclaimable_bytes is None else None),
        ("non-torch", device.non_torch_bytes),
        ("device free", device.device_free_bytes),
        ("of", device.device_total_bytes),
    )
    text = ", ".join(f"{name} {human_bytes(value)}" for name, value in values if value is not None)
    counts = (("retries", device.alloc_retries), ("OOMs", device.ooms))
    return f"cuda:{device.index} {text}".replace(", of ", " of ") + "".join(f", {n} {c}" for n, c in counts if c)


def _table(device: DeviceSummary) -> list[str]:
    used = device.utilization_ratio
    rows: list[tuple[str, str]] = [
        *_rows(device, ("allocated", "requested", "active", "reserved", "inactive split", "allocated peak")),
        *_rows(device, ("reserved peak", "private pools")),
        *_cache(device),
        *_rows(device, ("non-torch",)),
        *_rows(device, ("other processes", "device used", "device free", "device total")),
        ("utilization", "-" if used is None else f"{used * 100:.0f} %"),
        ("allocation retries", _count(device.alloc_retries)),
        ("out of memory", _count(device.ooms)),
        *((f"phase {name}, peak", _peak(peak)) for name, peak in sorted(device.phases.items())),
        *((name.replace("_", " "), human_bytes(value)) for name, value in device.components.items()),
    ]
    width = max(len(name) for name, _ in rows)
    return [
        f"cuda:{device.index} {device.name} {device.uuid}",
        *(f"  {name:<{width}}  {value:>10}" for name, value in rows),
    ]


def _cache(device: DeviceSummary) -> list[tuple[str, str]]:
    """Return the rows of the cache. Nothing shows what a clear releases of the cache of cudaMallocAsync."""
    if device.reclaimable_bytes is None and device.slack_bytes is not None:
        return [("cache, may be released", human_bytes(device.slack_bytes))]
    return _rows(device, ("slack", "reclaimable", "fragmented"))


def _rows(device: DeviceSummary, names: tuple[str, ...]) -> list[tuple[str, str]]:
    return [(name, human_bytes(getattr(device, f"{name.replace(' ', '_').replace('-', '_')}_bytes"))) for name in names]


def _count(value: int | None) -> str:
    return "-" if value is None else str(value)


def _peak(peak: PhasePeak) -> str:
    return human_bytes(peak.at_least_bytes) if peak.exact else f"at least {human_bytes(peak.at_least_bytes)}"
