"""When a simulated process runs a command that waits for a step or for a rest: as the real reporter decides it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gpumem_exporter.client.commands.scheduler import Waiting
from gpumem_exporter.wire.protocol import Command, CommandResult

__all__ = ["Moments"]

_QUIET_SECONDS = 2.0


class Moments:
    """Holds the commands of one process and runs each at its moment. The simulation's lock guards every call.

    Args:
        actions: what the process can run.
        execute: runs one of them on the model, in whichever moment it is called.
        known: the result of a command that has had one.
        settle: makes this a command's result.
        clock: the simulation's time, in seconds.
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
        self.moved = 0
        """How often anything was allocated or freed."""
        self._execute = execute
        self._clock = clock
        self._stepped_seconds: float | None = None
        self._step_seconds: float | None = None
        self.waiting = Waiting(self, self, self, wake=lambda: None, clock=clock)

    @property
    def step_seconds(self) -> float | None:
        """How long the last step took; None while none run."""
        return self._step_seconds if self.steps_run() else None

    def stepped(self, step: int | None) -> None:
        """A step has ended; its number."""
        before, self.step = self.step, step
        if step is None or before is None or step <= before:
            return
        now = self._clock()
        if self._stepped_seconds is not None and now > self._stepped_seconds:
            self._step_seconds = now - self._stepped_seconds
        self._stepped_seconds = now
        self.waiting.at_step(step)

    def steps_run(self) -> bool:
        """Steps are being made."""
        if self._stepped_seconds is None:
            return False
        return self._clock() - self._stepped_seconds < max(3 * (self._step_seconds or 0.0), _QUIET_SECONDS)

    def run(self, command: Command, *, expires_seconds: float) -> CommandResult:
        """Run a command that has waited; not one whose deadline has passed."""
        if self._clock() >= expires_seconds:
            return self.settle(CommandResult(command.id, "expired", "its deadline had passed when its turn came"))
        return self._execute(command)

    run_if_free = run

    def devices(self) -> Sequence[int]:
        """One stands for all: what moves is counted for the process."""
        return (0,)

    def allocations(self, index: int) -> tuple[int, int]:
        """How often the heap has moved."""
        return self.moved, index
