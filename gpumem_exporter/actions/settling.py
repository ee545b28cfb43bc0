"""Completes the results of done clears with what stays free, as the processes report it after the settling time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from gpumem_client.wire.protocol import CommandResult, StillFree
from gpumem_exporter.actions.action import Action
from gpumem_exporter.actions.lifecycle import CommandPart, RunningAction
from gpumem_exporter.core.samples import ProcessKey, ReportingProcess

SETTLING_GRACE_SECONDS = 5.0
"""A process's value may arrive this long after the settling time, and two steps later: steps delay its samples."""


@dataclass(slots=True)
class _Settlement:
    """One process's part in a clear that is done, until the value of each device has arrived."""

    running: RunningAction
    part: CommandPart
    uuids: set[str]
    """The devices without a value."""
    gives_up_seconds: float


class Settlements:
    """Completes the results of done clears with what stayed free, as the processes report it after the settling time.

    `changed` is called with each action that has changed.
    """

    def __init__(self, changed: Callable[[Action], None]) -> None:
        self._changed = changed
        self._waiting: dict[tuple[str, ProcessKey], _Settlement] = {}

    def start(self, running: RunningAction, part: CommandPart, result: CommandResult, now: float) -> None:
        """Wait for values of a process that has done a clear, if it has released memory."""
        uuids = {device.uuid for device in result.devices if device.freed_bytes is not None}
        if uuids:
            late_seconds = SETTLING_GRACE_SECONDS + 2 * (part.target.process.report.step_seconds or 0.0)
            settlement = _Settlement(running, part, uuids, now + part.command.settle_seconds + late_seconds)
            self._waiting[running.action.id, part.key] = settlement
            running.action = replace(running.action, settling=True)

    def take(self, process: ReportingProcess) -> None:
        """Take the values in a report. Unknown ids are ignored."""
        for value in process.report.still_free:
            settlement = self._waiting.get((value.id, process.key))
            if settlement is not None and settlement.part.belongs_to(process) and value.uuid in settlement.uuids:
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
        running, pid = settlement.running, settlement.part.target.pid
        results = tuple(
            replace(result, still_free_bytes=value.still_free_bytes)
            if (result.pid, result.uuid) == (pid, value.uuid)
            else result
            for result in running.action.results
        )
        running.action = replace(running.action, results=results)
        settlement.uuids.discard(value.uuid)
        if not settlement.uuids:
            self._end(settlement)

    def _end(self, settlement: _Settlement) -> None:
        running = settlement.running
        del self._waiting[running.action.id, settlement.part.key]
        if not any(action_id == running.action.id for action_id, _ in self._waiting):
            running.action = replace(running.action, settling=False)
        self._changed(running.action)
