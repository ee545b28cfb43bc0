"""The parts of actions that wait until inference engines have started. Used on the event loop only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from gpumem_client.wire.protocol import CommandResult, ReasonCode
from gpumem_exporter.actions.engine_starts import RELEASING, StartGuard, devices_of, refusal, waits
from gpumem_exporter.actions.group import group_step
from gpumem_exporter.actions.lifecycle import CommandPart, PartState, RunningAction, TerminationPart
from gpumem_exporter.actions.model import EngineWait
from gpumem_exporter.actions.registry import ActionRegistry
from gpumem_exporter.actions.results import host_pids
from gpumem_exporter.core.samples import ProcessKey, Snapshot, StartingEngine
from gpumem_exporter.core.store import Store
from gpumem_exporter.errors import GroupIncompleteError

__all__ = ["BlockedParts"]

Part = CommandPart | TerminationPart


class Parts(Protocol):
    """What happens to parts: `actions.dispatcher.Dispatcher`."""

    def wake(self, key: ProcessKey) -> None: ...
    def start_termination(self, running: RunningAction, part: TerminationPart) -> None: ...
    def withdraw(self, running: RunningAction, reason: str, code: ReasonCode) -> None: ...
    def withdraw_part(self, running: RunningAction, part: Part, result: CommandResult) -> None: ...
    def finish_if_complete(self, running: RunningAction) -> None: ...


class BlockedParts:
    """Continues blocked parts, ends them at their deadline, and withdraws commands that an engine start overtakes.

    Args:
        store: has the engines that start.
        actions: has the running actions.
        parts: changes parts.
        unix_offset_seconds: returns the time of the Unix epoch at zero of the store's clock.
        hide_identities: whether the titles of others' engines are hidden from callers without all rights.
    """

    def __init__(
        self,
        store: Store,
        actions: ActionRegistry,
        parts: Parts,
        *,
        unix_offset_seconds: Callable[[], float],
        hide_identities: bool,
    ) -> None:
        self._store = store
        self._actions = actions
        self._parts = parts
        self._unix_offset_seconds = unix_offset_seconds
        self._hide_identities = hide_identities

    def described(
        self, guard: StartGuard, starting: Sequence[StartingEngine], snapshot: Snapshot
    ) -> tuple[EngineWait, ...]:
        """Return engines as the caller of an action sees them."""
        viewer = guard.caller if self._hide_identities else None
        return waits(starting, snapshot, unix_offset_seconds=self._unix_offset_seconds(), viewer=viewer)

    def refusal(self, running: RunningAction, starting: Sequence[StartingEngine], snapshot: Snapshot) -> CommandResult:
        """Return the result of a part that does not run because these engines start."""
        return refusal(running.action.id, self.described(running.guard, starting, snapshot))

    def note(self, running: RunningAction, starting: Sequence[StartingEngine], snapshot: Snapshot) -> None:
        """Show in an action for which engines it waits."""
        deadline_unix_seconds = running.action.created_unix_seconds + running.request.deadline_seconds
        waiting = tuple(
            replace(each, until_unix_seconds=min(each.until_unix_seconds, deadline_unix_seconds))
            for each in self.described(running.guard, starting, snapshot)
        )
        running.action = replace(running.action, waits_for=waiting)

    def review(self, now: float) -> None:
        """Decide again for every part that releases memory; called about once a second, and after each deadline."""
        concerned = [running for running in self._actions if running.action.action in RELEASING]
        snapshot = self._store.snapshot(now) if concerned else None
        for running in concerned:
            if snapshot is not None and (snapshot.starting or running.blocked):
                self._review_action(running, snapshot, now)

    def _review_action(self, running: RunningAction, snapshot: Snapshot, now: float) -> None:
        starting = {id(part): _starts_of(running, part, snapshot) for part in running.parts}
        if running.action.group:
            of_group = tuple(dict.fromkeys(each for found in starting.values() for each in found))
            starting = dict.fromkeys(starting, of_group)
        for part in running.parts:
            found = starting[id(part)]
            # Withdrawing one part of a group ends the others.
            if part.state is PartState.ENDED or not (part.blocked or found):
                continue
            if not found:
                self._unblock(running, part, now)
            elif not part.blocked or now >= part.deadline_seconds:
                self._refuse(running, part, self.refusal(running, found, snapshot))
        if not running.finished.is_set():
            blocked = [each for part in running.blocked for each in starting[id(part)]]
            self.note(running, blocked, snapshot)

    def _refuse(self, running: RunningAction, part: Part, result: CommandResult) -> None:
        if running.action.group:
            self._parts.withdraw(running, result.reason, ReasonCode.ENGINE_STARTING)
        else:
            self._parts.withdraw_part(running, part, result)
        self._parts.finish_if_complete(running)

    def _unblock(self, running: RunningAction, part: Part, now: float) -> None:
        """Continue a part whose engines have started. The parts of a group continue together."""
        if isinstance(part, TerminationPart):
            part.unblock()
            self._parts.start_termination(running, part)
        elif running.action.group:
            self._unblock_group(running, now)
        else:
            part.unblock(part.command)
            self._parts.wake(part.key)

    def _unblock_group(self, running: RunningAction, now: float) -> None:
        """Choose the step of a group again: its ranks have made steps while it was blocked."""
        parts = [part for part in running.commands.values() if part.blocked]
        reported = [self._store.find(part.key) for part in parts]
        ranks = [
            part.selected if process is None else part.selected._replace(process=process)
            for part, process in zip(parts, reported, strict=True)
        ]
        left_seconds = running.started_seconds + running.request.deadline_seconds - now
        try:
            at_step = group_step(replace(running.request, deadline_seconds=left_seconds), ranks, now)
        except GroupIncompleteError as error:
            self._parts.withdraw(running, str(error), ReasonCode.GROUP_INCOMPLETE)
            return
        running.action, running.asked_seconds = replace(running.action, at_step=at_step), now
        for part in parts:
            part.unblock(replace(part.command, at_step=at_step))
            self._parts.wake(part.key)


def _starts_of(running: RunningAction, part: Part, snapshot: Snapshot) -> tuple[StartingEngine, ...]:
    """Return the engines that a part waits for."""
    if isinstance(part, CommandPart):
        return running.guard.waits_for(devices_of(part.selected.process, snapshot), snapshot)
    ended = host_pids([each.target for each in running.terminations])
    return running.guard.waits_for([uuid for uuid, _ in part.target.used_bytes], snapshot, ended)
