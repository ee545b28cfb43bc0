"""Runs commands at the end of a step, in an idle time, or after a CUDA graph capture.

A command in mode `step` runs in the training thread, so it cannot interrupt that thread's allocations or captures. A
command in mode `idle` runs on the reporter's thread. A command in mode `now` waits only while a CUDA graph is captured:
it runs on the reporter's thread after the capture, or at the end of a step if that comes first. A command that has not
started by its deadline never runs: a job that hung must not clear its cache when it recovers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from gpumem_client.commands.executor import refused_during_capture
from gpumem_client.wire.protocol import MODES, Command, CommandResult, ReasonCode

__all__ = ["Scheduler"]


class Executor(Protocol):
    """Runs commands: `client.commands.executor.Executor`."""

    @property
    def actions(self) -> tuple[str, ...]: ...
    def known(self, command_id: str) -> CommandResult | None: ...
    def run(self, command: Command, *, expires_seconds: float) -> CommandResult: ...
    def run_if_free(self, command: Command, *, expires_seconds: float) -> CommandResult | None: ...
    def settle(self, result: CommandResult) -> CommandResult: ...


class Allocator(Protocol):
    """Counts allocations: `client.allocator.torch_access.Allocator`."""

    @property
    def capturing(self) -> bool: ...
    @property
    def flushing(self) -> bool: ...
    def devices(self) -> Sequence[int]: ...
    def allocations(self, index: int) -> tuple[int, int] | None: ...


class Sampler(Protocol):
    """Counts steps: `client.allocator.sampler.Sampler`."""

    @property
    def step(self) -> int | None: ...
    def steps_run(self) -> bool: ...


_IDLE_SECONDS = 2.0
"""A process is idle after this time without an allocation or a free."""
_MAX_WAITING = 64


@dataclass(frozen=True, slots=True)
class _Held:
    command: Command
    expires_seconds: float


class Scheduler:
    """Keeps each command until its mode lets it run. The user's threads call `at_step`, the reporter's thread the rest.

    Args:
        executor: runs the commands.
        allocator: reports CUDA graph captures and counts allocations.
        sampler: counts steps.
        wake: makes the reporter send its next report now; called in the thread that ran a command.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        executor: Executor,
        allocator: Allocator,
        sampler: Sampler,
        *,
        wake: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._executor = executor
        self._allocator = allocator
        self._sampler = sampler
        self._wake = wake
        self._clock = clock
        self._lock = threading.Lock()
        self._held: dict[str, _Held] = {}
        self._results: list[CommandResult] = []
        self._for_steps = False
        """Whether a command waits for a step. Most steps check this alone."""
        self._counted: object = None
        self._still_since_seconds = 0.0

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids of the waiting commands, for the report."""
        with self._lock:
            return tuple(self._held)

    def take(self, command: Command, *, expires_seconds: float) -> None:
        """Add a command, unless it waits already or has a result."""
        known = self._executor.known(command.id)
        if known is not None:
            self._finish(known)
        elif command.mode not in MODES:
            unknown = f"this reporter does not support the mode {command.mode!r}"
            self._settle(command, "unsupported", unknown, ReasonCode.UNKNOWN_MODE)
        elif command.action not in self._executor.actions:
            supported = f"this reporter supports {', '.join(self._executor.actions)}"
            self._settle(command, "unsupported", supported, ReasonCode.UNKNOWN_ACTION)
        elif command.at_step is not None and (self._sampler.step or 0) >= command.at_step:
            self._settle_passed(command, command.at_step)
        elif not self._add(command, expires_seconds):
            self._settle(command, "refused", f"{_MAX_WAITING} commands are waiting already", ReasonCode.QUEUE_FULL)

    def _add(self, command: Command, expires_seconds: float) -> bool:
        """Return False if the queue is full."""
        with self._lock:
            if command.id in self._held:
                return True
            if len(self._held) >= _MAX_WAITING:
                return False
            self._held[command.id] = _Held(command, expires_seconds)
            self._mark()
        if command.mode == "idle":
            self._counted = None
        return True

    def cancel(self, ids: Iterable[str]) -> None:
        """Drop the commands with these ids that have not started."""
        for command_id in ids:
            held = self._claim(command_id)
            if held is not None:
                self._settle(held.command, "refused", "the exporter withdrew the command", ReasonCode.CANCELLED)

    def next_expiry_seconds(self) -> float | None:
        """Return when the next waiting command expires; None if there is none."""
        return min((held.expires_seconds for held in self._list()), default=None)

    def at_step(self, step: int) -> None:
        """Run the commands for this step, in the thread that ended it; usually there are none."""
        if self._for_steps:
            self._run_at_step(step)

    def look(self) -> None:
        """Expire late commands and run those that are due, on the reporter's thread."""
        now = self._clock()
        for held in self._list():
            if now >= held.expires_seconds and self._claim(held.command.id) is not None:
                self._settle_late(held.command)
        for held in [held for held in self._list() if held.command.mode == "now"]:
            if not self._allocator.capturing and self._claim(held.command.id) is not None:
                self._finish(self._executor.run(held.command, expires_seconds=held.expires_seconds))
        idle = [held for held in self._list() if held.command.mode == "idle"]
        if idle and self._idle(now):
            for held in idle:
                if not self._allocator.capturing and self._claim(held.command.id) is not None:
                    self._finish(self._executor.run(held.command, expires_seconds=held.expires_seconds))
            self._counted = None

    def take_results(self) -> tuple[CommandResult, ...]:
        """Return the results since the last call."""
        with self._lock:
            results, self._results = tuple(self._results), []
        return results

    def _run_at_step(self, step: int) -> None:
        for held in self._list():
            # The reporter's thread expires late commands.
            if held.command.mode != "idle" and self._clock() < held.expires_seconds:
                self._try_at_step(held, step)

    def _try_at_step(self, held: _Held, step: int) -> None:
        command, at_step = held.command, held.command.at_step
        if at_step is not None and at_step > step:
            return
        if at_step is not None and at_step < step:
            if self._claim(command.id) is not None:
                self._settle_passed(command, at_step)
                self._wake()
        elif self._allocator.capturing:
            if at_step is not None and self._claim(command.id) is not None:
                self._finish(self._executor.settle(refused_during_capture(command)))
                self._wake()
        elif self._claim(command.id) is not None:
            self._run_claimed(held)

    def _run_claimed(self, held: _Held) -> None:
        command, expires_seconds = held.command, held.expires_seconds
        try:
            result = self._executor.run_if_free(command, expires_seconds=expires_seconds)
            if result is None and command.at_step is None:
                with self._lock:  # the reporter's thread runs a command or samples: try after the next step
                    self._held[command.id] = held
                    self._mark()
                return
            if result is None:
                result = self._executor.run(command, expires_seconds=expires_seconds)
        except BaseException as error:  # raised by the user's signal handler; continues to the user's code
            interrupted = f"a signal handler raised {type(error).__name__}"
            self._settle(command, "failed", interrupted, ReasonCode.SIGNAL_HANDLER)
            self._wake()
            raise
        self._finish(result)
        self._wake()

    def _idle(self, now: float) -> bool:
        """Return whether no step has run and nothing was allocated for `_IDLE_SECONDS`."""
        if self._sampler.steps_run() or self._allocator.flushing:
            self._counted = None
            return False
        counted = tuple(self._allocator.allocations(index) for index in self._allocator.devices())
        if counted != self._counted:
            self._counted, self._still_since_seconds = counted, now
        return now - self._still_since_seconds >= _IDLE_SECONDS

    def _list(self) -> list[_Held]:
        with self._lock:
            return list(self._held.values())

    def _claim(self, command_id: str) -> _Held | None:
        """Remove a command and return it. Only the thread that receives it runs or ends it."""
        with self._lock:
            held = self._held.pop(command_id, None)
            self._mark()
        return held

    def _mark(self) -> None:
        self._for_steps = any(held.command.mode != "idle" for held in self._held.values())

    def _settle(self, command: Command, outcome: str, reason: str, code: ReasonCode) -> None:
        result = CommandResult(command.id, outcome, reason, code, step=self._sampler.step)
        self._finish(self._executor.settle(result))

    def _finish(self, result: CommandResult) -> None:
        with self._lock:
            self._results.append(result)

    def _settle_passed(self, command: Command, at_step: int) -> None:
        passed = f"step {at_step} has passed: {self._sampler.step} steps have ended"
        self._settle(command, "expired", passed, ReasonCode.STEP_PASSED)

    def _settle_late(self, command: Command) -> None:
        if command.mode == "now":
            late, code = "a CUDA graph was being captured until the deadline", ReasonCode.CUDA_GRAPH_CAPTURE
        elif command.mode == "idle":
            late, code = "the process was not idle before the deadline", ReasonCode.NOT_IDLE
        elif command.at_step is not None:
            late, code = f"step {command.at_step} did not end before the deadline", ReasonCode.NO_STEP_ENDED
        else:
            late, code = "no step ended before the deadline", ReasonCode.NO_STEP_ENDED
        self._settle(command, "expired", late, code)
