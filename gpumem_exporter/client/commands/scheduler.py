"""Commands that wait for their moment: the end of a step, a rest, or the end of a CUDA graph capture.

A command in mode `step` runs in the training thread, where it can meet neither that thread's own allocations nor a
capture. A command in mode `idle` runs on the reporter's thread once no step runs and nothing is being allocated. A
command in mode `now` waits only while a graph is captured: it runs on the reporter's thread after that, or
at the end of a step if that comes first. A command that has not started by its deadline never runs: a job that hung
must not clear its cache because it has recovered.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from gpumem_exporter.client.commands.executor import CAPTURING
from gpumem_exporter.wire.protocol import MODES, Command, CommandResult

__all__ = ["Waiting"]


class Executor(Protocol):
    """What runs commands: see `client.commands.executor`."""

    @property
    def actions(self) -> tuple[str, ...]: ...
    def known(self, command_id: str) -> CommandResult | None: ...
    def run(self, command: Command, *, expires_seconds: float) -> CommandResult: ...
    def run_if_free(self, command: Command, *, expires_seconds: float) -> CommandResult | None: ...
    def settle(self, result: CommandResult) -> CommandResult: ...


class Allocator(Protocol):
    """What knows whether the heap moves: see `client.allocator.torch_access`."""

    @property
    def capturing(self) -> bool: ...
    @property
    def flushing(self) -> bool: ...
    def devices(self) -> Sequence[int]: ...
    def allocations(self, index: int) -> tuple[int, int] | None: ...


class Sampler(Protocol):
    """What knows the steps: see `client.allocator.sampler`."""

    @property
    def step(self) -> int | None: ...
    def steps_run(self) -> bool: ...


_REST_SECONDS = 2.0
"""For so long nothing is allocated or freed before a process counts as idle."""
_MAX_WAITING = 64


@dataclass(frozen=True, slots=True)
class _Held:
    command: Command
    expires_seconds: float


class Waiting:
    """Holds commands and runs each at its moment. `at_step` is for the program's threads, the rest for the reporter's.

    Args:
        executor: runs them.
        allocator: asked whether it is captured from, and how many blocks it gave out.
        sampler: knows the steps.
        wake: has the next report sent now; called in the thread that ran a command.
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
        """Whether a step has to look at the held commands; nearly always it has not."""
        self._counted: object = None
        self._still_since_seconds = 0.0

    @property
    def ids(self) -> tuple[str, ...]:
        """What waits, for the report."""
        with self._lock:
            return tuple(self._held)

    def take(self, command: Command, *, expires_seconds: float) -> None:
        """Hold a command until its moment; one that is held already, or had its result, is known."""
        known = self._executor.known(command.id)
        if known is not None:
            self._finish(known)
        elif command.mode not in MODES:
            self._settle(command, "unsupported", f"this reporter does not know the mode {command.mode!r}")
        elif command.action not in self._executor.actions:
            self._settle(command, "unsupported", f"this reporter runs {', '.join(self._executor.actions)}")
        elif command.at_step is not None and (self._sampler.step or 0) >= command.at_step:
            self._settle(command, "expired", self._passed(command.at_step))
        else:
            with self._lock:
                if command.id in self._held:
                    return
                full = len(self._held) >= _MAX_WAITING
                if not full:
                    self._held[command.id] = _Held(command, expires_seconds)
                    self._mark()
            if full:
                self._settle(command, "refused", f"{_MAX_WAITING} commands wait already")
            elif command.mode == "idle":
                self._counted = None

    def cancel(self, ids: Iterable[str]) -> None:
        """Let these never run, as far as they have not begun."""
        for command_id in ids:
            held = self._claim(command_id)
            if held is not None:
                self._settle(held.command, "refused", "cancelled: not every rank of the group could take part")

    def at_step(self, step: int) -> None:
        """The end of a step, in the thread that made it. Costs nothing where nothing waits for a step."""
        if self._for_steps:
            self._run_at_step(step)

    def look(self) -> None:
        """On the reporter's thread: expire commands that are too late, and run those whose moment has come."""
        now = self._clock()
        for held in self._list():
            if now >= held.expires_seconds and self._claim(held.command.id) is not None:
                self._settle(held.command, "expired", self._too_late(held.command))
        for held in [held for held in self._list() if held.command.mode == "now"]:
            if not self._allocator.capturing and self._claim(held.command.id) is not None:
                self._finish(self._executor.run(held.command, expires_seconds=held.expires_seconds))
        idle = [held for held in self._list() if held.command.mode == "idle"]
        if idle and self._resting(now):
            for held in idle:
                if not self._allocator.capturing and self._claim(held.command.id) is not None:
                    self._finish(self._executor.run(held.command, expires_seconds=held.expires_seconds))
            self._counted = None

    def take_results(self) -> tuple[CommandResult, ...]:
        """What has come of commands since this was asked last."""
        with self._lock:
            results, self._results = tuple(self._results), []
        return results

    def _run_at_step(self, step: int) -> None:
        for held in self._list():
            command = held.command
            if command.mode == "idle" or (command.at_step is not None and command.at_step > step):
                continue
            if self._clock() >= held.expires_seconds:
                continue  # the reporter's thread says so
            if command.at_step is not None and command.at_step < step:
                if self._claim(command.id) is not None:
                    self._settle(command, "expired", self._passed(command.at_step))
                    self._wake()
                continue
            if self._allocator.capturing:
                if command.at_step is not None and self._claim(command.id) is not None:
                    self._settle(command, "refused", CAPTURING)
                    self._wake()
                continue
            if self._claim(command.id) is None:
                continue
            try:
                result = self._executor.run_if_free(command, expires_seconds=held.expires_seconds)
                if result is None and command.at_step is None:
                    with self._lock:  # the reporter's thread is at it: the next step will do
                        self._held[command.id] = held
                        self._mark()
                    continue
                if result is None:
                    result = self._executor.run(command, expires_seconds=held.expires_seconds)
            except BaseException as error:  # a signal's handler of the program has raised it, which goes on
                self._settle(command, "failed", f"a signal ended it: {type(error).__name__}")
                self._wake()
                raise
            self._finish(result)
            self._wake()

    def _resting(self, now: float) -> bool:
        """Nothing has run or moved for a while. Looks at the allocator only when no step runs."""
        if self._sampler.steps_run() or self._allocator.flushing:
            self._counted = None
            return False
        counted = tuple(self._allocator.allocations(index) for index in self._allocator.devices())
        if counted != self._counted:
            self._counted, self._still_since_seconds = counted, now
        return now - self._still_since_seconds >= _REST_SECONDS

    def _list(self) -> list[_Held]:
        with self._lock:
            return list(self._held.values())

    def _claim(self, command_id: str) -> _Held | None:
        """Whoever gets it is the one who runs it, or ends it."""
        with self._lock:
            held = self._held.pop(command_id, None)
            self._mark()
        return held

    def _mark(self) -> None:
        self._for_steps = any(held.command.mode != "idle" for held in self._held.values())

    def _settle(self, command: Command, outcome: str, reason: str) -> None:
        result = CommandResult(command.id, outcome, reason, step=self._sampler.step)
        self._finish(self._executor.settle(result))

    def _finish(self, result: CommandResult) -> None:
        with self._lock:
            self._results.append(result)

    def _passed(self, at_step: int) -> str:
        return f"step {at_step} had passed: {self._sampler.step} have ended"

    def _too_late(self, command: Command) -> str:
        if command.mode == "now":
            return f"{CAPTURING}, until the deadline"
        if command.mode == "idle":
            return "the process was not idle before the deadline"
        if command.at_step is not None:
            return f"step {command.at_step} did not end before the deadline"
        return "no step ended before the deadline"
