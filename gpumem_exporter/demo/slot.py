"""One device as one simulated process uses it: what it holds there, by what it is for, and the peaks of its phases."""

from __future__ import annotations

from typing import NamedTuple

from gpumem_exporter.core.allocator_model import Block, CachingAllocator
from gpumem_exporter.demo.device import SimulatedDevice
from gpumem_exporter.wire.protocol import DeviceResult, DeviceSample

__all__ = ["DeviceSlot", "Held", "Tensor"]


class Tensor:
    """Memory that a program holds: a block of one device's cache."""

    __slots__ = ("block", "component", "slot")

    def __init__(self, block: Block, slot: DeviceSlot, component: str) -> None:
        self.block = block
        self.slot = slot
        self.component = component


class Held(NamedTuple):
    """What a process holds on a device, and what is free there, in bytes."""

    reserved_bytes: int
    allocated_bytes: int
    device_free_bytes: int


class DeviceSlot:
    """One device of one process. The simulation's lock guards every call.

    Args:
        device: the device, which other processes use, too.
        allocator: the process' cache on it.
    """

    __slots__ = ("_component_bytes", "_phase", "_phase_peak_bytes", "allocator", "device", "non_torch_bytes")

    def __init__(self, device: SimulatedDevice, allocator: CachingAllocator) -> None:
        self.device = device
        self.allocator = allocator
        self.non_torch_bytes = 0
        self._component_bytes: dict[str, int] = {}
        self._phase = ""
        self._phase_peak_bytes: dict[str, int] = {}

    @property
    def phase(self) -> str:
        """The phase that the program is in; empty outside of phases."""
        return self._phase

    @property
    def limit_bytes(self) -> int:
        """What the process may have of the device."""
        own_limit_bytes = self.allocator.limit_bytes
        return self.device.usable_bytes if own_limit_bytes is None else own_limit_bytes

    def allocate(self, size_bytes: int, component: str) -> Tensor:
        """Make a tensor; `component` is what it is for, empty where the program does not tell.

        Raises:
            SimulatedOutOfMemoryError: nothing is held.
        """
        block = self.allocator.allocate(size_bytes)
        if component:
            self._component_bytes[component] = self._component_bytes.get(component, 0) + block.size_bytes
        self._note_phase_peak()
        return Tensor(block, self, component)

    def free(self, tensor: Tensor, *, used_elsewhere: bool) -> None:
        """Drop a tensor of this device."""
        if tensor.component:
            self._component_bytes[tensor.component] -= tensor.block.size_bytes
        self.allocator.free(tensor.block, used_elsewhere=used_elsewhere)

    def begin_phase(self, name: str) -> None:
        """What follows belongs to that phase, to none where the name is empty."""
        self._phase = name
        self._note_phase_peak()

    def reset_peaks(self) -> None:
        """Let all peaks start anew; a phase's with its next beginning, or now if the process is in it."""
        self.allocator.reset_peaks()
        self._phase_peak_bytes.clear()
        self._note_phase_peak()

    def held(self) -> Held:
        """What is held now."""
        figures = self.allocator.figures
        return Held(figures.reserved_bytes, figures.allocated_bytes, self.device.free_bytes)

    def compared(self, before: Held) -> DeviceResult:
        """What a command did here, by what was held before it."""
        after = self.held()
        return DeviceResult(
            uuid=self.device.identity.uuid,
            reserved_before_bytes=before.reserved_bytes,
            reserved_after_bytes=after.reserved_bytes,
            allocated_before_bytes=before.allocated_bytes,
            allocated_after_bytes=after.allocated_bytes,
            freed_bytes=before.reserved_bytes - after.reserved_bytes,
            device_free_before_bytes=before.device_free_bytes,
            device_free_after_bytes=after.device_free_bytes,
        )

    def sample(self) -> DeviceSample:
        """What a reporter would measure now. What no component was named for is `other`."""
        figures = self.allocator.figures
        components = dict(self._component_bytes)
        if components:
            components["other"] = figures.allocated_bytes - sum(components.values())
        return DeviceSample(
            uuid=self.device.identity.uuid,
            allocated_bytes=figures.allocated_bytes,
            reserved_bytes=figures.reserved_bytes,
            active_bytes=figures.active_bytes,
            inactive_split_bytes=figures.inactive_split_bytes,
            requested_bytes=figures.requested_bytes,
            allocated_peak_bytes=figures.allocated_peak_bytes,
            reserved_peak_bytes=figures.reserved_peak_bytes,
            peak_resets=figures.peak_resets,
            private_pools_bytes=figures.private_pools_bytes,
            reclaimable_bytes=self.allocator.reclaimable_bytes,
            alloc_retries=figures.alloc_retries,
            ooms=figures.ooms,
            segments_allocated=figures.segments_allocated,
            segments_freed=figures.segments_freed,
            cache_flushes=figures.cache_flushes,
            phase_peak_bytes=dict(self._phase_peak_bytes),
            component_bytes=components,
        )

    def _note_phase_peak(self) -> None:
        if self._phase:
            peak_bytes = self._phase_peak_bytes.get(self._phase, 0)
            self._phase_peak_bytes[self._phase] = max(peak_bytes, self.allocator.figures.allocated_bytes)
