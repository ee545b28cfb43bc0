"""What actions ask of inference engines. The feature `engines` answers; without it, no engine is known."""
# ruff: noqa: ARG002 - the arguments are for the feature

from __future__ import annotations

from collections.abc import Hashable, Mapping
from collections.abc import Set as AbstractSet

from gpumem_client.wire.protocol import CommandResult
from gpumem_client.wire.reason_codes import ReasonCode
from gpumem_exporter.actions.action import EngineWait
from gpumem_exporter.actions.action_options import ActionRequest
from gpumem_exporter.actions.lifecycle import Part, RunningAction
from gpumem_exporter.actions.results import DriverValues
from gpumem_exporter.actions.selection import SelectedProcess
from gpumem_exporter.core.caller import Caller
from gpumem_exporter.core.samples import Snapshot

MIN_IDLE_SECONDS = 120.0
"""Policies and alerts let no engine sleep that had a request in this time, or whose last request is not known."""


class Engines:
    """Answers the questions of the dispatcher and of policies. Used on the event loop only."""

    def waits_for(
        self,
        request: ActionRequest,
        caller: Caller,
        one: SelectedProcess,
        outside: AbstractSet[int | None],
        snapshot: Snapshot,
    ) -> tuple[EngineWait, ...]:
        """Return the engines that must have started before an action may run on a process: they start on its devices.

        `outside` are the host pids of all processes on which the exporter itself performs the action. Empty if the
        caller may force the action.
        """
        return ()

    def refusals(self, running: RunningAction) -> Mapping[Hashable, CommandResult | None]:
        """Return the processes that take part in an action on engines, each with the result if it must not run."""
        reason = "this exporter has no support for inference engines"
        return dict.fromkeys(running.parts, CommandResult("", "unsupported", reason, ReasonCode.NO_ENGINE))

    def settle(self, running: RunningAction) -> None:
        """Measure after the settling time how much of what the engines released is still free, if that is requested."""

    # The rest is called only for a part that `refusals` permits.

    def is_read_for(self, part: Part) -> bool:
        """Return whether the driver was read since a process asked for its command, or has not answered in time."""
        raise NotImplementedError

    def deliver(self, part: Part) -> CommandResult | None:
        """Check a command right before a process gets it for the first time; return the result if it must not run."""
        raise NotImplementedError

    async def measure(self, part: Part) -> DriverValues:
        """Read the driver, and return what it lists for a process that has run its command."""
        raise NotImplementedError

    async def act(self, part: Part) -> tuple[CommandResult, DriverValues | None]:
        """Let the engine of a process release or resume its memory. Return the result, and what the driver lists."""
        raise NotImplementedError
