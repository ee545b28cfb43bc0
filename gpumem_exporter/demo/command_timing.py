"""Runs commands of a simulated process at a step or during a pause, with the scheduler of the real reporter."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gpumem_exporter.client.commands.scheduler import Scheduler
from gpumem_exporter.wire.protocol import Command, CommandResult, ReasonCode

__all__ = ["CommandTiming"]

_QUIET_SECONDS = 2.0


class CommandTiming:
    """Queues the commands of one process until their time. The caller holds the simulation's lock.

    Args:
        actions: the actions that the process supports.
        execute: runs a command on the model immediately.
        known: returns the result of a command that was run before.
        settle: stores the result of a command.
        clock: the simulation's time in seconds.
    """

    def __init__(
        self,
        actions: tuple[str, ...],
        execute: Callable[[Command], CommandResult],
        known: Callable[[str], CommandResult | None],
        settle: Callable[[CommandResult], CommandResult],
        *,
        clock: Callable[[], float],
    ) -> None:
        self.actions = actions
        self.known = known
        self.settle = settle
        self.capturing = self.flushing = False
        self.step: int | None = None
        self.allocation_changes = 0
        """The number of allocations and frees."""
        self._execute = execute
        self._clock = clock
        self._stepped_seconds: float | None = None
        self._step_seconds: float | None = None
        self.waiting = Scheduler(self, self, self, wake=lambda: None, clock=clock)

    @property
    def step_seconds(self) -> float | None:
        """The duration of the last step; None if no steps run."""
        return self._step_seconds if self.steps_run() else None

    def stepped(self, step: int | None) -> None:
        """Record the end of a step with this number."""
        before, self.step = self.step, step
        if step is None or before is None or step <= before:
            return
        now = self._clock()
        if self._stepped_seconds is not None and now > self._stepped_seconds:
            self._step_seconds = now - self._stepped_seconds
        self._stepped_seconds = now
        self.waiting.at_step(step)

    def steps_run(self) -> bool:
        """Return whether training steps run."""
        if self._stepped_seconds is None:
            return False
        return self._clock() - self._stepped_seconds < max(3 * (self._step_seconds or 0.0), _QUIET_SECONDS)

    def run(self, command: Command, *, expires_seconds: float) -> CommandResult:
        """Run a queued command, unless its deadline has passed."""
        if self._clock() >= expires_seconds:
            return self.settle(
                CommandResult(
                    command.id, "expired", "the deadline passed before the command started", ReasonCode.DEADLINE_PASSED
                )
            )
        return self._execute(command)

    run_if_free = run

    def devices(self) -> Sequence[int]:
        """Return one device index for all devices, because allocations are counted per process."""
        return (0,)

    def allocations(self, index: int) -> tuple[int, int]:
        """Return the number of allocations and frees."""
        return self.allocation_changes, index
