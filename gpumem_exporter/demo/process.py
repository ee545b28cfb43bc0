"""A simulated PyTorch process: its memory, its reports and its commands.

Callers hold the simulation's lock.
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
from gpumem_exporter.demo.command_timing import CommandTiming
from gpumem_exporter.demo.device import SimulatedDevice
from gpumem_exporter.demo.expandable import ExpandableAllocator
from gpumem_exporter.demo.slot import DeviceSlot, Tensor
from gpumem_exporter.wire.protocol import (
    MODES,
    Command,
    CommandResult,
    OutOfMemory,
    ProcessIdentity,
    ReasonCode,
    Reply,
    Report,
)

__all__ = ["ACTIONS", "SimulatedProcess", "Tensor"]

ACTIONS = ("empty_cache", "collect_garbage", "reset_peak")
REMEMBERED_RESULTS = 64


class SimulatedProcess:
    """One process and its memory.

    Args:
        identity: the process' description in its reports.
        facts: the host's description of the process.
        devices: the devices of the process, in the order of its CUDA indexes.
        reports: whether the process has a reporter.
        rng: the random numbers of its program.
        clock: the simulation's time in seconds.
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
        """Tensors in reference cycles, which only Python's garbage collector frees."""
        expandable = "expandable_segments:True" in identity.allocator_settings
        kind = ExpandableAllocator if expandable else CachingAllocator
        self._slots = tuple(DeviceSlot(device, kind(device)) for device in devices)
        # An error does not wake the reporter, because the next report follows within a second.
        self._ooms = OutOfMemoryLog(lambda: None, clock=clock)
        self._clock = clock
        self._results: OrderedDict[str, CommandResult] = OrderedDict()
        self._timing = CommandTiming(ACTIONS, self.run, self._results.get, self._remember, clock=clock)

    # Calls of its program.

    @property
    def step(self) -> int | None:
        """The number of completed training steps; None if steps are not counted."""
        return self._timing.step

    @step.setter
    def step(self, step: int | None) -> None:
        self._timing.stepped(step)

    def load_libraries(self, size_bytes: int, *, device: int = 0) -> None:
        """Allocate memory outside the allocator: the CUDA context, NCCL's buffers, another runtime's memory.

        Raises:
            SimulatedOutOfMemoryError: the device does not have enough memory.
        """
        slot = self._slots[device]
        if not slot.device.allocate(size_bytes):
            raise SimulatedOutOfMemoryError(f"tried to allocate {size_bytes} bytes from the driver", size_bytes)
        slot.non_torch_bytes += size_bytes

    def unload_libraries(self, size_bytes: int, *, device: int = 0) -> None:
        """Release memory that `load_libraries` allocated."""
        slot = self._slots[device]
        slot.device.free(size_bytes)
        slot.non_torch_bytes -= size_bytes

    def tensor(self, size_bytes: int, component: str = "", *, device: int = 0) -> Tensor:
        """Create a tensor.

        Args:
            size_bytes: the requested size.
            component: the component that the program names: parameters, gradients, optimizer_state; empty for none.
            device: the index among the process' devices.

        Raises:
            SimulatedOutOfMemoryError: no memory is left; the error is counted in `ooms` and reported.
        """
        slot = self._slots[device]
        self._timing.allocation_changes += 1
        try:
            return slot.allocate(size_bytes, component)
        except SimulatedOutOfMemoryError as error:
            self._note_oom(slot, error)
            raise

    def hold(self, count: int, size_bytes: int, component: str = "", *, device: int = 0) -> None:
        """Create tensors that live as long as the process.

        Raises:
            SimulatedOutOfMemoryError: as `tensor`.
        """
        for _ in range(count):
            self.tensor(size_bytes, component, device=device)

    def free(self, tensors: list[Tensor], *, used_by_other_stream: bool = False) -> None:
        """Free all tensors of a list, the newest first, and empty the list."""
        self._timing.allocation_changes += bool(tensors)
        while tensors:
            tensor = tensors.pop()
            tensor.slot.free(tensor, used_by_other_stream=used_by_other_stream)

    def capture_graph(self, size_bytes: int, *, device: int = 0) -> None:
        """Capture a CUDA graph with `size_bytes` in its private pool.

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
        """Limit the cache to a fraction of a device, as `torch.cuda.set_per_process_memory_fraction` does."""
        slot = self._slots[device]
        slot.allocator.limit_bytes = int(fraction * slot.device.usable_bytes)

    def empty_cache(self) -> int:
        """Empty the caches of all devices, as `torch.cuda.empty_cache()` does, and return the released bytes."""
        return sum(slot.allocator.empty_cache() for slot in self._slots)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Run a named phase and record its peak on each device; memory in use at its start counts."""
        for slot in self._slots:
            slot.start_phase(name)
        try:
            yield
        finally:
            for slot in self._slots:
                slot.start_phase("")

    def end(self, *, crashed: bool) -> None:
        """End the process and release its memory on all devices."""
        self.ended, self.crashed = True, crashed
        for slot in self._slots:
            slot.allocator.close()
            slot.device.free(slot.non_torch_bytes)

    # The view from outside.

    @property
    def pid(self) -> int:
        """The pid, which is the same in the process, on the host and in the driver's lists."""
        return self.identity.pid

    def used_bytes(self, device: SimulatedDevice) -> int | None:
        """Return the driver's value of the bytes used on a device; None if the process does not use the device."""
        for slot in self._slots:
            if slot.device is device:
                return slot.non_torch_bytes + slot.allocator.statistics.reserved_bytes
        return None

    def uses(self, device: SimulatedDevice) -> bool:
        """Return whether the process uses the device."""
        return any(slot.device is device for slot in self._slots)

    def report(self, sequence: int, results: Sequence[CommandResult], *, hold_seconds: float, final: bool) -> Report:
        """Build the reporter's next report; after the process has ended, it has no samples."""
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
            waiting=self._timing.waiting.ids,
            step_seconds=self._timing.step_seconds,
            hold_seconds=hold_seconds,
            final=final,
        )

    def acknowledge(self, report: Report) -> None:
        """Record that the exporter accepted a report, so that its errors are not sent again."""
        self._ooms.reported(report.ooms)

    def run_commands(self, reply: Reply) -> list[CommandResult]:
        """Run or queue the commands of a reply, and return the results since the last call."""
        waiting = self._timing.waiting
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
        """Run a command on the model; a repeated command returns the result of the first run."""
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
            return CommandResult(command.id, "gone", "the process has exited", ReasonCode.PROCESS_EXITED)
        if command.action not in ACTIONS:
            return CommandResult(
                command.id,
                "unsupported",
                f"the demo's processes do not support {command.action}",
                ReasonCode.UNKNOWN_ACTION,
            )
        if command.deadline_seconds <= 0:
            return CommandResult(
                command.id, "expired", "the deadline passed before the command arrived", ReasonCode.DEADLINE_PASSED
            )
        # As in torch, `empty_cache` and the garbage collector affect all devices; the result has only the target ones.
        slots = [slot for slot in self._slots if not command.uuids or slot.device.identity.uuid in command.uuids]
        before = [slot.memory_use() for slot in slots]
        started = time.perf_counter()
        if command.collect_garbage or command.action == "collect_garbage":
            self.free(self.garbage)
        if command.action == "empty_cache":
            self.empty_cache()
        elif command.action == "reset_peak":
            for slot in slots:
                slot.reset_peaks()
        duration_seconds = time.perf_counter() - started
        devices = tuple(slot.result_since(use) for slot, use in zip(slots, before, strict=True))
        return CommandResult(command.id, "done", duration_seconds=duration_seconds, devices=devices)

    def _note_oom(self, slot: DeviceSlot, error: SimulatedOutOfMemoryError) -> None:
        self._ooms.note(
            OutOfMemory(
                uuid=slot.device.identity.uuid,
                number=0,  # the log assigns the number
                requested_bytes=error.driver_bytes,
                device_free_bytes=slot.device.free_bytes,
                limit_bytes=slot.limit_bytes,
                step=self.step,
                phase=slot.phase,
                sample=slot.sample(),
            )
        )
