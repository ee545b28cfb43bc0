"""One look at all that is known of this process' GPU memory, as figures and as a table."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gpumem_exporter.client.allocator.allocator import Allocator
from gpumem_exporter.client.allocator.statistics import initialised_torch
from gpumem_exporter.client.allocator.torch_access import allocator_settings
from gpumem_exporter.client.log import log
from gpumem_exporter.client.measure.observed import PhasePeak, process_observed
from gpumem_exporter.client.reporter.driver_memory import DriverReading, read_driver
from gpumem_exporter.client.sizes import human_bytes
from gpumem_exporter.wire.protocol import DeviceSample

__all__ = ["DeviceSummary", "Summary", "log_summary", "summary"]


_OLD_VARIABLE, _NEW_VARIABLE = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"


@dataclass(frozen=True, slots=True)
class DeviceSummary:
    """One device as this process' allocator, CUDA and the driver have it. None is what cannot be known."""

    index: int
    uuid: str
    name: str
    allocated_bytes: int | None
    """In tensors."""
    reserved_bytes: int | None
    """Taken from the driver by PyTorch."""
    active_bytes: int | None
    inactive_split_bytes: int | None
    requested_bytes: int | None
    """Allocated, before the allocator's rounding."""
    allocated_peak_bytes: int | None
    """Since whoever last reset it, other than a phase that asked for that."""
    reserved_peak_bytes: int | None
    private_pools_bytes: int | None
    reclaimable_bytes: int | None
    """What `torch.cuda.empty_cache()` would give back to the driver now."""
    alloc_retries: int | None
    ooms: int | None
    device_free_bytes: int | None
    """For anybody, as `cudaMemGetInfo` says."""
    device_total_bytes: int | None
    process_bytes: int | None
    """All that this process holds on the device, as the driver says; None in a container with pids of its own."""
    other_processes_bytes: int | None
    utilization_ratio: float | None
    """Of the time in the last sampling period, how much some kernel ran."""
    phases: Mapping[str, PhasePeak] = field(default_factory=dict)
    components: Mapping[str, int] = field(default_factory=dict)
    """As `watch` counted them last."""

    @property
    def slack_bytes(self) -> int | None:
        """Reserved and not allocated."""
        return _less(self.reserved_bytes, self.allocated_bytes)

    @property
    def fragmented_bytes(self) -> int | None:
        """Slack that cannot be given back: pieces of segments that hold living tensors, and pools of CUDA graphs."""
        return _less(self.slack_bytes, self.reclaimable_bytes)

    @property
    def non_torch_bytes(self) -> int | None:
        """CUDA context, NCCL, libraries, other allocators of this process."""
        return _less(self.process_bytes, self.reserved_bytes)

    @property
    def device_used_bytes(self) -> int | None:
        """By anybody."""
        return _less(self.device_total_bytes, self.device_free_bytes)


@dataclass(frozen=True, slots=True)
class Summary:
    """What is known at one moment. `print` it for a table.

    Attributes:
        devices: those on which this process has a context; none without CUDA.
        reason: why there is none, else empty.
        pinned_host_bytes: what PyTorch's caching host allocator holds.
        allocator_settings: those in force.
        allocator_settings_source: the environment variable that they come from, `the program` where it has set others
            since, or empty: nothing but the defaults.
        allocator_settings_ignored: an environment variable that is set, and overruled.
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
        told = self.allocator_settings or "default settings"
        if self.allocator_settings_source:
            told += f" (from {self.allocator_settings_source})"
        if self.allocator_settings_ignored:
            told += f"; {self.allocator_settings_ignored} is set, too, and ignored"
        return told


def summary() -> Summary:
    """All that is known of this process' memory on its GPUs now: `print(gpumem.summary())` shows it as a table.

    Reads the allocator's statistics, walks over its heap where reclaimable memory cannot be told otherwise (half a
    microsecond a block, up to 20,000 blocks), and asks CUDA and the driver: some milliseconds, for the calling thread.
    It resets nothing, initialises nothing and creates no context. Any thread may call it; while another one empties the
    cache it waits for that, and the interpreter with it.
    """
    torch, allocator = initialised_torch(), Allocator.attach()
    if torch is None or allocator is None:
        return Summary(reason="no CUDA: PyTorch has not initialised it in this process")
    try:
        return _summarise(torch, allocator)
    finally:
        allocator.detach()


def log_summary(prefix: str = "", *, level: int = logging.INFO) -> Summary:
    """Log one line a device of `summary()`, and return it.

    The logger is `gpumem_exporter.client`, which says nothing below a warning until the program configures logging.

    Args:
        prefix: stands before each line.
        level: at which it is logged.
    """
    told = summary()
    start = f"{prefix}: " if prefix else ""
    for line in [_line(device) for device in told.devices] or [told.reason or "no device is used"]:
        log.log(level, "%s%s", start, line)
    return told


def _summarise(torch: Any, allocator: Allocator) -> Summary:
    samples = {sample.uuid: sample for sample in allocator.samples()}
    told = allocator_settings(torch)
    settings, source, ignored = settings_in_force(told, os.environ)
    return Summary(
        devices=tuple(
            _device(torch, index, samples.get(allocator.uuid(index)) or allocator.sample_now(index))
            for index in allocator.devices()
        ),
        torch_version=allocator.torch_version,
        pinned_host_bytes=allocator.pinned_host_bytes(),
        allocator_backend=torch.cuda.get_allocator_backend(),
        allocator_settings=settings,
        allocator_settings_source=source,
        allocator_settings_ignored=ignored,
    )


def _device(torch: Any, index: int, sample: DeviceSample) -> DeviceSummary:
    free_bytes: int | None = None
    total_bytes: int | None = None
    with contextlib.suppress(RuntimeError):
        free_bytes, total_bytes = torch.cuda.cudart().cudaMemGetInfo(index)
    driver = read_driver(sample.uuid) if sample.uuid else DriverReading()
    return DeviceSummary(
        index=index,
        uuid=sample.uuid,
        name=str(torch.cuda.get_device_properties(index).name),
        allocated_bytes=sample.allocated_bytes,
        reserved_bytes=sample.reserved_bytes,
        active_bytes=sample.active_bytes,
        inactive_split_bytes=sample.inactive_split_bytes,
        requested_bytes=sample.requested_bytes,
        allocated_peak_bytes=sample.allocated_peak_bytes,
        reserved_peak_bytes=sample.reserved_peak_bytes,
        private_pools_bytes=sample.private_pools_bytes,
        reclaimable_bytes=sample.reclaimable_bytes,
        alloc_retries=sample.alloc_retries,
        ooms=sample.ooms,
        device_free_bytes=free_bytes,
        device_total_bytes=total_bytes,
        process_bytes=driver.process_bytes,
        other_processes_bytes=driver.other_processes_bytes,
        utilization_ratio=driver.utilization_ratio,
        phases=process_observed().phases(index),
        components=sample.component_bytes,
    )


def settings_in_force(told: str | None, environ: Mapping[str, str]) -> tuple[str, str, str]:
    """The allocator's settings, where they come from, and which variable is overruled.

    With both variables set, PYTORCH_CUDA_ALLOC_CONF wins, even when it is empty (CUDAAllocatorConfig.h). Torch reads
    the other from 2.10 on, the first that tells its settings.

    Args:
        told: what torch says; None from one that does not.
        environ: the environment.
    """
    old, new = environ.get(_OLD_VARIABLE), environ.get(_NEW_VARIABLE)
    if told is None:
        return old or "", (_OLD_VARIABLE if old else ""), (_NEW_VARIABLE if new is not None else "")
    winner = _OLD_VARIABLE if old is not None else _NEW_VARIABLE
    ignored = _NEW_VARIABLE if old is not None and new is not None else ""
    if told == environ.get(winner, ""):
        return told, (winner if told else ""), ignored
    return told, "the program", ignored


def _less(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one - other


def _line(device: DeviceSummary) -> str:
    figures: tuple[tuple[str, int | None], ...] = (
        ("allocated", device.allocated_bytes),
        ("peak", device.allocated_peak_bytes),
        ("reserved", device.reserved_bytes),
        ("reclaimable", device.reclaimable_bytes),
        ("fragmented", device.fragmented_bytes),
        ("non-torch", device.non_torch_bytes),
        ("device free", device.device_free_bytes),
        ("of", device.device_total_bytes),
    )
    told = ", ".join(f"{name} {human_bytes(value)}" for name, value in figures if value is not None)
    counts = (("retries", device.alloc_retries), ("OOMs", device.ooms))
    return f"cuda:{device.index} {told}".replace(", of ", " of ") + "".join(f", {n} {c}" for n, c in counts if c)


def _table(device: DeviceSummary) -> list[str]:
    used = device.utilization_ratio
    rows: list[tuple[str, str]] = [
        *_rows(device, ("allocated", "requested", "active", "reserved", "inactive split", "allocated peak")),
        *_rows(device, ("reserved peak", "private pools", "slack", "reclaimable", "fragmented", "non-torch")),
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
        *(f"  {name:<{width}}  {told:>10}" for name, told in rows),
    ]


def _rows(device: DeviceSummary, names: tuple[str, ...]) -> list[tuple[str, str]]:
    return [(name, human_bytes(getattr(device, f"{name.replace(' ', '_').replace('-', '_')}_bytes"))) for name in names]


def _count(value: int | None) -> str:
    return "-" if value is None else str(value)


def _peak(peak: PhasePeak) -> str:
    return human_bytes(peak.at_least_bytes) if peak.exact else f"at least {human_bytes(peak.at_least_bytes)}"
