"""A simulated PyTorch process: the calls of its program, its reports and its commands.

Callers hold the simulation's lock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from random import Random

from gpumem_client.allocator.simulated import SimulatedOutOfMemoryError
from gpumem_client.commands.settling import Settling
from gpumem_client.wire.protocol import (
    MODES,
    Command,
    CommandResult,
    OutOfMemory,
    ProcessIdentity,
    ReasonCode,
    Reply,
    Report,
)
from gpumem_exporter.core.samples import ProcessFacts
from gpumem_exporter.demo.device import SimulatedDevice
from gpumem_exporter.demo.slot import DeviceSlot, Tensor

__all__ = ["SimulatedProcess", "Tensor"]

ACTIONS = ("empty_cache", "collect_garbage", "reset_peak")
MAX_UNREPORTED_OOMS = 16
MAX_STILL_FREE = 64
"""The maximum number of settled devices in one report."""
NO_STEPS_SECONDS = 2.0
"""After this time without a step, the process reports no step duration."""


class SimulatedProcess:
    """One process and its memory.

    Args:
        identity: the description of the process in its reports.
        facts: the host's description of the process.
        devices: the devices of the process, in the order of its CUDA indexes.
        reports: whether the process has a reporter.
        rng: the random numbers of its program.
        clock: the simulation's time in seconds.

    Without enough memory, the methods raise `SimulatedOutOfMemoryError`; `tensor` also counts and reports it.
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
        self.slots = tuple(DeviceSlot(device) for device in devices)
        self.ended = self.crashed = False
        self.pinned_host_bytes: int | None = None
        self.busy_ratio = 0.0
        self.garbage: list[Tensor] = []
        """Tensors in reference cycles, which only Python's garbage collector frees."""
        self.unreported_ooms: list[tuple[float, OutOfMemory]] = []
        """The errors that the exporter does not know yet, each with its time."""
        self._oom_count = 0
        self._clock = clock
        self._step: int | None = None
        self._stepped_seconds = clock()
        self._step_seconds: float | None = None
        self._waiting: dict[str, tuple[Command, float]] = {}
        self._results: dict[str, CommandResult] = {}
        self._settling = Settling()
        self._unsent: list[CommandResult] = []

    # Called by the simulated program.

    @property
    def step(self) -> int | None:
        """The number of completed training steps; None if steps are not counted."""
        return self._step

    @step.setter
    def step(self, step: int | None) -> None:
        now = self._clock()
        if self._step is not None:
            self._step_seconds = now - self._stepped_seconds
        self._step, self._stepped_seconds = step, now
        self._run_waiting("step")

    def load_libraries(self, size_bytes: int, *, device: int = 0) -> None:
        """Allocate memory outside the allocator: the CUDA context, NCCL's buffers, another runtime's memory."""
        slot = self.slots[device]
        if not slot.device.allocate(size_bytes):
            raise SimulatedOutOfMemoryError(f"tried to allocate {size_bytes} bytes from the driver", size_bytes)
        slot.non_torch_bytes += size_bytes

    def tensor(self, size_bytes: int, component: str = "", *, device: int = 0) -> Tensor:
        """Create a tensor; `device` is the index among the devices of the process."""
        slot = self.slots[device]
        try:
            return slot.allocate(size_bytes, component)
        except SimulatedOutOfMemoryError as error:
            self._note_oom(slot, error)
            raise

    def hold(self, count: int, size_bytes: int, component: str = "", *, device: int = 0) -> None:
        """Create tensors that live as long as the process."""
        for _ in range(count):
            self.tensor(size_bytes, component, device=device)

    def free(self, tensors: list[Tensor], *, used_by_other_stream: bool = False) -> None:
        """Free all tensors of a list, the newest first, and empty the list."""
        while tensors:
            tensor = tensors.pop()
            tensor.slot.free(tensor, used_by_other_stream=used_by_other_stream)

    def empty_cache(self) -> None:
        """Empty the caches of all devices, as `torch.cuda.empty_cache()` does."""
        for slot in self.slots:
            slot.allocator.empty_cache()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Run a named phase and record its peak on each device; memory in use at its start counts."""
        for slot in self.slots:
            slot.start_phase(name)
        try:
            yield
        finally:
            for slot in self.slots:
                slot.start_phase("")

    def end(self, *, crashed: bool) -> None:
        """End the process and release its memory on all devices."""
        self.ended, self.crashed = True, crashed
        for slot in self.slots:
            slot.end()

    # Its reports and commands.

    @property
    def pid(self) -> int:
        """The pid, which is the same in the process, on the host and in the driver's lists."""
        return self.identity.pid

    def read_cache(self) -> None:
        """Take a reading of the cache on each device."""
        for slot in self.slots:
            slot.read_cache(self._clock())

    def report(self, sequence: int, results: Sequence[CommandResult] = (), *, final: bool = False) -> Report:
        """Build the next report; after the process has ended, it has no samples."""
        now = self._clock()
        steps_run = self._step_seconds and now - self._stepped_seconds < max(3 * self._step_seconds, NO_STEPS_SECONDS)
        samples = () if self.ended else tuple(slot.sample() for slot in self.slots)
        self._settling.measure(samples, now)
        return Report(
            process=self.identity,
            sequence=sequence,
            devices=samples,
            pinned_host_bytes=self.pinned_host_bytes,
            step=self.step,
            results=tuple(results),
            still_free=self._settling.results(MAX_STILL_FREE),
            ooms=tuple(replace(oom, age_seconds=now - seconds) for seconds, oom in self.unreported_ooms),
            actions=ACTIONS,
            modes=MODES,
            waiting=tuple(self._waiting),
            step_seconds=self._step_seconds if steps_run else None,
            final=final,
        )

    def acknowledge(self, report: Report) -> None:
        """Record that the exporter accepted a report, so that its contents are not sent again."""
        self._settling.delivered(report.still_free)
        known = {oom.number for oom in report.ooms}
        self.unreported_ooms = [entry for entry in self.unreported_ooms if entry[1].number not in known]

    def run_commands(self, reply: Reply) -> tuple[CommandResult, ...]:
        """Run or queue the commands of a reply, and return the results since the last call."""
        for command_id in reply.cancelled:
            if self._waiting.pop(command_id, None):
                reason = "the exporter withdrew the command"
                self._unsent.append(CommandResult(command_id, "refused", reason, ReasonCode.CANCELLED))
        for command in reply.commands:
            if command.mode == "now":
                self._unsent.append(self.run(command))
            else:
                self._waiting[command.id] = (command, self._clock() + command.deadline_seconds)
        for command, expires_seconds in tuple(self._waiting.values()):
            if self._clock() >= expires_seconds:
                self._expire(command)
        if self.busy_ratio == 0:
            self._run_waiting("idle")
        results, self._unsent = tuple(self._unsent), []
        return results

    def run(self, command: Command) -> CommandResult:
        """Run a command on the model; a repeated command returns the result of the first run."""
        if command.id not in self._results:
            self._results[command.id] = replace(self._execute(command), step=self.step)
        return self._results[command.id]

    def _run_waiting(self, mode: str) -> None:
        for command, _ in tuple(self._waiting.values()):
            if command.mode != mode:
                continue
            if command.at_step is None or command.at_step == self.step:
                del self._waiting[command.id]
                self._unsent.append(self.run(command))
            elif self.step is not None and command.at_step < self.step:
                self._expire(command)

    def _expire(self, command: Command) -> None:
        del self._waiting[command.id]
        reason = "the deadline or the requested step has passed"
        self._unsent.append(CommandResult(command.id, "expired", reason, ReasonCode.DEADLINE_PASSED, step=self.step))

    def _execute(self, command: Command) -> CommandResult:
        if self.ended:
            return CommandResult(command.id, "gone", "the process has exited", ReasonCode.PROCESS_EXITED)
        if command.action not in ACTIONS:
            reason = f"the demo's processes do not support {command.action}"
            return CommandResult(command.id, "unsupported", reason, ReasonCode.UNKNOWN_ACTION)
        if command.deadline_seconds <= 0:
            reason = "the deadline passed before the command arrived"
            return CommandResult(command.id, "expired", reason, ReasonCode.DEADLINE_PASSED)
        # As in torch, `empty_cache` and the garbage collector affect all devices; the result has only the target ones.
        slots = [slot for slot in self.slots if not command.uuids or slot.device.identity.uuid in command.uuids]
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
        result = CommandResult(command.id, "done", duration_seconds=duration_seconds, devices=devices)
        if command.action == "empty_cache":
            settle_seconds = command.settle_seconds
            self._settling.cleared(result, self._clock() + settle_seconds if settle_seconds > 0 else None)
        return result

    def _note_oom(self, slot: DeviceSlot, error: SimulatedOutOfMemoryError) -> None:
        self._oom_count += 1
        oom = OutOfMemory(
            uuid=slot.device.identity.uuid,
            number=self._oom_count,
            requested_bytes=error.driver_bytes,
            device_free_bytes=slot.device.free_bytes,
            limit_bytes=slot.limit_bytes,
            step=self.step,
            phase=slot.phase,
            sample=slot.sample(),
        )
        self.unreported_ooms = [*self.unreported_ooms, (self._clock(), oom)][-MAX_UNREPORTED_OOMS:]
