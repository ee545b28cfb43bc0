"""Simulated devices, and the memory of simulated processes on them. Callers hold the node's lock."""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from gpumem_client.allocator.components import Unmapped, without_unmapped
from gpumem_client.allocator.simulated import Block, CachingAllocator
from gpumem_client.wire.protocol import DeviceSample
from gpumem_exporter.core.readings import DeviceMemory, DeviceReading

TRACE_ENTRIES_MAX = 1000
"""The longest history of the standing recording on each device: at least ten seconds of a program."""


@dataclass(slots=True, eq=False)
class SimulatedDevice:
    """One device, from which processes allocate memory. Driver and firmware reserve a part of it."""

    identity: DeviceReading
    usable_bytes: int
    """The bytes available to programs: the total of `cudaMemGetInfo`."""
    free_bytes: int
    reserved_bytes: int

    @property
    def memory(self) -> DeviceMemory:
        """The result of `nvmlDeviceGetMemoryInfo_v2`."""
        total_bytes, used_bytes = self.usable_bytes + self.reserved_bytes, self.usable_bytes - self.free_bytes
        return DeviceMemory(total_bytes, used_bytes, self.free_bytes, self.reserved_bytes)

    def allocate(self, size_bytes: int) -> bool:
        """Allocate memory; returns False if there is not enough."""
        if size_bytes > self.free_bytes:
            return False
        self.free_bytes -= size_bytes
        return True

    def free(self, size_bytes: int) -> None:
        """Release memory."""
        self.free_bytes += size_bytes


@dataclass(slots=True, eq=False)
class Tensor:
    """The memory of a tensor: a block of one device's cache."""

    block: Block
    slot: DeviceSlot
    component: str
    """Empty for a temporary tensor."""
    stack: list[dict[str, Any]]
    """As torch records it; empty in the backward pass, where there are no Python frames."""
    private: bool
    """Whether it is in a private pool."""


class SlotUse(NamedTuple):
    """The use of a device by a process, in bytes; `used` is the driver's value."""

    used: int
    allocated: int
    cached: int


class DeviceSlot:
    """The memory of one process on one device, which other processes may also use."""

    def __init__(self, device: SimulatedDevice) -> None:
        self.device = device
        self.allocator = CachingAllocator(device)
        self.non_torch_bytes = 0
        self.nccl_bytes: int | None = None
        """The part of `non_torch_bytes` that NCCL reports."""
        self.unmapped = Unmapped(0, 0)
        """The memory of the allocator that the device does not hold."""
        self.allocations = 0
        self.live: dict[Tensor, None] = {}
        """The tensors, the oldest first."""
        self.trace: deque[dict[str, Any]] = deque(maxlen=TRACE_ENTRIES_MAX)
        """The recorded history, with the entries that torch would write."""
        self._least_reclaimable_bytes = 0
        self.phase_peak_bytes: dict[str, int] = {}
        self._component_bytes: Counter[str] = Counter()

    @property
    def use(self) -> SlotUse:
        """What the process uses on the device."""
        reserved_bytes = self.allocator.statistics.reserved_bytes - self.unmapped.reserved_bytes
        allocated_bytes = self.allocator.statistics.allocated_bytes - self.unmapped.allocated_bytes
        return SlotUse(self.non_torch_bytes + reserved_bytes, allocated_bytes, reserved_bytes - allocated_bytes)

    def allocate(
        self, size_bytes: int, component: str, *, stack: list[dict[str, Any]], phase: str, private: bool
    ) -> Tensor:
        """Create a tensor in a phase of the program, or raise SimulatedOutOfMemoryError."""
        tensor = Tensor(self.allocator.allocate(size_bytes, private=private), self, component, stack, private)
        self.allocations += 1
        self.live[tensor] = None
        self._component_bytes[component] += tensor.block.size_bytes
        self._least_reclaimable_bytes = min(self._least_reclaimable_bytes, self.allocator.reclaimable_bytes)
        if phase:
            peak_bytes = self.phase_peak_bytes.get(phase, 0)
            self.phase_peak_bytes[phase] = max(peak_bytes, self.allocator.statistics.allocated_bytes)
        self.record("alloc", tensor)
        return tensor

    def free(self, tensor: Tensor) -> None:
        """Free a tensor of this device."""
        del self.live[tensor]
        # `record` has no time between the request of a free and its end: nothing else uses the block meanwhile.
        self.record("free_requested", tensor)
        self.record("free_completed", tensor)
        self._component_bytes[tensor.component] -= tensor.block.size_bytes
        self.allocator.free(tensor.block)

    def record(self, action: str, tensor: Tensor | None = None) -> None:
        """Add an entry to the history."""
        entry: dict[str, Any] = {"action": action, "time_us": time.time_ns() // 1000}
        if tensor is not None:
            entry.update(addr=tensor.block.address, size=tensor.block.size_bytes, frames=tensor.stack)
            entry["pool_id"] = (0, int(tensor.private))
        self.trace.append(entry)

    def sleep(self) -> None:
        """Unmap all memory of the allocator, as vLLM's sleep mode does; the tensors keep their addresses."""
        if not self.unmapped.reserved_bytes:
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

    def sample(self) -> DeviceSample:
        """Return the sample that a reporter would take now. Memory without a component counts as `other`."""
        components = dict(self._component_bytes)
        components["other"] = components.pop("", 0)
        sample = DeviceSample(
            uuid=self.device.identity.uuid,
            **vars(self.allocator.statistics),
            reclaimable_bytes=self.allocator.reclaimable_bytes,
            nccl_bytes=self.nccl_bytes,
            memory_limit_bytes=self.allocator.limit_bytes,
            phase_peak_bytes=dict(self.phase_peak_bytes),
            component_bytes=components,
        )
        if not self.unmapped.reserved_bytes:
            return sample
        # All tensors are unmapped. `without_unmapped` keeps no components, because it cannot know that.
        sample = replace(without_unmapped(sample, self.unmapped), component_bytes=dict.fromkeys(components, 0))
        return replace(sample, component_unmapped_bytes=components)

    def least_reclaimable_bytes(self) -> int:
        """Return the smallest reclaimable value since the last call."""
        # A real reporter reads the cache at random moments of a step, and so sees what the step needs. Here all that
        # a program does in a tick happens at one time, and a reader would see the ends of ticks alone.
        now_bytes = self.allocator.reclaimable_bytes
        least_bytes, self._least_reclaimable_bytes = min(self._least_reclaimable_bytes, now_bytes), now_bytes
        return least_bytes
