"""Completes the results of done clears with what stays free, as the processes report it after the settling time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from gpumem_client.wire.protocol import StillFree
from gpumem_exporter.actions.action import Action, ActionResult
from gpumem_exporter.actions.lifecycle import CommandPart, RunningAction
from gpumem_exporter.core.samples import ProcessKey, ReportingProcess

SETTLING_GRACE_SECONDS = 5.0
"""A process's value may arrive this long after the settling time, and two steps later: steps delay its samples."""


class _Settlement(NamedTuple):
    """One process's part in a clear that is done, until the value of each device has arrived."""

    running: RunningAction
    part: CommandPart
    gives_up_seconds: float

    def lacks_value(self, result: ActionResult) -> bool:
        """Return whether a result is of this process, and its value has not arrived."""
        ours = result.pid == self.part.target.pid
        return ours and result.freed_bytes is not None and result.still_free_bytes is None


class Settlements:
    """Completes the results of done clears with what stayed free, as the processes report it after the settling time.

    `changed` is called with each action that has changed.
    """

    def __init__(self, changed: Callable[[Action], None]) -> None:
        self._changed = changed
        self._waiting: dict[tuple[str, ProcessKey], _Settlement] = {}

    def start(self, running: RunningAction, part: CommandPart, now: float) -> None:
        """Wait for values of a process that has done a clear, if it has released memory."""
        late_seconds = SETTLING_GRACE_SECONDS + 2 * (part.target.process.report.step_seconds or 0.0)
        settlement = _Settlement(running, part, now + part.command.settle_seconds + late_seconds)
        if any(map(settlement.lacks_value, running.action.results)):
            self._waiting[running.action.id, part.key] = settlement
            running.action = replace(running.action, settling=True)

    def take(self, process: ReportingProcess) -> None:
        """Take the values in a report. Unknown ids are ignored."""
        for value in process.report.still_free:
            settlement = self._waiting.get((value.id, process.key))
            if settlement is not None and settlement.part.belongs_to(process):
                self._set(settlement, value)

    def gone(self, key: ProcessKey) -> None:
        """Stop waiting for values of a process that has exited."""
        for waiting in [waiting for waiting in self._waiting if waiting[1] == key]:
            self._end(self._waiting[waiting])

    def expire(self, now: float) -> None:
        """Stop waiting for values that are too late."""
        for settlement in [each for each in self._waiting.values() if now >= each.gives_up_seconds]:
            self._end(settlement)

    def _set(self, settlement: _Settlement, value: StillFree) -> None:
        running, lacks_value = settlement.running, settlement.lacks_value
        results = tuple(
            replace(each, still_free_bytes=value.still_free_bytes)
            if each.uuid == value.uuid and lacks_value(each)
            else each
            for each in running.action.results
        )
        running.action = replace(running.action, results=results)
        if not any(map(lacks_value, results)):
            self._end(settlement)

    def _end(self, settlement: _Settlement) -> None:
        running = settlement.running
        del self._waiting[running.action.id, settlement.part.key]
        if not any(action_id == running.action.id for action_id, _ in self._waiting):
            running.action = replace(running.action, settling=False)
        self._changed(running.action)
