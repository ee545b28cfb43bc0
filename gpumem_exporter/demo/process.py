"""A simulated PyTorch process on simulated devices: the calls of its program, and its allocator for the client.

Callers hold the node's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from random import Random
from typing import Any, NoReturn, cast

from gpumem_client.allocator.allocator import Allocator
from gpumem_client.allocator.components import Unmapped, with_cache_use
from gpumem_client.allocator.simulated import SimulatedOutOfMemoryError
from gpumem_client.engines.engine_state import EngineFacts
from gpumem_client.engines.sleep import CoreMemory
from gpumem_client.guest_safety import ErrorLog
from gpumem_client.reporter.report_loop import ReportLoop
from gpumem_client.wire.errors import CommandRefusedError
from gpumem_client.wire.protocol import DeviceSample, ProcessIdentity
from gpumem_client.wire.reason_codes import ReasonCode
from gpumem_exporter.core.readings import ProcessFacts
from gpumem_exporter.demo.memory import DeviceSlot, SimulatedDevice, Tensor

MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Workload:
    """One workload of one or more processes."""

    name: str
    """The label `workload`, which starts with `demo-` so that simulated series can be recognized. Processes without it
    do not report."""
    program: Callable[[SimulatedProcess], Iterator[int]]
    command: str
    user: str
    placements: tuple[tuple[int, ...], ...]
    """The devices of each process; several processes are ranks."""
    age_seconds: float = 4800.0
    """How long its first process has run when the demo starts."""
    planned_bytes: int | None = None
    k8s_pod: str = ""
    """The namespace and the name of the pod without its ordinal: `namespace/name`; empty outside of pods."""
    slurm_job_id: str = ""
    leaks: bool = False
    """Whether its memory grows in each minute by as much as in the last one."""
    scale: float = 1.0
    """The factor of all its sizes."""


class SimulatedEngine(CoreMemory):
    """Lets the engine of a simulated process sleep, and wakes it, for commands of the exporter."""

    @property
    def busy(self) -> bool:
        """Whether the engine has requests."""
        return bool(self._core.engine_facts.requests)

    def release(self, *, keep_weights: bool, force: bool) -> None:
        """Unmap the memory of the engine."""
        if keep_weights:
            raise CommandRefusedError("the demo's engines release all memory", ReasonCode.ENGINE_NOT_ENABLED)
        if self._core.asleep:
            raise CommandRefusedError("the engine sleeps already", ReasonCode.ENGINE_ASLEEP)
        if self.busy and not force:
            raise CommandRefusedError("the engine has requests", ReasonCode.ENGINE_BUSY)
        for slot in self._core.slots:
            slot.sleep()

    def resume(self) -> None:
        """Map the memory again."""
        if not self._core.asleep:
            raise CommandRefusedError("the engine does not sleep", ReasonCode.ENGINE_AWAKE)
        if not all(slot.wake() for slot in self._core.slots):  # an engine has one device
            raise CommandRefusedError("the device has too little free memory", ReasonCode.ENGINE_BUSY)


class SimulatedProcess:
    """One process and its memory, with one slot for each of its devices, in the order of their CUDA indexes.

    Without enough memory, the methods raise `SimulatedOutOfMemoryError`; `tensor` also reports it. `clock` is the
    node's time in seconds.
    """

    capturing = flushing = False
    torch_version, settings = "2.15.0+cu130", ""

    def __init__(
        self,
        identity: ProcessIdentity,
        facts: ProcessFacts,
        workload: Workload,
        devices: Sequence[SimulatedDevice],
        *,
        rng: Random,
        clock: Callable[[], float],
        until_run_up: Callable[[], int],
    ) -> None:
        self.identity, self.pid, self._script = identity, identity.pid, workload.command.split()[-1]
        self.facts = facts
        self.workload = workload
        self.rng = rng
        self.until_run_up = until_run_up
        """Returns the ticks until every program runs. Before, programs may only count their steps."""
        self.slots = tuple(DeviceSlot(device) for device in devices)
        self.crashed = False
        self.reports_soon = False
        """Whether a report is due earlier than by the second."""
        self.busy_ratio = 0.0
        self.engine_facts: EngineFacts | None = None
        """What the client would find out about the inference engine in the process."""
        self.garbage: list[Tensor] = []
        """Tensors in reference cycles, which only Python's garbage collector frees."""
        self.program: Iterator[int] | None = None
        self.loop = ReportLoop(
            identity,
            cast("Allocator", self),
            ErrorLog(),
            planned_bytes=workload.planned_bytes and int(workload.planned_bytes * workload.scale),
            collect_garbage=lambda: self.free(self.garbage),
            engine=lambda: None if self.engine_facts is None else SimulatedEngine(self),
            clock=clock,
        )
        self._phase = ""

    @property
    def reports(self) -> bool:
        """Whether the process has a reporter."""
        return bool(self.workload.name)

    @property
    def asleep(self) -> bool:
        """Whether an engine has released its memory."""
        return any(slot.unmapped.reserved_bytes for slot in self.slots)

    def run(self) -> Iterator[int]:
        """Run the program; yields the ticks of each pause."""
        for device in self.devices():
            self.load_libraries(520 * MIB, device=device)  # CUDA and cuBLAS
        self.program = self.workload.program(self)
        yield from self.program

    def end(self) -> None:
        """End the process and release its memory on all devices."""
        for slot in self.slots:
            slot.allocator.close()
            slot.device.free(slot.non_torch_bytes - slot.unmapped.reserved_bytes)

    # Called by the simulated program. Sizes are multiplied by the scale of the workload.

    @property
    def step(self) -> int:
        """The number of completed training steps."""
        return self.loop.sampler.step or 0

    def end_step(self, ticks: int, *, skips: bool = True) -> int:
        """End a training step of some ticks; return the ticks until the next one. Commands that wait for a step run.

        Until the run-up of the demo, the next steps are only counted if `skips`.
        """
        steps = 1 + self.until_run_up() // ticks * skips
        for _ in range(steps):
            self.loop.sampler.on_step(None)
        return 1 + (steps - 1) * ticks

    def load_libraries(self, size_bytes: int, *, device: int = 0, nccl: bool = False) -> None:
        """Allocate memory outside the allocator: the CUDA context, NCCL's buffers, another runtime's memory."""
        slot = self.slots[device]
        size_bytes = int(size_bytes * self.workload.scale)
        if not slot.device.allocate(size_bytes):
            raise SimulatedOutOfMemoryError(f"tried to allocate {size_bytes} bytes from the driver")
        slot.non_torch_bytes += size_bytes
        if nccl:
            slot.nccl_bytes = size_bytes

    def tensor(self, size_bytes: int, component: str = "", *, device: int = 0, in_graph: bool = False) -> Tensor:
        """Create a tensor; `device` is the index among the devices of the process.

        The memory of a CUDA graph (`in_graph`) stays until the process exits.
        """
        slot = self.slots[device]
        stack: list[dict[str, Any]] = []
        frame = getattr(self.program, "gi_frame", None)  # the program is where it calls this
        if frame is not None and self._phase != "backward":  # autograd's threads have no Python stack
            stack = [{"name": frame.f_code.co_name, "filename": self._script, "line": frame.f_lineno}]
        size_bytes = int(size_bytes * self.workload.scale)
        try:
            return slot.allocate(size_bytes, component, stack=stack, phase=self._phase, private=in_graph)
        except SimulatedOutOfMemoryError:
            slot.record("oom")
            limit_bytes = slot.allocator.limit_bytes or slot.device.usable_bytes
            self.loop.note_oom(device, size_bytes, limit_bytes, slot.device.free_bytes)
            raise

    def keep(self, count: int, size_bytes: int, component: str = "parameters", *, device: int = 0) -> None:
        """Create tensors that live as long as the process."""
        for _ in range(count):
            self.tensor(size_bytes, component, device=device)

    def free(self, tensors: list[Tensor]) -> None:
        """Free all tensors of a list, the newest first, and empty the list."""
        while tensors:
            tensor = tensors.pop()
            tensor.slot.free(tensor)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Run a named phase, which ends before the program pauses."""
        self._phase = name
        try:
            yield
        finally:
            self._phase = ""

    # What the reporter and its commands use of `Allocator`.

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
        return tuple(map(self.sample_at_oom, self.devices()))

    def unused(self) -> tuple[DeviceSample, ...]:
        least_bytes = (slot.least_reclaimable_bytes() for slot in self.slots)
        return tuple(map(lambda sample, size: replace(sample, reclaimable_bytes=size), self.samples(), least_bytes))

    def sample_at_oom(self, index: int) -> DeviceSample:
        sample = self.slots[index].sample()
        return sample if self.engine_facts is None else with_cache_use(sample, self.engine_facts.cache)

    def pinned_host_bytes(self) -> int | None:
        return 512 * MIB if self.step else None  # of a data loader

    def free_bytes(self, index: int) -> int:
        return self.slots[index].device.free_bytes

    def total_bytes(self, index: int) -> int:
        return self.slots[index].device.usable_bytes

    def allocations(self, index: int) -> tuple[int, int]:
        slot = self.slots[index]
        return slot.allocations, slot.allocations - len(slot.live)

    def empty_cache(self) -> None:
        for slot in self.slots:
            slot.allocator.empty_cache()

    def reset_peak(self, index: int) -> None:
        self.slots[index].allocator.reset_peaks()
        self.slots[index].phase_peak_bytes.clear()  # the peak of a phase starts again with its next run

    def set_memory_fraction(self, index: int, fraction: float) -> None:
        self.slots[index].allocator.limit_bytes = int(fraction * self.total_bytes(index))

    def snapshot(self) -> NoReturn:
        raise CommandRefusedError("the demo's processes have no snapshot", ReasonCode.NOT_SUPPORTED_BY_ALLOCATOR)
