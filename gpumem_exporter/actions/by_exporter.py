"""Actions that the exporter itself performs on a process: it terminates the process, or speaks with its engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from gpumem_client.wire.protocol import CommandResult
from gpumem_client.wire.reason_codes import ReasonCode
from gpumem_exporter.actions.engines import EngineMemory
from gpumem_exporter.actions.kinds import KINDS
from gpumem_exporter.actions.lifecycle import OutsidePart, RunningAction
from gpumem_exporter.actions.selection import OutsideTarget
from gpumem_exporter.actions.terminate import Terminator


class OutsideActs:
    """Performs actions on processes, in tasks that `spawn` starts. `ended` is called after the result of each part."""

    def __init__(
        self,
        terminator: Terminator,
        engines: EngineMemory,
        *,
        clock: Callable[[], float],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        ended: Callable[[RunningAction], None],
    ) -> None:
        self._terminator = terminator
        self._engines = engines
        self._clock = clock
        self._spawn = spawn
        self._ended = ended

    def refusal(self, running: RunningAction, target: OutsideTarget, earlier: Counter[str]) -> CommandResult | None:
        """Return the result for a process on which the exporter must not act; None for any other.

        `earlier` is as for `EngineMemory.refusal`.
        """
        if running.action.action == "terminate":
            return self._terminator.refusal(running.action.id, target)
        unknown = self._engines.no_engine(running.action.id, target)
        return unknown or self._engines.refusal(running, target.reporter, earlier)

    def expected(self, running: RunningAction) -> CommandResult | None:
        """Return the result of a dry run; None for an engine, of which a dry run reads what it does."""
        if running.action.action != "terminate":
            return None
        return CommandResult(running.action.id, KINDS["terminate"].would, "", ReasonCode.WOULD_TERMINATE)

    def start(self, running: RunningAction, part: OutsidePart) -> None:
        """Act on a process, once the action is recorded."""
        running.start()
        self._spawn(self._act(running, part))

    async def _act(self, running: RunningAction, part: OutsidePart) -> None:
        await running.recorded.wait()
        driver = None
        try:
            if part.withdrawal is not None:
                result = part.withdrawal
            elif self._clock() >= part.deadline_seconds:  # an engine started, or the disk was slow
                late = "the deadline passed before the exporter could act"
                result = CommandResult(running.action.id, "expired", late, ReasonCode.DEADLINE_PASSED)
            elif running.action.action == "terminate":
                result = await self._terminator.end(running.action.id, part.target, running.request.grace_seconds)
            else:
                result, driver = await self._engines.act(running, part)
        except Exception as error:  # noqa: BLE001 - the action must end, whatever the error is
            reason = f"{type(error).__name__}: {error}"[:500]
            result = CommandResult(running.action.id, "failed", reason, ReasonCode.EXCEPTION)
        running.end_outside(part, result, driver)
        self._ended(running)
