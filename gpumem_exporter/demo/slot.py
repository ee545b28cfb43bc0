"""The memory of one simulated process on one device, its components, and the peaks of its phases."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

from gpumem_client.allocator.idle_cache import IdleCache
from gpumem_client.allocator.simulated import Block, CachingAllocator
from gpumem_client.allocator.unmapped import Unmapped, held_by_driver
from gpumem_client.wire.protocol import DeviceResult, DeviceSample
from gpumem_exporter.demo.device import SimulatedDevice

__all__ = ["DeviceSlot", "MemoryUse", "Tensor"]


@dataclass(slots=True, eq=False)
class Tensor:
    """The memory of a tensor: a block of one device's cache."""

    block: Block
    slot: DeviceSlot
    component: str


class MemoryUse(NamedTuple):
    """The memory of a process on a device, and the free memory of the device."""

    reserved_bytes: int
    allocated_bytes: int
    device_free_bytes: int


class DeviceSlot:
    """One device of one process. The caller holds the simulation's lock.

    Args:
        device: the device, which other processes may also use.
    """

    def __init__(self, device: SimulatedDevice) -> None:
        self.device = device
        self.allocator = CachingAllocator(device)
        self.non_torch_bytes = 0
        self.nccl_bytes: int | None = None
        """The part of `non_torch_bytes` that NCCL reports."""
        self.unmapped = Unmapped(0, 0)
        """The memory of the allocator that the device does not hold."""
        self.planned_reserved_peak_bytes: int | None = None
        self.phase = ""
        """The current phase of the program; empty outside of phases."""
        self._phase_peak_bytes: dict[str, int] = {}
        self._component_bytes: dict[str, int] = {}
        self._idle_cache = IdleCache()
        self._idle_cache_bytes: int | None = None

    @property
    def used_bytes(self) -> int:
        """The driver's value of the bytes that the process uses on the device."""
        return self.non_torch_bytes + self.allocator.statistics.reserved_bytes - self.unmapped.reserved_bytes

    @property
    def limit_bytes(self) -> int:
        """The most bytes of the device that the process may use."""
        own_limit_bytes = self.allocator.limit_bytes
        return self.device.usable_bytes if own_limit_bytes is None else own_limit_bytes

    def allocate(self, size_bytes: int, component: str) -> Tensor:
        """Create a tensor; `component` is empty if the program names none.

        Raises:
            SimulatedOutOfMemoryError: no memory is left.
        """
        block = self.allocator.allocate(size_bytes)
        if component:
            self._component_bytes[component] = self._component_bytes.get(component, 0) + block.size_bytes
        self._note_phase_peak()
        return Tensor(block, self, component)

    def free(self, tensor: Tensor, *, used_by_other_stream: bool) -> None:
        """Free a tensor of this device."""
        if tensor.component:
            self._component_bytes[tensor.component] -= tensor.block.size_bytes
        self.allocator.free(tensor.block, used_by_other_stream=used_by_other_stream)

    def sleep(self) -> None:
        """Unmap all memory of the allocator, as vLLM's sleep mode does; the tensors keep their addresses."""
        self.allocator.empty_cache()
        statistics = self.allocator.statistics
        self.unmapped = Unmapped(statistics.reserved_bytes, statistics.allocated_bytes)
        self.device.free(self.unmapped.reserved_bytes)

    def wake(self) -> bool:
        """Map the memory again; returns False if the device has not enough."""
        if not self.device.allocate(self.unmapped.reserved_bytes):
            return False
        self.unmapped = Unmapped(0, 0)
        return True

    def end(self) -> None:
        """Release all memory, because the process ends."""
        self.allocator.close()
        self.device.free(self.non_torch_bytes - self.unmapped.reserved_bytes)

    def start_phase(self, name: str) -> None:
        """Start a phase; an empty name ends the current phase."""
        self.phase = name
        self._note_phase_peak()

    def reset_peaks(self) -> None:
        """Reset all peaks; the peak of a phase starts again with the next run of the phase, or now if it runs."""
        self.allocator.reset_peaks()
        self._phase_peak_bytes.clear()
        self._note_phase_peak()

    def memory_use(self) -> MemoryUse:
        """Return the current memory."""
        statistics, unmapped = self.allocator.statistics, self.unmapped
        reserved_bytes = statistics.reserved_bytes - unmapped.reserved_bytes
        allocated_bytes = statistics.allocated_bytes - unmapped.allocated_bytes
        return MemoryUse(reserved_bytes, allocated_bytes, self.device.free_bytes)

    def result_since(self, before: MemoryUse) -> DeviceResult:
        """Return the effect of a command on this device, given the memory before it."""
        after = self.memory_use()
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

    def read_cache(self, now_seconds: float) -> None:
        """Take a reading of the cache for the idle cache."""
        statistics, uuid = self.allocator.statistics, self.device.identity.uuid
        reading = DeviceSample(
            uuid=uuid,
            reserved_bytes=statistics.reserved_bytes,
            allocated_peak_bytes=statistics.allocated_peak_bytes,
            reclaimable_bytes=self.allocator.reclaimable_bytes,
            alloc_retries=statistics.alloc_retries,
            segments_freed=statistics.segments_freed,
        )
        self._idle_cache.note(reading, now_seconds)
        self._idle_cache_bytes = self._idle_cache.bytes(uuid, now_seconds)

    def sample(self) -> DeviceSample:
        """Return the sample that a reporter would take now. Memory without a component counts as `other`."""
        components = dict(self._component_bytes)
        if components:
            components["other"] = self.allocator.statistics.allocated_bytes - sum(components.values())
        sample = DeviceSample(
            uuid=self.device.identity.uuid,
            **asdict(self.allocator.statistics),  # its fields have the same names
            reclaimable_bytes=self.allocator.reclaimable_bytes,
            nccl_bytes=self.nccl_bytes,
            memory_limit_bytes=self.allocator.limit_bytes,
            planned_reserved_peak_bytes=self.planned_reserved_peak_bytes,
            phase_peak_bytes=dict(self._phase_peak_bytes),
            component_bytes=components,
        )
        if self.unmapped.reserved_bytes:
            sample = held_by_driver(sample, self.unmapped)
        if self._idle_cache_bytes is None or sample.reclaimable_bytes is None:
            return sample
        # A command may have emptied the cache since the last reading.
        return replace(sample, idle_cache_bytes=min(self._idle_cache_bytes, sample.reclaimable_bytes))

    def _note_phase_peak(self) -> None:
        if self.phase:
            peak_bytes = self._phase_peak_bytes.get(self.phase, 0)
            self._phase_peak_bytes[self.phase] = max(peak_bytes, self.allocator.statistics.allocated_bytes)
