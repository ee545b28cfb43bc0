"""Runs commands at the end of a step, in an idle time, or after a CUDA graph capture.

A command in mode `step` runs in the training thread, so it cannot interrupt that thread's allocations or captures. A
command in mode `idle` runs on the reporter's thread, and so does a command in mode `now`, which waits only while a CUDA
graph is captured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from gpumem_client.allocator.allocator import Allocator
from gpumem_client.allocator.sampler import Sampler
from gpumem_client.commands.executor import Executor, refused_during_capture
from gpumem_client.guest_safety import log
from gpumem_client.wire.protocol import ENGINE_ACTIONS, MODES, Command, CommandResult
from gpumem_client.wire.reason_codes import ReasonCode

# A process is idle after this time without an allocation or a free.
_IDLE_SECONDS = 2.0
_MAX_WAITING = 64
# By mode: why a command has not run before its deadline.
_LATE = {
    "now": ("a CUDA graph was being captured until the deadline", ReasonCode.CUDA_GRAPH_CAPTURE),
    "step": ("the step did not end before the deadline", ReasonCode.NO_STEP_ENDED),
    "idle": ("the process was not idle before the deadline", ReasonCode.NOT_IDLE),
}


class _Waiting(NamedTuple):
    command: Command
    expires_seconds: float


class Scheduler:
    """Keeps each command until its mode lets it run. The user's threads call `at_step`, the reporter's thread the rest.

    `wake` makes the reporter send its next report now; it is called in the thread that ran a command.
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
        # Guarded by no lock: each access is one operation of `dict`, which is atomic in Python, even without a GIL. The
        # thread whose `pop` returns a command runs or ends it.
        self._waiting: dict[str, _Waiting] = {}
        self._counted: object = None
        self._still_since_seconds = 0.0

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids of the waiting commands, for the report."""
        return tuple(self._waiting)

    def add(self, command: Command, *, expires_seconds: float) -> None:
        """Keep a command, unless it waits already or has a result."""
        ended = self._executor.known(command.id) or self._executor.rejection(command)
        if ended is not None:
            self._executor.record(ended)
        elif command.mode not in MODES:
            unknown = f"this reporter does not support the mode {command.mode!r}"
            self._end(command, "unsupported", unknown, ReasonCode.UNKNOWN_MODE)
        elif command.action == "profile" and command.mode == "step":
            # The thread that starts a recording must end it, and only the reporter's thread goes on.
            self._end(command, "unsupported", "a profile cannot run at a step", ReasonCode.UNKNOWN_MODE)
        elif command.at_step is not None and (self._sampler.step or 0) >= command.at_step:
            self._end_passed(command)
        elif command.id not in self._waiting:
            if len(self._waiting) >= _MAX_WAITING:
                self._end(command, "refused", f"{_MAX_WAITING} commands are waiting already", ReasonCode.QUEUE_FULL)
                return
            self._waiting[command.id] = _Waiting(command, expires_seconds)
            if command.mode == "idle":
                self._counted = None
            log.debug("command %s waits: %s, %s, step %s", command.id, command.action, command.mode, command.at_step)

    def cancel(self, ids: Iterable[str]) -> None:
        """Drop the commands with these ids that have not started."""
        for command_id in ids:
            claimed = self._waiting.pop(command_id, None)
            if claimed is not None:
                self._end(claimed.command, "refused", "the exporter withdrew the command", ReasonCode.CANCELLED)

    def next_expiry_seconds(self) -> float | None:
        """Return when the next waiting command expires; None if there is none."""
        return min((each.expires_seconds for each in list(self._waiting.values())), default=None)

    def at_step(self, step: int) -> None:
        """Run the commands for this step, in the thread that ended it; usually there are none."""
        for waiting in list(self._waiting.values()):
            command, at_step = waiting.command, waiting.command.at_step
            # The reporter's thread ends late commands.
            late = self._clock() >= waiting.expires_seconds
            if command.mode != "step" or late or (at_step is not None and at_step > step):
                continue
            # During a capture, a command for any step waits for a later one. A command with a number does not: the
            # ranks of a group act after the same step, because one late rank delays the others in their next
            # collective.
            capturing = self._allocator.capturing
            if (capturing and at_step is None) or self._waiting.pop(command.id, None) is None:
                continue
            if at_step is not None and at_step < step:
                self._end_passed(command)
            elif capturing:
                self._executor.record(refused_during_capture(command))
            elif not self._run_at_step(waiting):
                continue
            self._wake()

    def run_due(self) -> None:
        """End late commands and run the commands that are due, on the reporter's thread."""
        now, waiting = self._clock(), list(self._waiting.values())
        # First, because a command that has not started by its deadline never runs: a job that hung must not clear its
        # cache when it recovers.
        for command, expires_seconds in waiting:
            if now >= expires_seconds and self._waiting.pop(command.id, None) is not None:
                self._end_late(command)
        of_engine = {command.id for command, _ in waiting if command.action in ENGINE_ACTIONS}
        idle = any(each.mode == "idle" and each.id not in of_engine for each, _ in waiting) and self._idle(now)
        for command, expires_seconds in waiting:
            due = command.mode == "now"
            if command.mode == "idle":
                due = not self._executor.engine_busy if command.id in of_engine else idle
            if due and not self._allocator.capturing and self._waiting.pop(command.id, None) is not None:
                self._executor.run(command, expires_seconds=expires_seconds)
        if idle:
            self._counted = None

    def _run_at_step(self, waiting: _Waiting) -> bool:
        """Return False if the command waits again, because the reporter's thread runs a command or samples."""
        command, expires_seconds = waiting
        try:
            # Training does not wait for the reporter's thread, unless the other ranks act after this very step.
            at_this_step = command.at_step is not None
            result = self._executor.run(command, expires_seconds=expires_seconds, wait=at_this_step)
        except BaseException as error:  # raised by the user's signal handler; continues to the user's code
            interrupted = f"a signal handler raised {type(error).__name__}"
            self._end(command, "failed", interrupted, ReasonCode.SIGNAL_HANDLER)
            self._wake()
            raise
        if result is None:
            self._waiting[command.id] = waiting
        return result is not None

    def _idle(self, now: float) -> bool:
        """Return whether no step has run and nothing was allocated for `_IDLE_SECONDS`."""
        # Reading the counters during a flush would wait for it, with the GIL.
        still = not self._sampler.steps_run() and not self._allocator.flushing
        counted = tuple([self._allocator.allocations(index) for index in self._allocator.devices()]) if still else None
        if counted is None or None in counted:  # an allocator without counters does not show that it is idle
            self._counted = None
            return False
        if counted != self._counted:
            self._counted, self._still_since_seconds = counted, now
        return now - self._still_since_seconds >= _IDLE_SECONDS

    def _end(self, command: Command, outcome: str, reason: str, code: ReasonCode) -> None:
        """End a command that does not run."""
        self._executor.record(CommandResult(command.id, outcome, reason, code, step=self._sampler.step))

    def _end_passed(self, command: Command) -> None:
        passed = f"step {command.at_step} has passed: {self._sampler.step} steps have ended"
        self._end(command, "expired", passed, ReasonCode.STEP_PASSED)

    def _end_late(self, command: Command) -> None:
        if command.mode == "idle" and command.action in ENGINE_ACTIONS:
            self._end(command, "refused", "the engine had requests until the deadline", ReasonCode.ENGINE_BUSY)
        else:
            self._end(command, "expired", *_LATE[command.mode])
