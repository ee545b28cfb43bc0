"""A simulated PyTorch process on simulated devices: the calls of its program, and its allocator for the client.

Callers hold the simulation's lock.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from random import Random
from typing import Any, NoReturn

from gpumem_client.allocator.components import with_cache_use
from gpumem_client.allocator.simulated import AllocatorStatistics, Block, CachingAllocator, SimulatedOutOfMemoryError
from gpumem_client.allocator.unmapped import Unmapped, without_unmapped
from gpumem_client.engines.engine_state import EngineFacts
from gpumem_client.engines.sleep import CoreMemory
from gpumem_client.guest_safety import ErrorLog
from gpumem_client.hooks.out_of_memory import OutOfMemoryLog
from gpumem_client.profile.profile_types import Owner
from gpumem_client.reporter.report_loop import ReportLoop
from gpumem_client.wire.errors import CommandRefusedError
from gpumem_client.wire.protocol import DeviceSample, ProcessIdentity
from gpumem_client.wire.reason_codes import ReasonCode
from gpumem_exporter.core.samples import DeviceMemory, ProcessFacts
from gpumem_exporter.node.provider import DeviceIdentity

_SAME_IN_SAMPLE = tuple(field.name for field in fields(AllocatorStatistics))

_PARAMETER = "model.layers.{}.weight"
_OWNERS = {
    "parameters": ("parameters", _PARAMETER, "4096x{}", 4096, "bfloat16"),
    "weights": ("parameters", _PARAMETER, "4096x{}", 4096, "bfloat16"),
    "gradients": ("gradients", _PARAMETER, "4096x{}", 4096, "bfloat16"),
    "optimizer_state": ("optimizer_state", f"Lion.exp_avg {_PARAMETER}", "4096x{}", 4096, "float32"),
    "kv_cache": ("kv_cache", "GPUModelRunner.kv_caches.{}", "2x{}x16x8x128", 32768, "bfloat16"),
    "runtime": ("tensors", "attribute _workspace_buffer of a FlashInferMetadataBuilder", "{}", 1, "uint8"),
}
"""By component whose tensors Python objects hold: kind, name, shape, elements of a shape with 1, and dtype. The number
in a name counts the tensors of the kind."""
_MUCH_BYTES = 1 << 60
_ITEM_BYTES = {"uint8": 1, "bfloat16": 2, "float32": 4}
# As torch records it; empty without a recording and in the backward pass, where there are no Python frames.
_Stack = tuple[dict[str, Any], ...]


def now_us() -> int:
    """Return the time in microseconds since the epoch, as torch's history has it."""
    return time.time_ns() // 1000


@dataclass(slots=True, eq=False)
class SimulatedDevice:
    """One device, from which processes allocate memory. Driver and firmware reserve a part of it."""

    identity: DeviceIdentity
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
    stack: _Stack = ()
    pool: str = "default"
    owner: Owner | None = None
    """The model, the optimizer or the cache that holds it."""


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
        self.allocations = self.frees = 0
        self.live: dict[Tensor, None] = {}
        """The tensors, the oldest first."""
        self.trace: deque[dict[str, Any]] | None = None
        """The recorded history, with the entries that torch would write; None if nothing records."""
        self._least_reclaimable_bytes = _MUCH_BYTES
        self._phase_peak_bytes: dict[str, int] = {}
        self._component_bytes: dict[str, int] = {}

    @property
    def used_bytes(self) -> int:
        """The driver's value of the bytes that the process uses on the device."""
        return self.non_torch_bytes + self.allocator.statistics.reserved_bytes - self.unmapped.reserved_bytes

    @property
    def state(self) -> tuple[int, int, int, int]:
        """The used, the allocated, the reclaimable and all cached bytes."""
        allocated_bytes = self.allocator.statistics.allocated_bytes - self.unmapped.allocated_bytes
        cached_bytes = self.used_bytes - self.non_torch_bytes - allocated_bytes
        return self.used_bytes, allocated_bytes, self.allocator.reclaimable_bytes, cached_bytes

    def allocate(self, size_bytes: int, component: str, stack: _Stack = ()) -> Tensor:
        """Create a tensor, or raise SimulatedOutOfMemoryError; `component` is empty if the program names none."""
        block = self.allocator.allocate(size_bytes)
        self.allocations += 1
        self._least_reclaimable_bytes = min(self._least_reclaimable_bytes, self.allocator.reclaimable_bytes)
        return self._add(Tensor(block, self, component, stack))

    def capture_graph(self, size_bytes: int, component: str) -> None:
        """Capture a CUDA graph, or raise SimulatedOutOfMemoryError; see `CachingAllocator.capture_graph`."""
        self._add(Tensor(self.allocator.capture_graph(size_bytes), self, component, pool="private"))

    def free(self, tensor: Tensor) -> None:
        """Free a tensor of this device."""
        self.frees += 1
        del self.live[tensor]
        # `record` has no time between the request of a free and its end: nothing else uses the block meanwhile.
        self.record("free_requested", tensor)
        self.record("free_completed", tensor)
        if tensor.component:
            self._component_bytes[tensor.component] -= tensor.block.size_bytes
        self.allocator.free(tensor.block)

    def record(self, action: str, tensor: Tensor | None = None) -> None:
        """Add an entry to the history, if it is recorded."""
        if self.trace is not None:
            entry: dict[str, Any] = {"action": action, "time_us": now_us()}
            if tensor is not None:
                entry.update(addr=tensor.block.address, size=tensor.block.size_bytes, frames=tensor.stack)
                entry["pool_id"] = (0, int(tensor.pool == "private"))
            self.trace.append(entry)

    def _add(self, tensor: Tensor) -> Tensor:
        if tensor.component:
            others = self._component_bytes.get(tensor.component, 0)
            self._component_bytes[tensor.component] = others + tensor.block.size_bytes
        self.live[tensor] = None
        self.record("alloc", tensor)
        return tensor

    def sleep(self) -> None:
        """Unmap all memory of the allocator, as vLLM's sleep mode does; the tensors keep their addresses."""
        if self.unmapped.reserved_bytes:
            return
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

    def note_phase_peak(self, phase: str) -> None:
        """Note the allocated bytes in a phase of the program; it is empty outside of phases."""
        if phase:
            peak_bytes = self._phase_peak_bytes.get(phase, 0)
            self._phase_peak_bytes[phase] = max(peak_bytes, self.allocator.statistics.allocated_bytes)

    def reset_peaks(self, phase: str) -> None:
        """Reset all peaks. The peak of a phase starts again with its next run, or now if it runs."""
        self.allocator.reset_peaks()
        self._phase_peak_bytes.clear()
        self.note_phase_peak(phase)

    def sample(self) -> DeviceSample:
        """Return the sample that a reporter would take now. Memory without a component counts as `other`."""
        components = dict(self._component_bytes)
        if components:
            components["other"] = self.allocator.statistics.allocated_bytes - sum(components.values())
        sample = DeviceSample(
            uuid=self.device.identity.uuid,
            **{name: getattr(self.allocator.statistics, name) for name in _SAME_IN_SAMPLE},
            reclaimable_bytes=self.allocator.reclaimable_bytes,
            nccl_bytes=self.nccl_bytes,
            memory_limit_bytes=self.allocator.limit_bytes,
            phase_peak_bytes=dict(self._phase_peak_bytes),
            component_bytes=components,
        )
        if not self.unmapped.reserved_bytes:
            return sample
        # All tensors are unmapped. `without_unmapped` keeps no components, because it cannot know that.
        mapped = dict.fromkeys(components, 0)
        asleep = without_unmapped(sample, self.unmapped)
        return replace(asleep, component_bytes=mapped, component_unmapped_bytes=components)

    def unused(self) -> DeviceSample:
        """Return a sample with the smallest reclaimable value since the last call."""
        # A real reporter reads the cache at random moments of a step, and so sees what the step needs. Here all that
        # a program does in a tick happens at one time, and a reader would see the ends of ticks alone.
        least_bytes = min(self._least_reclaimable_bytes, self.allocator.reclaimable_bytes)
        self._least_reclaimable_bytes = _MUCH_BYTES
        return replace(self.sample(), reclaimable_bytes=least_bytes)


class SimulatedEngine(CoreMemory):
    """Lets the engine of a simulated process sleep, and wakes it, for commands of the exporter."""

    def __init__(self, process: SimulatedProcess) -> None:
        super().__init__(process)
        self._process = process

    @property
    def busy(self) -> bool:
        """Whether the engine has requests."""
        return self._process.engine_facts is not None and bool(self._process.engine_facts.requests)

    def release(self, *, keep_weights: bool, force: bool) -> None:
        """Unmap the memory of the engine."""
        if keep_weights:
            raise CommandRefusedError("the demo's engines release all memory", ReasonCode.ENGINE_NOT_ENABLED)
        if self._process.asleep:
            raise CommandRefusedError("the engine sleeps already", ReasonCode.ENGINE_ASLEEP)
        if self.busy and not force:
            raise CommandRefusedError("the engine has requests", ReasonCode.ENGINE_BUSY)
        for slot in self._process.slots:
            slot.sleep()

    def resume(self) -> None:
        """Map the memory again."""
        if not self._process.asleep:
            raise CommandRefusedError("the engine does not sleep", ReasonCode.ENGINE_AWAKE)
        if not all(slot.wake() for slot in self._process.slots):  # an engine has one device
            raise CommandRefusedError("the device has too little free memory", ReasonCode.ENGINE_BUSY)


class SimulatedProcess:
    """One process and its memory, with one slot for each of its devices, in the order of their CUDA indexes.

    Without enough memory, the methods raise `SimulatedOutOfMemoryError`; `tensor` also reports it. `clock` is the
    simulation's time in seconds. The sizes of the program are multiplied by `scale`.
    """

    capturing = flushing = False
    settings = ""

    def __init__(
        self,
        identity: ProcessIdentity,
        facts: ProcessFacts,
        devices: Sequence[SimulatedDevice],
        *,
        reports: bool,
        rng: Random,
        clock: Callable[[], float],
        until_run_up: Callable[[], int],
        planned_bytes: int | None = None,
        scale: float = 1.0,
    ) -> None:
        self.identity = identity
        self.until_run_up = until_run_up
        """Returns the ticks until every program runs. Before, programs may only count their steps."""
        self.scale = scale
        self.torch_version = identity.torch_version
        self.facts = facts
        self.reports = reports
        self.rng = rng
        self.slots = tuple(DeviceSlot(device) for device in devices)
        self.ended = self.crashed = False
        self.busy_ratio = 0.0
        self.pinned_bytes: int | None = None
        self.engine_facts: EngineFacts | None = None
        """What the client would find out about the inference engine in the process."""
        self.garbage: list[Tensor] = []
        """Tensors in reference cycles, which only Python's garbage collector frees."""
        self.program: Iterator[int] | None = None
        self.script = next((word for word in identity.command.split() if word.endswith(".py")), "main.py")
        # The living tensors of each kind that Python objects hold.
        self._owned: Counter[str] = Counter()
        self.loop = ReportLoop(
            identity,
            self,
            OutOfMemoryLog(lambda: None, clock=clock),
            ErrorLog(),
            planned_bytes=planned_bytes,
            collect_garbage=lambda: self.free(self.garbage),
            engine=lambda: None if self.engine_facts is None else SimulatedEngine(self),
            clock=clock,
        )
        self._phase = ""

    @property
    def pid(self) -> int:
        """The pid, which is the same in the process, on the host and in the driver's lists."""
        return self.identity.pid

    @property
    def asleep(self) -> bool:
        """Whether an engine has released its memory."""
        return any(slot.unmapped.reserved_bytes for slot in self.slots)

    # Called by the simulated program.

    @property
    def step(self) -> int:
        """The number of completed training steps."""
        return self.loop.sampler.step or 0

    def end_step(self, ticks: int, *, most_skipped: int = 1 << 40) -> int:
        """End a training step of some ticks; return the ticks until the next one. Commands that wait for a step run.

        Until the run-up of the demo, some of the next steps are only counted.
        """
        skipped = min(self.until_run_up() // ticks, most_skipped)
        for _ in range(1 + skipped):
            self.loop.sampler.on_step(None)
        return 1 + skipped * ticks

    def load_libraries(self, size_bytes: int, *, device: int = 0) -> None:
        """Allocate memory outside the allocator: the CUDA context, NCCL's buffers, another runtime's memory."""
        slot = self.slots[device]
        size_bytes = int(size_bytes * self.scale)
        if not slot.device.allocate(size_bytes):
            raise SimulatedOutOfMemoryError(f"tried to allocate {size_bytes} bytes from the driver", size_bytes)
        slot.non_torch_bytes += size_bytes

    def tensor(self, size_bytes: int, component: str = "", *, device: int = 0) -> Tensor:
        """Create a tensor; `device` is the index among the devices of the process."""
        slot = self.slots[device]
        try:
            tensor = slot.allocate(int(size_bytes * self.scale), component, self._stack(slot))
        except SimulatedOutOfMemoryError as error:
            slot.record("oom")
            limit_bytes = slot.allocator.limit_bytes or slot.device.usable_bytes
            self.loop.note_oom(device, error.driver_bytes, limit_bytes, slot.device.free_bytes)
            raise
        slot.note_phase_peak(self._phase)
        if component in _OWNERS:
            tensor.owner = self._owner(component, tensor)
        return tensor

    def keep(self, count: int, size_bytes: int, component: str = "", *, device: int = 0) -> None:
        """Create tensors that live as long as the process: without a component, a model that nothing watches."""
        for _ in range(count):
            tensor = self.tensor(size_bytes, component, device=device)
            if not component:
                tensor.owner = self._owner("parameters", tensor)

    def free(self, tensors: list[Tensor]) -> None:
        """Free all tensors of a list, the newest first, and empty the list."""
        while tensors:
            tensor = tensors.pop()
            if tensor.owner is not None:
                self._owned[tensor.owner.kind] -= 1
            tensor.slot.free(tensor)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Run a named phase and record its peak on each device; memory in use at its start counts."""
        self._phase = name
        for slot in self.slots:
            slot.note_phase_peak(name)
        try:
            yield
        finally:
            self._phase = ""

    def _owner(self, component: str, tensor: Tensor) -> Owner:
        kind, name, shape, elements, dtype = _OWNERS[component]
        same = self._owned[kind]
        self._owned[kind] += 1
        length = tensor.block.requested_bytes // (_ITEM_BYTES[dtype] * elements)
        return Owner(kind, name.format(same), shape.format(length), dtype)

    def _stack(self, slot: DeviceSlot) -> _Stack:
        """Return the stack of an allocation, which is in the program."""
        frame = getattr(self.program, "gi_frame", None)
        if slot.trace is None or frame is None or self._phase == "backward":
            return ()
        return ({"name": frame.f_code.co_name, "filename": self.script, "line": frame.f_lineno},)

    def end(self, *, crashed: bool) -> None:
        """End the process and release its memory on all devices."""
        self.ended, self.crashed = True, crashed
        for slot in self.slots:
            slot.end()

    # What `gpumem_client.allocator.allocator.AnyAllocator` has.

    def current_phase(self) -> str:
        return self._phase

    def devices(self) -> list[int]:
        return list(range(len(self.slots)))

    def uuid(self, index: int) -> str:
        return self.slots[index].device.identity.uuid

    def state(self, index: int) -> dict[str, dict[str, int]]:
        statistics = self.slots[index].allocator.statistics
        return {name: {"current": getattr(statistics, name)} for name in ("reserved_bytes", "allocated_bytes")}

    def unmapped(self, index: int, state: object) -> Unmapped:  # noqa: ARG002
        return self.slots[index].unmapped

    def engine(self) -> EngineFacts | None:
        return self.engine_facts

    def samples(self) -> tuple[DeviceSample, ...]:
        return tuple(self._with_engine(slot.sample()) for slot in self.slots)

    def unused(self) -> tuple[DeviceSample, ...]:
        return tuple(self._with_engine(slot.unused()) for slot in self.slots)

    def sample_at_oom(self, index: int) -> DeviceSample:
        return self._with_engine(self.slots[index].sample())

    def _with_engine(self, sample: DeviceSample) -> DeviceSample:
        return with_cache_use(sample, self.engine_facts.cache if self.engine_facts is not None else None)

    def pinned_host_bytes(self) -> int | None:
        return self.pinned_bytes

    def free_bytes(self, index: int) -> int:
        return self.slots[index].device.free_bytes

    def total_bytes(self, index: int) -> int:
        return self.slots[index].device.usable_bytes

    def allocations(self, index: int) -> tuple[int, int]:
        return self.slots[index].allocations, self.slots[index].frees

    def empty_cache(self) -> None:
        for slot in self.slots:
            slot.allocator.empty_cache()

    def reset_peak(self, index: int) -> None:
        self.slots[index].reset_peaks(self._phase)

    def set_memory_fraction(self, index: int, fraction: float) -> None:
        self.slots[index].allocator.limit_bytes = int(fraction * self.total_bytes(index))

    def snapshot(self) -> NoReturn:
        raise CommandRefusedError("the demo's processes have no snapshot", ReasonCode.NOT_SUPPORTED_BY_ALLOCATOR)
