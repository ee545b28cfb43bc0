"""Runs commands at the end of a step, in an idle time, or after a CUDA graph capture.

A command in mode `step` runs in the training thread, so it cannot interrupt that thread's allocations or captures. A
command in mode `idle` runs on the reporter's thread. A command in mode `now` waits only while a CUDA graph is captured:
it runs on the reporter's thread after the capture, or at the end of a step if that comes first.
"""

from __future__ import annotations

import threading
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
        # Reentrant: a signal handler may end a step while its thread holds the lock.
        self._lock = threading.RLock()
        self._waiting: dict[str, _Waiting] = {}
        # Whether a command waits for a step. Most steps check this alone, so they take no lock.
        self._for_steps = False
        self._counted: object = None
        self._still_since_seconds = 0.0

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids of the waiting commands, for the report."""
        return tuple(each.command.id for each in self._list())

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
            self._end_passed(command, command.at_step)
        elif not self._keep(_Waiting(command, expires_seconds)):
            self._end(command, "refused", f"{_MAX_WAITING} commands are waiting already", ReasonCode.QUEUE_FULL)

    def cancel(self, ids: Iterable[str]) -> None:
        """Drop the commands with these ids that have not started."""
        for command_id in ids:
            claimed = self._claim(command_id)
            if claimed is not None:
                self._end(claimed.command, "refused", "the exporter withdrew the command", ReasonCode.CANCELLED)

    def next_expiry_seconds(self) -> float | None:
        """Return when the next waiting command expires; None if there is none."""
        return min((each.expires_seconds for each in self._list()), default=None)

    def at_step(self, step: int) -> None:
        """Run the commands for this step, in the thread that ended it; usually there are none."""
        if not self._for_steps:
            return
        for each in self._list():
            # The reporter's thread ends late commands.
            if _may_run_at_step(each.command) and self._clock() < each.expires_seconds:
                self._try_at_step(each, step)

    def run_due(self) -> None:
        """End late commands and run the commands that are due, on the reporter's thread."""
        now = self._clock()
        # First, because a command that has not started by its deadline never runs: a job that hung must not clear its
        # cache when it recovers.
        for command, expires_seconds in self._list():
            if now >= expires_seconds and self._claim(command.id) is not None:
                self._end_late(command)
        self._run_all("now")
        waiting = [each.command for each in self._list() if each.command.mode == "idle"]
        if any(command.action in ENGINE_ACTIONS for command in waiting) and not self._executor.engine_busy:
            self._run_all("idle", of_engine=True)
        if any(command.action not in ENGINE_ACTIONS for command in waiting) and self._idle(now):
            self._run_all("idle")
            self._counted = None

    def _run_all(self, mode: str, *, of_engine: bool = False) -> None:
        for command, expires_seconds in self._list():
            waits_for_engine = mode == "idle" and command.action in ENGINE_ACTIONS
            due = command.mode == mode and waits_for_engine is of_engine
            if due and not self._allocator.capturing and self._claim(command.id) is not None:
                self._executor.run(command, expires_seconds=expires_seconds)

    def _try_at_step(self, waiting: _Waiting, step: int) -> None:
        command, at_step = waiting.command, waiting.command.at_step
        if at_step is not None and at_step > step:
            return
        capturing = self._allocator.capturing and at_step in (None, step)
        # During a capture, a command for any step waits for a later one. A command with a number does not: the ranks of
        # a group act after the same step, because one late rank delays the others in their next collective.
        if (capturing and at_step is None) or self._claim(command.id) is None:
            return
        if at_step is not None and at_step < step:
            self._end_passed(command, at_step)
        elif capturing:
            self._executor.record(refused_during_capture(command))
        elif not self._run_claimed(waiting):
            return
        self._wake()

    def _run_claimed(self, waiting: _Waiting) -> bool:
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
        if result is not None:
            return True
        with self._lock:
            self._waiting[command.id] = waiting
            self._for_steps = True
        return False

    def _idle(self, now: float) -> bool:
        """Return whether no step has run and nothing was allocated for `_IDLE_SECONDS`."""
        # Reading the counters during a flush would wait for it, with the GIL.
        if self._sampler.steps_run() or self._allocator.flushing:
            self._counted = None
            return False
        counted = tuple(self._allocator.allocations(index) for index in self._allocator.devices())
        if None in counted:  # an allocator without counters does not show that it is idle
            self._counted = None
            return False
        if counted != self._counted:
            self._counted, self._still_since_seconds = counted, now
        return now - self._still_since_seconds >= _IDLE_SECONDS

    def _list(self) -> list[_Waiting]:
        with self._lock:
            return list(self._waiting.values())

    def _keep(self, waiting: _Waiting) -> bool:
        """Return False if the queue is full."""
        command = waiting.command
        with self._lock:
            if command.id in self._waiting:
                return True
            if len(self._waiting) >= _MAX_WAITING:
                return False
            self._waiting[command.id] = waiting
            self._for_steps = self._for_steps or _may_run_at_step(command)
        if command.mode == "idle":
            self._counted = None
        log.debug("command %s waits: %s, mode %s, step %s", command.id, command.action, command.mode, command.at_step)
        return True

    def _claim(self, command_id: str) -> _Waiting | None:
        """Remove a command and return it. Only the thread that receives it runs or ends it."""
        with self._lock:
            claimed = self._waiting.pop(command_id, None)
            self._for_steps = any(_may_run_at_step(each.command) for each in self._waiting.values())
        return claimed

    def _end(self, command: Command, outcome: str, reason: str, code: ReasonCode) -> None:
        """End a command that does not run."""
        self._executor.record(CommandResult(command.id, outcome, reason, code, step=self._sampler.step))

    def _end_passed(self, command: Command, at_step: int) -> None:
        passed = f"step {at_step} has passed: {self._sampler.step} steps have ended"
        self._end(command, "expired", passed, ReasonCode.STEP_PASSED)

    def _end_late(self, command: Command) -> None:
        if command.mode == "idle" and command.action in ENGINE_ACTIONS:
            self._end(command, "refused", "the engine had requests until the deadline", ReasonCode.ENGINE_BUSY)
            return
        if command.mode == "now":
            late, code = "a CUDA graph was being captured until the deadline", ReasonCode.CUDA_GRAPH_CAPTURE
        elif command.mode == "idle":
            late, code = "the process was not idle before the deadline", ReasonCode.NOT_IDLE
        else:
            step = "no step ended" if command.at_step is None else f"step {command.at_step} did not end"
            late, code = f"{step} before the deadline", ReasonCode.NO_STEP_ENDED
        self._end(command, "expired", late, code)


def _may_run_at_step(command: Command) -> bool:
    return command.mode != "idle" and command.action != "profile"
