"""What stays free of the memory that a clear has released."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace

from gpumem_exporter.actions.action import Action, ActionResult
from gpumem_exporter.actions.lifecycle import Part
from gpumem_exporter.core.samples import ProcessKey, ReportingProcess

SETTLING_GRACE_SECONDS = 5.0
"""A process's value may arrive this long after the settling time, and two steps later: steps delay its samples."""


class Settlements:
    """Completes the results of done clears with what stayed free, as the processes report it after the settling time.

    `changed` is called with each action that has changed.
    """

    def __init__(self, changed: Callable[[Action], None]) -> None:
        self._changed = changed
        self._waiting: dict[tuple[str, Hashable], Part] = {}

    def start(self, part: Part, now: float) -> None:
        """Wait for values of a process that has done a clear, if it has released memory."""
        late_seconds = SETTLING_GRACE_SECONDS + 2 * (part.target.process.report.step_seconds or 0.0)
        part.gives_up_seconds = now + part.running.request.settle_seconds + late_seconds
        if any(_lacks_value(part, result) for result in part.running.action.results):
            self._waiting[part.running.action.id, part.key] = part
            part.running.action = replace(part.running.action, settling=True)

    def take(self, process: ReportingProcess) -> None:
        """Take the values in a report. Unknown ids are ignored."""
        for value in process.report.still_free:
            part = self._waiting.get((value.id, process.key))
            if part is None or not part.belongs_to(process):
                continue
            results = tuple(
                replace(each, still_free_bytes=value.still_free_bytes)
                if each.uuid == value.uuid and _lacks_value(part, each)
                else each
                for each in part.running.action.results
            )
            part.running.action = replace(part.running.action, results=results)
            if not any(_lacks_value(part, result) for result in results):
                self._end(part)

    def expire(self, now: float, gone: ProcessKey | None = None) -> None:
        """Stop waiting for values that are too late, or of a process that is gone."""
        for part in tuple(self._waiting.values()):
            if now >= part.gives_up_seconds or part.key == gone:
                self._end(part)

    def _end(self, part: Part) -> None:
        running = part.running
        del self._waiting[part.running.action.id, part.key]
        if not any(other.running is running for other in self._waiting.values()):
            running.action = replace(running.action, settling=False)
        self._changed(running.action)


def _lacks_value(part: Part, result: ActionResult) -> bool:
    """Return whether a result is of this process, and its value has not arrived."""
    return result.pid == part.target.pid and result.freed_bytes is not None and result.still_free_bytes is None
