"""Recommends allocator settings from measured values."""

from __future__ import annotations

import os
from dataclasses import dataclass

from gpumem_exporter.client.allocator.attached import attached, no_cuda
from gpumem_exporter.client.allocator.settings import VARIABLES, in_force, merged, parse_settings
from gpumem_exporter.errors import ConfigurationError
from gpumem_exporter.units import human_bytes

__all__ = ["AllocatorValues", "Recommendation", "recommend", "recommend_allocator_settings"]

_FRAGMENTED_SHARE = 0.1
_FRAGMENTED_LEAST = 256 << 20
_ROUNDED_SHARE = 0.1
_RETRIES_MANY = 3


@dataclass(frozen=True, slots=True)
class AllocatorValues:
    """The measured values of one device; None is unknown."""

    device: int
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    reclaimable_bytes: int | None = None
    requested_bytes: int | None = None
    alloc_retries: int | None = None
    ooms: int | None = None
    device_free_bytes: int | None = None

    @property
    def fragmented_bytes(self) -> int | None:
        """Bytes reserved, neither allocated nor reclaimable."""
        if self.allocated_bytes is None or self.reserved_bytes is None or self.reclaimable_bytes is None:
            return None
        return max(0, self.reserved_bytes - self.allocated_bytes - self.reclaimable_bytes)


@dataclass(frozen=True, slots=True)
class Recommendation:
    """Settings for the next run, and the reasons. Prints as text."""

    settings: tuple[tuple[str, str], ...] = ()
    reasons: tuple[str, ...] = ()
    """One reason per setting, or the reason for no change."""
    current: str = ""
    """The settings in force now."""
    variable: str = ""
    """The environment variable that sets them; empty if none is set."""

    @property
    def line(self) -> str:
        """All settings for the next run, including those in force; empty if no change is recommended."""
        return merged(self.current, dict(self.settings)) if self.settings else ""

    def __str__(self) -> str:
        came = f" (from {self.variable})" if self.variable else ""
        lines = [f"in force: {self.current or 'the defaults'}{came}"]
        if self.settings:
            lines.append(f"next run: {VARIABLES[0]}={self.line}")
        lines += [f"  {reason}" for reason in self.reasons]
        return "\n".join(lines)


def recommend_allocator_settings() -> Recommendation:
    """Recommend allocator settings for this process' memory, with reasons.

    Settings take effect when CUDA starts: set them in the environment of the next run, for example with
    `gpumem-exporter run --allocator`. Call this at the end of a representative step; it takes at most one walk over the
    heap. Without CUDA it recommends nothing.
    """
    allocator = attached()
    if allocator is None:
        no_cuda("recommend_allocator_settings")
        return Recommendation(reasons=("no CUDA: nothing was measured",))
    by_uuid = {allocator.uuid(index): index for index in allocator.devices()}
    devices = [
        AllocatorValues(
            device=by_uuid[sample.uuid],
            allocated_bytes=sample.allocated_bytes,
            reserved_bytes=sample.reserved_bytes,
            reclaimable_bytes=sample.reclaimable_bytes,
            requested_bytes=sample.requested_bytes,
            alloc_retries=sample.alloc_retries,
            ooms=sample.ooms,
            device_free_bytes=allocator.free_bytes(by_uuid[sample.uuid]),
        )
        for sample in allocator.samples()
        if sample.uuid in by_uuid
    ]
    return recommend(devices, allocator.settings, in_force(os.environ)[0])


def recommend(devices: list[AllocatorValues], current: str, variable: str = "") -> Recommendation:
    """Return the recommendation for given values."""
    try:
        settings = parse_settings(current) if current else {}
    except ConfigurationError:  # settings of a newer release
        settings = {}
    if settings.get("backend") == "cudaMallocAsync":
        reason = "backend:cudaMallocAsync is the driver's own allocator: PyTorch's settings do not affect it"
        return Recommendation(reasons=(reason,), current=current, variable=variable)
    wanted: dict[str, str] = {}
    reasons: list[str] = []
    for device in devices:
        _fragmentation(device, settings, wanted, reasons)
        _rounding(device, settings, wanted, reasons)
        _pressure(device, settings, wanted, reasons)
    if not reasons:
        reasons.append("the measured values suggest no change")
    return Recommendation(tuple(wanted.items()), tuple(reasons), current, variable)


def _fragmentation(
    device: AllocatorValues, settings: dict[str, str], wanted: dict[str, str], reasons: list[str]
) -> None:
    fragmented, reserved = device.fragmented_bytes, device.reserved_bytes
    if fragmented is None or not reserved:
        return
    if fragmented < max(_FRAGMENTED_LEAST, _FRAGMENTED_SHARE * reserved):
        return
    share = (
        f"cuda:{device.device} has {human_bytes(fragmented)} of {human_bytes(reserved)} reserved memory fragmented"
        " between tensors"
    )
    if settings.get("expandable_segments") == "True":
        reasons.append(
            f"{share}, although segments are expandable: live tensors separate it; allocate long-lived tensors first"
        )
    elif "expandable_segments" not in wanted:
        wanted["expandable_segments"] = "True"
        reasons.append(f"expandable_segments:True: {share}; expandable segments are unmapped and reused by the page")
        if "max_split_size_mb" in settings:
            reasons.append("max_split_size_mb has no effect then: remove it")


def _rounding(device: AllocatorValues, settings: dict[str, str], wanted: dict[str, str], reasons: list[str]) -> None:
    if not device.requested_bytes or device.allocated_bytes is None or "roundup_power2_divisions" not in settings:
        return
    rounded = device.allocated_bytes - device.requested_bytes
    if rounded >= max(_FRAGMENTED_LEAST, _ROUNDED_SHARE * device.allocated_bytes):
        wanted.setdefault("roundup_power2_divisions", "8")
        reasons.append(
            f"roundup_power2_divisions:8: on cuda:{device.device} {human_bytes(rounded)} of"
            f" {human_bytes(device.allocated_bytes)} are rounding; finer divisions round less"
        )


def _pressure(device: AllocatorValues, settings: dict[str, str], wanted: dict[str, str], reasons: list[str]) -> None:
    retries = device.alloc_retries or 0
    if retries < _RETRIES_MANY:
        return
    pressure = f"cuda:{device.device} had to empty its cache {retries} times for an allocation"
    if device.ooms:
        pressure += f", and ran out of memory {device.ooms} times"
    fraction = settings.get("per_process_memory_fraction")
    if fraction is not None and float(fraction) < 1 and "garbage_collection_threshold" not in settings:
        wanted.setdefault("garbage_collection_threshold", "0.8")
        reasons.append(
            f"garbage_collection_threshold:0.8: {pressure}; the allocator then releases what was unused for long before"
            f" it reaches the limit of {fraction}, instead of everything at the limit"
        )
    elif "expandable_segments" not in wanted and settings.get("expandable_segments") != "True":
        wanted["expandable_segments"] = "True"
        reasons.append(f"expandable_segments:True: {pressure}; expandable segments grow by the page instead")
    elif settings.get("expandable_segments") == "True":
        reasons.append(f"{pressure}: no setting helps; use less memory (a smaller batch, checkpointing)")
