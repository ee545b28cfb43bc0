"""A simulated PyTorch process: what it holds on its devices, what it reports, and how it runs a command.

The simulation's lock guards every call.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from random import Random

from gpumem_exporter.client.oom.observer import OutOfMemoryLog
from gpumem_exporter.client.reporter.plan import with_plan
from gpumem_exporter.core.allocator_model import CachingAllocator, SimulatedOutOfMemoryError
from gpumem_exporter.core.samples import ProcessFacts
from gpumem_exporter.demo.device import SimulatedDevice
from gpumem_exporter.demo.expandable import ExpandableAllocator
from gpumem_exporter.demo.moments import Moments
from gpumem_exporter.demo.slot import DeviceSlot, Tensor
from gpumem_exporter.wire.protocol import MODES, Command, CommandResult, OutOfMemory, ProcessIdentity, Reply, Report

__all__ = ["ACTIONS", "SimulatedProcess", "Tensor"]

ACTIONS = ("empty_cache", "collect_garbage", "reset_peak")
REMEMBERED_RESULTS = 64


class SimulatedProcess:
    """One process and all that it holds.

    Args:
        identity: what it tells of itself when it reports.
        facts: what the host says of it.
        devices: the devices it uses, in the order in which its program numbers them.
        reports: it has a reporter.
        rng: its program's source of chance.
        clock: the simulation's time, in seconds.
    """

    def __init__(
        self,
        identity: ProcessIdentity,
        facts: ProcessFacts,
        devices: Sequence[SimulatedDevice],
        *,
        reports: bool,
        rng: Random,
        clock: Callable[[], float],
    ) -> None:
        self.identity = identity
        self.facts = facts
        self.reports = reports
        self.rng = rng
        self.ended = False
        self.crashed = False
        self.pinned_host_bytes: int | None = None
        self.planned_reserved_peak_bytes: int | None = None
        self.busy_ratio = 0.0
        self.garbage: list[Tensor] = []
        """Tensors that only Python's garbage collector would find: they hang in reference cycles."""
        expandable = "expandable_segments:True" in identity.allocator_settings
        kind = ExpandableAllocator if expandable else CachingAllocator
        self._slots = tuple(DeviceSlot(device, kind(device)) for device in devices)
        # Its next report is never far away: an error need not hasten it.
        self._ooms = OutOfMemoryLog(lambda: None, clock=clock)
        self._clock = clock
        self._results: OrderedDict[str, CommandResult] = OrderedDict()
        self._moments = Moments(ACTIONS, self.run, self._results.get, self._remember, clock=clock)

    # What its program does.

    @property
    def step(self) -> int | None:
        """How many training steps have ended; None where they are not counted."""
        return self._moments.step

    @step.setter
    def step(self, step: int | None) -> None:
        self._moments.stepped(step)

    def load_libraries(self, size_bytes: int, *, device: int = 0) -> None:
        """Take memory beside the allocator: the CUDA context, NCCL's buffers, another runtime's memory.

        Raises:
            SimulatedOutOfMemoryError: the device does not have it.
        """
        slot = self._slots[device]
        if not slot.device.take(size_bytes):
            raise SimulatedOutOfMemoryError(f"tried to take {size_bytes} bytes of the driver", size_bytes)
        slot.non_torch_bytes += size_bytes

    def unload_libraries(self, size_bytes: int, *, device: int = 0) -> None:
        """Give memory that `load_libraries` took back to the driver."""
        slot = self._slots[device]
        slot.device.give(size_bytes)
        slot.non_torch_bytes -= size_bytes

    def tensor(self, size_bytes: int, component: str = "", *, device: int = 0) -> Tensor:
        """Make a tensor.

        Args:
            size_bytes: as the program asks for it.
            component: what it is for, where the program tells its reporter: parameters, gradients, optimizer_state.
            device: which of the process' devices.

        Raises:
            SimulatedOutOfMemoryError: counted in `ooms`, and told in the next report; nothing is held.
        """
        slot = self._slots[device]
        self._moments.moved += 1
        try:
            return slot.allocate(size_bytes, component)
        except SimulatedOutOfMemoryError as error:
            self._note_oom(slot, error)
            raise

    def hold(self, count: int, size_bytes: int, component: str = "", *, device: int = 0) -> None:
        """Make tensors that live as long as the process.

        Raises:
            SimulatedOutOfMemoryError: as `tensor`.
        """
        for _ in range(count):
            self.tensor(size_bytes, component, device=device)

    def free(self, tensors: list[Tensor], *, used_elsewhere: bool = False) -> None:
        """Drop all tensors of a list, the newest first; the list is empty afterwards."""
        self._moments.moved += bool(tensors)
        while tensors:
            tensor = tensors.pop()
            tensor.slot.free(tensor, used_elsewhere=used_elsewhere)

    def capture_graph(self, size_bytes: int, *, device: int = 0) -> None:
        """Capture a CUDA graph that holds that much in its private pool.

        Raises:
            SimulatedOutOfMemoryError: as `tensor`.
        """
        slot = self._slots[device]
        try:
            slot.allocator.capture_graph(size_bytes)
        except SimulatedOutOfMemoryError as error:
            self._note_oom(slot, error)
            raise

    def limit_memory(self, fraction: float, *, device: int = 0) -> None:
        """`torch.cuda.set_per_process_memory_fraction`: what of a device its cache may reserve at most."""
        slot = self._slots[device]
        slot.allocator.limit_bytes = int(fraction * slot.device.usable_bytes)

    def empty_cache(self) -> int:
        """`torch.cuda.empty_cache()`: every device of the process; returns the bytes given back."""
        return sum(slot.allocator.empty_cache() for slot in self._slots)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name what the program does, so that its peak is known on each device: what is there at its begin counts."""
        for slot in self._slots:
            slot.begin_phase(name)
        try:
            yield
        finally:
            for slot in self._slots:
                slot.begin_phase("")

    def end(self, *, crashed: bool) -> None:
        """The process is gone: all that it held on its devices is free."""
        self.ended, self.crashed = True, crashed
        for slot in self._slots:
            slot.allocator.close()
            slot.device.give(slot.non_torch_bytes)

    # What others see of it.

    @property
    def pid(self) -> int:
        """Its pid, the same for itself, for the host and for the driver."""
        return self.identity.pid

    def used_bytes(self, device: SimulatedDevice) -> int | None:
        """What it uses of a device, as the driver counts; None when it does not use the device at all."""
        for slot in self._slots:
            if slot.device is device:
                return slot.non_torch_bytes + slot.allocator.figures.reserved_bytes
        return None

    def uses(self, device: SimulatedDevice) -> bool:
        """The process holds memory on that device."""
        return any(slot.device is device for slot in self._slots)

    def report(self, sequence: int, results: Sequence[CommandResult], *, hold_seconds: float, final: bool) -> Report:
        """What its reporter sends now; of a process that has ended there is nothing to measure."""
        samples = () if self.ended else tuple(slot.sample() for slot in self._slots)
        return Report(
            process=self.identity,
            sequence=sequence,
            devices=with_plan(samples, self.planned_reserved_peak_bytes),
            pinned_host_bytes=self.pinned_host_bytes,
            step=self.step,
            results=tuple(results),
            ooms=self._ooms.waiting(),
            actions=ACTIONS,
            modes=MODES,
            waiting=self._moments.waiting.ids,
            step_seconds=self._moments.step_seconds,
            hold_seconds=hold_seconds,
            final=final,
        )

    def answered(self, report: Report) -> None:
        """The exporter has taken a report: the errors that it carried need not be told again."""
        self._ooms.reported(report.ooms)

    def obey(self, reply: Reply) -> list[CommandResult]:
        """Do what a reply asks, at once or at its moment; returns what has come of commands since the last one."""
        waiting = self._moments.waiting
        waiting.cancel(reply.cancelled)
        results = []
        for command in reply.commands:
            if command.mode == "now":
                results.append(self.run(command))
            else:
                waiting.take(command, expires_seconds=self._clock() + command.deadline_seconds)
        waiting.look()
        return [*results, *waiting.take_results()]

    def run(self, command: Command) -> CommandResult:
        """Run a command on the model; a command that was run before gives the same result again."""
        known = self._results.get(command.id)
        if known is not None:
            return known
        return self._remember(replace(self._execute(command), step=self.step))

    def _remember(self, result: CommandResult) -> CommandResult:
        self._results[result.id] = result
        if len(self._results) > REMEMBERED_RESULTS:
            self._results.popitem(last=False)
        return result

    def _execute(self, command: Command) -> CommandResult:
        if self.ended:
            return CommandResult(command.id, "gone", "the process has ended")
        if command.action not in ACTIONS:
            return CommandResult(command.id, "unsupported", f"the demo's processes do not know {command.action}")
        if command.deadline_seconds <= 0:
            return CommandResult(command.id, "expired", "the deadline had passed before the command came")
        # As in torch, `empty_cache` and the garbage collector know no devices; what is told is of the devices meant.
        slots = [slot for slot in self._slots if not command.uuids or slot.device.identity.uuid in command.uuids]
        before = [slot.held() for slot in slots]
        started = time.perf_counter()
        if command.collect_garbage or command.action == "collect_garbage":
            self.free(self.garbage)
        if command.action == "empty_cache":
            self.empty_cache()
        elif command.action == "reset_peak":
            for slot in slots:
                slot.reset_peaks()
        duration_seconds = time.perf_counter() - started
        devices = tuple(slot.compared(held) for slot, held in zip(slots, before, strict=True))
        return CommandResult(command.id, "done", duration_seconds=duration_seconds, devices=devices)

    def _note_oom(self, slot: DeviceSlot, error: SimulatedOutOfMemoryError) -> None:
        self._ooms.note(
            OutOfMemory(
                uuid=slot.device.identity.uuid,
                number=0,  # the log counts
                requested_bytes=error.driver_bytes,
                device_free_bytes=slot.device.free_bytes,
                limit_bytes=slot.limit_bytes,
                step=self.step,
                phase=slot.phase,
                sample=slot.sample(),
            )
        )
