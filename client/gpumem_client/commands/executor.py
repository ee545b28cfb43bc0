"""Runs the exporter's commands in this process and measures their effect."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from gpumem_client import torch_access
from gpumem_client.allocator.allocator import Allocator
from gpumem_client.allocator.components import Unmapped
from gpumem_client.allocator.reclaimable import known
from gpumem_client.allocator.sampler import Sampler
from gpumem_client.commands.settling import Settling
from gpumem_client.engines.engine_reader import process_engine
from gpumem_client.guest_safety import log, raised_by_signal_handler
from gpumem_client.hooks.graph_captures import process_captures
from gpumem_client.hooks.process_life import loading
from gpumem_client.torch_access import DeviceState
from gpumem_client.wire.errors import CommandRefusedError
from gpumem_client.wire.protocol import (
    ENGINE_ACTIONS,
    Command,
    CommandResult,
    DeviceResult,
    SnapshotFile,
    denied_by_owner,
)
from gpumem_client.wire.reason_codes import ReasonCode
from gpumem_client.wire.units import human_bytes

if TYPE_CHECKING:
    from gpumem_client.commands.profiling import Profiling
    from gpumem_client.engines.sleep import CoreMemory

# The number of results to keep, so that a command that arrives twice runs once.
_REMEMBERED = 64
# Part of torch's error message if a pluggable allocator or cudaMallocAsync lacks a feature; its type is RuntimeError.
_NOT_SUPPORTED = "does not yet support"


class _Before(NamedTuple):
    """A device before a command."""

    state: DeviceState | None
    unmapped: Unmapped | None
    free_bytes: int | None


class Executor:
    """Runs commands, one at a time, in the thread that calls it. The sampler takes no sample meanwhile."""

    def __init__(
        self,
        allocator: Allocator,
        sampler: Sampler,
        *,
        denied_actions: Collection[str] = (),
        collect_garbage: Callable[[], object] = gc.collect,
        engine: Callable[[], CoreMemory | None] = lambda: process_engine().memory(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._allocator = allocator
        self._sampler = sampler
        self._denied = denied_actions
        self._gc = collect_garbage
        self._engine = engine
        self._clock = clock
        self.settling = Settling()
        """The clears whose settling time has not passed."""
        self.make_profiling: Callable[[], Profiling] | None = None
        """Loads and returns what takes profiles; None if this process cannot take any."""
        self.profiling: Profiling | None = None
        """Takes profiles, which end later; None before the first command for one."""
        # Any thread may use the results, each time in one operation, which is atomic.
        self._results: dict[str, CommandResult] = {}
        self.undelivered: list[CommandResult] = []
        """The results that no report has delivered."""
        self._runners: dict[str, Callable[[Command], SnapshotFile | None]] = {
            "empty_cache": self._empty_cache,
            "collect_garbage": self._collect_garbage,
            "reset_peak": self._reset_peak,
            "snapshot": self._snapshot,
            "set_memory_fraction": self._set_memory_fraction,
            **dict.fromkeys(ENGINE_ACTIONS, self._release_or_resume_memory),
            "profile": self._profile,
        }

    @property
    def actions(self) -> tuple[str, ...]:
        """The actions that this reporter supports now, and that the process's owner allows."""
        missing = {*self._denied, *(ENGINE_ACTIONS if self._engine() is None else ())}
        return tuple(action for action in self._runners if self._is_known(action) and action not in missing)

    @property
    def engine_busy(self) -> bool:
        """Whether an engine that can release its memory has requests."""
        engine = self._engine()
        return engine is not None and engine.busy

    def rejection(self, command: Command) -> CommandResult | None:
        """Return the result of a command that the owner does not allow, or that is unknown; otherwise None."""
        denied = denied_by_owner(self._denied, command.action, collect_garbage=command.collect_garbage)
        if denied:  # no exporter is trusted with this
            return CommandResult(command.id, "refused", denied, ReasonCode.DENIED_BY_OWNER)
        if not self._is_known(command.action):
            supported = f"this reporter supports {', '.join(self.actions)}"
            return CommandResult(command.id, "unsupported", supported, ReasonCode.UNKNOWN_ACTION)
        return None

    def known(self, command_id: str) -> CommandResult | None:
        """Return the result of a finished command; None for any other."""
        return self._results.get(command_id)

    def run(self, command: Command, *, expires_seconds: float, wait: bool = True) -> CommandResult | None:
        """Run a command in this thread, or repeat the result of one that has run. Does not raise.

        The result is None for a profile that has started: `profiling` has the result when it ends. Without `wait`, it
        is also None if another command or a sample is running. A command that has not started by `expires_seconds`, on
        the executor's clock, does not run.
        """
        lock, left_seconds = self._sampler.exclusively, expires_seconds - self._clock()
        # Until the deadline at most: if the reporter's thread hangs, for example in a file system, training goes on.
        held = lock.acquire(timeout=min(max(0.0, left_seconds), threading.TIMEOUT_MAX) if wait else 0.0)
        if not held and not wait:
            return None
        try:
            known = self.known(command.id)
            if known is None and (not held or self._clock() >= expires_seconds):
                late = "the deadline passed before the command started"
                known = CommandResult(command.id, "expired", late, ReasonCode.DEADLINE_PASSED)
            result = known or self.rejection(command) or self._run(command)
            return None if result is None else self.record(result)
        finally:
            if held:
                lock.release()

    def record(self, result: CommandResult) -> CommandResult:
        """Record the result of a command for a report, and so that the command does not run again."""
        log.debug("command %s: %s %s", result.id, result.outcome, result.reason)
        self._results[result.id] = result
        for oldest in list(self._results)[:-_REMEMBERED]:
            self._results.pop(oldest, None)
        self.undelivered.append(result)
        return result

    def _is_known(self, action: str) -> bool:
        return action in self._runners and (action != "profile" or self.make_profiling is not None)

    def _run(self, command: Command) -> CommandResult | None:
        with process_captures().no_start() as quiet:
            if not quiet or self._allocator.capturing:
                # A cudaFree from any thread breaks a capture in the default "global" mode, and so may a finalizer
                # (pytorch/pytorch#161037). PyTorch checks the calling thread's stream only.
                return refused_during_capture(command)
            result = self._run_and_measure(command)
        if result is None:
            return None
        self._sampler.outdated()
        if command.action == "empty_cache" and result.outcome == "done":
            settle_seconds = command.settle_seconds
            self.settling.cleared(result, self._clock() + settle_seconds if settle_seconds > 0 else None)
        return replace(result, step=self._sampler.step, thread_id=threading.get_native_id())

    def _run_and_measure(self, command: Command) -> CommandResult | None:
        started = time.perf_counter()
        try:
            _require_running()
            before = {index: self._before(index) for index in self._measured(command.uuids)}
            started = time.perf_counter()
            snapshot = self._runners[command.action](command)
            duration = time.perf_counter() - started
            devices = tuple(
                self._compare(i, measured, unmaps=command.action in ENGINE_ACTIONS)
                for i, measured in before.items()
                if self._allocator.uuid(i)
            )
        except CommandRefusedError as error:
            return CommandResult(command.id, "refused", str(error), error.reason_code)
        except Exception as error:  # an error of torch or of a finalizer is this command's result
            if raised_by_signal_handler(error):
                raise
            return _failed(command, error, time.perf_counter() - started)
        if command.action == "profile":
            return None
        return CommandResult(command.id, "done", duration_seconds=duration, devices=devices, snapshot=snapshot)

    def _empty_cache(self, command: Command) -> None:
        # On every device: PyTorch has no other call. Each cudaFree may wait for running kernels.
        if command.collect_garbage:
            self._collect_garbage(command)
            _require_running()
        self._allocator.empty_cache()

    def _collect_garbage(self, _command: Command) -> None:
        self._gc()

    def _reset_peak(self, command: Command) -> None:
        for index in self._measured(command.uuids):
            self._allocator.reset_peak(index)

    def _snapshot(self, _command: Command) -> SnapshotFile:
        with loading():  # most processes never receive such a command
            from gpumem_client.allocator.snapshot_file import write_snapshot
        return write_snapshot(self._allocator)

    def _profile(self, command: Command) -> None:
        if self.profiling is None and self.make_profiling is not None:
            self.profiling = self.make_profiling()
        if self.profiling is not None:
            self.profiling.start(command)

    def _set_memory_fraction(self, command: Command) -> None:
        fraction = command.fraction
        if fraction is None or not 0 < fraction <= 1:
            raise CommandRefusedError(
                f"invalid fraction {fraction}: it must be over 0 and at most 1", ReasonCode.INVALID_FRACTION
            )
        devices = self._measured(command.uuids)
        for index in () if command.force else devices:
            reserved = known(self._allocator.state(index), "reserved_bytes")
            cap = int(fraction * self._allocator.total_bytes(index))
            if reserved is not None and reserved > cap:
                # The cap would release nothing, and the next allocation that does not fit the cache would fail.
                raise CommandRefusedError(
                    f"{self._allocator.uuid(index)}: {human_bytes(reserved)} are reserved, which is more than"
                    f" {fraction:g} of the device ({human_bytes(cap)}); clear the cache first, or use force",
                    ReasonCode.RESERVED_EXCEEDS_FRACTION,
                )
        for index in devices:
            self._allocator.set_memory_fraction(index, fraction)

    def _release_or_resume_memory(self, command: Command) -> None:
        engine = self._engine()
        if engine is None:
            raise CommandRefusedError(
                "no engine in this process can release its memory without its server", ReasonCode.NO_ENGINE
            )
        if command.action == "release_memory":
            engine.release(keep_weights="weights" in command.keep, force=command.force)
        else:
            engine.resume()

    def _measured(self, uuids: tuple[str, ...]) -> list[int]:
        """Return the device indices for these uuids; all of the process's devices if there are no uuids."""
        return [index for index in self._allocator.devices() if not uuids or self._allocator.uuid(index) in uuids]

    def _before(self, index: int) -> _Before:
        state = self._allocator.state(index)
        return _Before(state, self._allocator.unmapped(index, state), self._allocator.free_bytes(index))

    def _compare(self, index: int, before: _Before, *, unmaps: bool) -> DeviceResult:
        after = self._allocator.state(index)
        # Only an engine maps or unmaps the memory of live tensors.
        now = self._allocator.unmapped(index, after) if unmaps else before.unmapped
        return DeviceResult(
            uuid=self._allocator.uuid(index),
            reserved_before_bytes=_mapped(before.state, "reserved_bytes", before.unmapped),
            reserved_after_bytes=_mapped(after, "reserved_bytes", now),
            allocated_before_bytes=_mapped(before.state, "allocated_bytes", before.unmapped),
            allocated_after_bytes=_mapped(after, "allocated_bytes", now),
            freed_bytes=None if unmaps else _freed(before.state, after),
            device_free_before_bytes=before.free_bytes,
            device_free_after_bytes=self._allocator.free_bytes(index),
        )


def refused_during_capture(command: Command) -> CommandResult:
    """Return the result of a command that cannot run because a CUDA graph is being captured."""
    return CommandResult(command.id, "refused", "a CUDA graph is being captured", ReasonCode.CUDA_GRAPH_CAPTURE)


def _require_running() -> None:
    if torch_access.stopping():
        raise CommandRefusedError("the reporter of the process stops", ReasonCode.CANCELLED)


def _failed(command: Command, error: Exception, duration_seconds: float) -> CommandResult:
    reason = f"{type(error).__name__}: {error}"[:500]
    if _NOT_SUPPORTED in str(error):
        code, outcome = ReasonCode.NOT_SUPPORTED_BY_ALLOCATOR, "unsupported"
    else:
        code, outcome = ReasonCode.EXCEPTION, "failed"
    return CommandResult(command.id, outcome, reason, code, duration_seconds)


def _mapped(state: DeviceState | None, name: str, unmapped: Unmapped | None) -> int | None:
    """Return a value of the statistics without the memory that the driver does not hold; None if either is unknown."""
    value = known(state, name)
    return None if value is None or unmapped is None else max(0, value - getattr(unmapped, name))


def _freed(before: DeviceState | None, after: DeviceState | None) -> int | None:
    """Return the bytes that went to the driver: the growth of the allocator's counter of freed reserved bytes."""
    freed_before, freed_after = known(before, "reserved_bytes", "freed"), known(after, "reserved_bytes", "freed")
    if freed_before is not None and freed_after is not None and freed_after >= freed_before:
        return freed_after - freed_before
    # Without the counter (cudaMallocAsync), or after the user's code has reset it (`reset_accumulated_memory_stats`).
    # This difference misses what another thread reserved meanwhile.
    reserved_before, reserved_after = known(before, "reserved_bytes"), known(after, "reserved_bytes")
    if reserved_before is None or reserved_after is None:
        return None
    return max(0, reserved_before - reserved_after)
