"""Runs commands in the process and measures what they did: on the reporter's thread, or at the end of a step."""

from __future__ import annotations

import gc
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

from gpumem_exporter.client.allocator.allocator import Allocator
from gpumem_exporter.client.allocator.sampler import Sampler
from gpumem_exporter.client.allocator.snapshot_file import write_snapshot
from gpumem_exporter.client.allocator.torch_access import DeviceState
from gpumem_exporter.client.hooks.guest_safety import raised_by_signal_handler
from gpumem_exporter.errors import CommandRefusedError
from gpumem_exporter.wire.protocol import Command, CommandResult, DeviceResult, SnapshotFile

__all__ = ["CAPTURING", "Executor"]

CAPTURING = "a CUDA graph is being captured"

_REMEMBERED = 64
"""Results kept, so that a command that is given twice is run once."""
_NOT_SUPPORTED = "does not yet support"
"""What torch says where an allocator (a pluggable one, cudaMallocAsync) lacks something."""


class Executor:
    """Runs commands, one at a time. Any thread may have one run: what it does happens in that thread.

    Args:
        allocator: what is acted upon.
        sampler: kept from sampling meanwhile.
        clock: monotonic seconds.
    """

    def __init__(self, allocator: Allocator, sampler: Sampler, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._allocator = allocator
        self._sampler = sampler
        self._clock = clock
        # Reentrant: a signal handler that runs while it is held may end a step.
        self._results_lock = threading.RLock()
        self._results: OrderedDict[str, CommandResult] = OrderedDict()
        self._runners: dict[str, Callable[[Command], SnapshotFile | None]] = {
            "empty_cache": self._empty_cache,
            "collect_garbage": self._collect_garbage,
            "reset_peak": self._reset_peak,
            "snapshot": self._snapshot,
            "set_memory_fraction": self._set_memory_fraction,
        }

    @property
    def actions(self) -> tuple[str, ...]:
        """What this reporter can be asked to do."""
        return tuple(self._runners)

    def known(self, command_id: str) -> CommandResult | None:
        """The result of a command that has had one."""
        with self._results_lock:
            return self._results.get(command_id)

    def run(self, command: Command, *, expires_seconds: float) -> CommandResult:
        """Run a command in this thread, or repeat the result of one that has run. Never raises.

        Args:
            command: what to do.
            expires_seconds: monotonic moment from which on it is not to begin any more.
        """
        with self._sampler.exclusively():
            return self._run_once(command, expires_seconds)

    def run_if_free(self, command: Command, *, expires_seconds: float) -> CommandResult | None:
        """The same for a thread that must not wait: None if another command or a sample is under way."""
        lock = self._sampler.exclusively()
        if not lock.acquire(blocking=False):
            return None
        try:
            return self._run_once(command, expires_seconds)
        finally:
            lock.release()

    def settle(self, result: CommandResult) -> CommandResult:
        """Make this a command's result: it will not run, or has run."""
        with self._results_lock:
            self._results[result.id] = result
            while len(self._results) > _REMEMBERED:
                self._results.popitem(last=False)
        return result

    def _run_once(self, command: Command, expires_seconds: float) -> CommandResult:
        known = self.known(command.id)
        if known is not None:
            return known
        if self._clock() >= expires_seconds:
            return self.settle(CommandResult(command.id, "expired", "its deadline had passed when its turn came"))
        result = self._run(command)
        self._sampler.outdated()
        return self.settle(replace(result, step=self._sampler.step, thread_id=threading.get_native_id()))

    def _run(self, command: Command) -> CommandResult:
        runner = self._runners.get(command.action)
        if runner is None:
            return CommandResult(command.id, "unsupported", f"this reporter runs {', '.join(self._runners)}")
        if self._allocator.capturing:
            # A cudaFree from any thread breaks a capture in the default "global" mode, and so may a finalizer.
            return CommandResult(command.id, "refused", CAPTURING)
        begun = self._clock()
        try:
            before = self._measure(command.uuids)
            begun = self._clock()
            snapshot = runner(command)
            duration = self._clock() - begun
            devices = tuple(self._compare(i, *measured) for i, measured in before.items() if self._allocator.uuid(i))
        except CommandRefusedError as error:
            return CommandResult(command.id, "refused", str(error))
        except Exception as error:  # whatever torch or a finalizer raises is this command's result
            if raised_by_signal_handler(error):
                raise
            outcome = "unsupported" if _NOT_SUPPORTED in str(error) else "failed"
            return CommandResult(command.id, outcome, f"{type(error).__name__}: {error}"[:500], self._clock() - begun)
        return CommandResult(command.id, "done", "", duration, devices, snapshot=snapshot)

    def _empty_cache(self, command: Command) -> None:
        if command.collect_garbage:
            self._collect_garbage(command)
        self._allocator.empty_cache()

    def _collect_garbage(self, _command: Command) -> None:
        gc.collect()

    def _reset_peak(self, command: Command) -> None:
        for index in self._measured(command.uuids):
            self._allocator.reset_peak(index)

    def _snapshot(self, _command: Command) -> SnapshotFile:
        return write_snapshot(self._allocator)

    def _set_memory_fraction(self, command: Command) -> None:
        fraction = command.fraction
        if fraction is None or not 0 < fraction <= 1:
            raise CommandRefusedError(f"the fraction must be over 0 and at most 1, not {fraction}")
        devices = self._measured(command.uuids)
        for index in () if command.force else devices:
            reserved = _current(self._allocator.state(index), "reserved_bytes")
            cap = int(fraction * self._allocator.total_bytes(index))
            if reserved is not None and reserved > cap:
                # Nothing would be given back; the next allocation that does not fit the cache would fail.
                raise CommandRefusedError(
                    f"{self._allocator.uuid(index)}: {reserved} bytes are reserved, which is more than {fraction:g} of"
                    f" the device ({cap} bytes); clear first, or force it"
                )
        for index in devices:
            self._allocator.set_memory_fraction(index, fraction)

    def _measured(self, uuids: tuple[str, ...]) -> list[int]:
        """The devices to act on; a process' devices are known to it alone, so empty means all."""
        return [index for index in self._allocator.devices() if not uuids or self._allocator.uuid(index) in uuids]

    def _measure(self, uuids: tuple[str, ...]) -> dict[int, tuple[DeviceState | None, int | None]]:
        return {
            index: (self._allocator.state(index), self._allocator.free_bytes(index)) for index in self._measured(uuids)
        }

    def _compare(self, index: int, before: DeviceState | None, free_before: int | None) -> DeviceResult:
        after = self._allocator.state(index)
        return DeviceResult(
            uuid=self._allocator.uuid(index),
            reserved_before_bytes=_current(before, "reserved_bytes"),
            reserved_after_bytes=_current(after, "reserved_bytes"),
            allocated_before_bytes=_current(before, "allocated_bytes"),
            allocated_after_bytes=_current(after, "allocated_bytes"),
            freed_bytes=_freed(before, after),
            device_free_before_bytes=free_before,
            device_free_after_bytes=self._allocator.free_bytes(index),
        )


def _current(state: DeviceState | None, name: str, metric: str = "current") -> int | None:
    if state is None:
        return None
    value: int | None = state.get(name, {}).get("all", {}).get(metric)
    return value


def _freed(before: DeviceState | None, after: DeviceState | None) -> int | None:
    """What went back to the driver: the growth of the allocator's own count of freed reserved bytes.

    The difference of reserved would miss what another thread reserved anew in between. It is taken where there is no
    such count (cudaMallocAsync), and where the program has set it back meanwhile (`reset_accumulated_memory_stats`).
    """
    begun, ended = _current(before, "reserved_bytes", "freed"), _current(after, "reserved_bytes", "freed")
    if begun is not None and ended is not None and ended >= begun:
        return ended - begun
    held, left = _current(before, "reserved_bytes"), _current(after, "reserved_bytes")
    return max(0, held - left) if held is not None and left is not None else None
