"""Delivers actions to the processes that they target, and collects the results.

An action becomes one command for each process. A command stays pending until its result has come, its deadline has
passed, or its process has exited. If a reply gets lost, the command is handed out again with the next report; a
reporter that gets a command twice answers with the first result. A command is bound to the reporter (pid, namespace,
start time and session): no later process with the same pid gets it, and no other program in the same process.

A process reports which commands it holds for the end of a step or for a rest. Such a command is not handed out again;
it is recalled if nothing here waits for it any more. A group is all ranks or none, as far as that is possible without
a barrier: its step is some seconds ahead, and if a rank does not have its command well before, all ranks are told to
forget theirs.

The states of actions and of their parts are in `lifecycle`. For the event loop only: not thread-safe.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Hashable
from dataclasses import dataclass, replace
from typing import Any

from gpumem_exporter.actions.caller import Caller
from gpumem_exporter.actions.group import GROUP_LEAD_SECONDS, Chosen, group_of, group_step, lack, who
from gpumem_exporter.actions.held_polls import HeldPolls
from gpumem_exporter.actions.history import ActionHistory
from gpumem_exporter.actions.lifecycle import ActionState, CommandPart, PartState, RunningAction, TerminationPart
from gpumem_exporter.actions.limits import RateLimits
from gpumem_exporter.actions.model import Action, ActionRequest, ListedProcess, SubmittedAction, Target, gpu_labels
from gpumem_exporter.actions.results import TerminationTarget, dry_rows, rows, termination_rows, termination_target
from gpumem_exporter.actions.terminate import Terminator
from gpumem_exporter.core.samples import ProcessKey, ReportingProcess, Snapshot
from gpumem_exporter.core.store import Store
from gpumem_exporter.errors import ActionNotAllowedError, IdempotencyConflictError, TargetNotFoundError
from gpumem_exporter.wire.protocol import Command, CommandResult

__all__ = ["ANSWER_GRACE_SECONDS", "GROUP_ANSWER_SECONDS", "GROUP_LEAD_SECONDS", "Dispatcher"]

ANSWER_GRACE_SECONDS = 10.0
"""A delivered command may still be answered this long after its deadline: it may have started just in time."""
GROUP_ANSWER_SECONDS = 2.0
"""A rank that has not reported by then that it holds its command is not waited for."""
_NOT_ALL = "not every rank of the group could take part"
_DEVICE_ACTIONS = ("reset_peak", "set_memory_fraction")
"""Actions on the targeted devices. All other actions concern every device of a process."""


@dataclass(frozen=True, slots=True)
class _Selection:
    """What a request selects at one moment."""

    snapshot: Snapshot
    processes: tuple[Chosen, ...]
    listed: tuple[ListedProcess, ...]
    """Processes that the driver lists and that do not report; only `terminate` reaches them."""
    at_step: int | None
    """The step after which a group acts."""


class Dispatcher:
    """Takes actions, hands out commands, collects results.

    Args:
        store: Where targets are looked up.
        allowed: The actions of `--action.allow`.
        clock: Monotonic seconds.
        wall_clock: Seconds since the epoch.
        on_finished: Called once with each action when it has ended.
        terminator: Ends processes.
        limits: Limits on the number of actions.
        before_release: Awaited for each new action before a process gets a command of it, so that an action is
            recorded before it is done.
        kept_actions: The number of finished actions that are remembered.
    """

    def __init__(
        self,
        store: Store,
        *,
        allowed: frozenset[str],
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        on_finished: Callable[[Action], None],
        terminator: Terminator,
        limits: RateLimits,
        before_release: Callable[[SubmittedAction], Awaitable[None]] | None = None,
        kept_actions: int = 1000,
    ) -> None:
        self._store = store
        self._allowed = allowed
        self._clock = clock
        self._wall_clock = wall_clock
        self._on_finished = on_finished
        self._terminator = terminator
        self._limits = limits
        self._before_release = before_release
        self._tasks: set[asyncio.Task[None]] = set()
        self._running: dict[str, RunningAction] = {}
        self._history = ActionHistory(kept_actions)
        self._polls = HeldPolls()

    # New actions

    def submit(self, request: ActionRequest, *, requested_by: Caller, idempotency_key: str | None = None) -> Action:
        """Start an action; a dry run, or an action that no process can do, ends at once.

        Raises:
            ActionNotAllowedError: `--action.allow` does not have the action.
            TargetNotFoundError: No reporting process matches.
            GroupIncompleteError: A rank of the group cannot take part.
            TooManyActionsError: The caller, or a process, has reached its limit.
            IdempotencyConflictError: The key was used for another request.
        """
        earlier = self._earlier(request, idempotency_key)
        if earlier is not None:
            return earlier
        self._require_allowed(request.action)
        selection = self._select(request)
        if not request.dry_run:
            self._take_from_limits(selection, requested_by)
        running = self._open(request, selection, requested_by, idempotency_key)
        self._create_parts(running, request, selection)
        self._finish_if_complete(running)
        if not running.released.is_set() and self._before_release is not None:
            submitted = SubmittedAction(running.action, request, idempotency_key, _identities(selection))
            self._spawn(self._release_after(running, self._before_release(submitted)))
        return running.action

    def _earlier(self, request: ActionRequest, key: str | None) -> Action | None:
        """The action that the same request with the same key has started, if it is still known."""
        found = self._history.find_key(key) if key is not None else None
        if found is None:
            return None
        first, action_id = found
        known = self.get(action_id)
        if known is not None and first != request:
            raise IdempotencyConflictError(f"Idempotency-Key {key!r} was used for another request (action {action_id})")
        return known

    def _require_allowed(self, action: str) -> None:
        if action not in self._allowed:
            allowed = ", ".join(sorted(self._allowed)) or "none"
            raise ActionNotAllowedError(f"{action} is not allowed here; --action.allow has {allowed}")

    def _select(self, request: ActionRequest) -> _Selection:
        snapshot = self._store.snapshot(self._clock())
        processes = list(request.target.select(snapshot))
        listed = tuple(request.target.select_listed(snapshot)) if request.action == "terminate" else ()
        if not processes and not listed:
            raise TargetNotFoundError(request.target.mismatch(snapshot))
        at_step = None
        if request.group:
            processes = group_of(processes, snapshot)
            at_step = group_step(request, processes, self._clock())
        return _Selection(snapshot, tuple(processes), listed, at_step)

    def _take_from_limits(self, selection: _Selection, requested_by: Caller) -> None:
        names: list[tuple[Hashable, str]] = [
            (process.key, who(pid, process)) for pid, process, _ in selection.processes
        ]
        names += [(listed.pid, f"pid {listed.pid}") for listed in selection.listed]
        self._limits.take(requested_by.share, names)

    def _open(
        self, request: ActionRequest, selection: _Selection, requested_by: Caller, idempotency_key: str | None
    ) -> RunningAction:
        action = Action(
            id=uuid.uuid4().hex,
            action=request.action,
            state=ActionState.QUEUED.value,
            requested_by=str(requested_by),
            created_unix_seconds=self._wall_clock(),
            target=request.target,
            mode=request.mode,
            group=request.group,
            at_step=selection.at_step,
            dry_run=request.dry_run,
            reason=request.reason,
        )
        if idempotency_key is not None:
            self._history.add_key(idempotency_key, request, action.id)
        running = self._running[action.id] = RunningAction(action, self._clock())
        if self._before_release is None or request.dry_run:
            running.released.set()
        return running

    def _create_parts(self, running: RunningAction, request: ActionRequest, selection: _Selection) -> None:
        for chosen in selection.processes:
            if request.action == "terminate":
                pid, process, _ = chosen
                self._terminate(running, termination_target(pid, process, selection.snapshot))
            else:
                self._order(running, request, chosen, gpu_labels(selection.snapshot))
        for listed in selection.listed:
            pid, ticks = listed.pid, listed.start_time_ticks
            self._terminate(running, TerminationTarget(pid, "", "", pid, ticks, listed.used_bytes))

    def _order(self, running: RunningAction, request: ActionRequest, chosen: Chosen, gpus: dict[str, str]) -> None:
        """Give a process its part, or the result of a part that it cannot have."""
        pid, process, samples = chosen
        every_device = request.action not in _DEVICE_ACTIONS or not (request.target.gpu or request.target.uuid)
        if every_device:
            samples = process.report.devices
        if request.dry_run:
            running.add(dry_rows(pid, process, samples, request, gpus))
            return
        lacking = lack(process, request)
        if lacking:
            running.add(rows(pid, process, samples, CommandResult(running.action.id, "unsupported", lacking), gpus))
            return
        command = Command(
            id=running.action.id,
            action=request.action,
            deadline_seconds=request.deadline_seconds,
            # No names of devices: the process may use another device since its report.
            uuids=() if every_device else tuple(sample.uuid for sample in samples),
            collect_garbage=request.collect_garbage,
            mode=request.mode,
            at_step=running.action.at_step,
            fraction=request.fraction,
            force=request.force,
        )
        deadline = running.started_seconds + request.deadline_seconds
        running.commands[process.key] = CommandPart(command, pid, process, samples, deadline)
        if running.released.is_set():
            self._polls.wake(process.key)

    def _terminate(self, running: RunningAction, target: TerminationTarget) -> None:
        """Start to end a process, unless the terminator objects."""
        objection = self._terminator.objection(target.host_pid, target.start_time_ticks)
        if objection or target.host_pid is None:
            running.add(termination_rows(target, CommandResult("", "refused", objection), self._gpu_labels()))
        elif running.action.dry_run:
            running.add(termination_rows(target, CommandResult("", "done", "would be ended"), self._gpu_labels()))
        else:
            part = TerminationPart(target)
            running.terminations.append(part)
            running.start()
            self._spawn(self._run_termination(running, part, target.host_pid))

    async def _run_termination(self, running: RunningAction, part: TerminationPart, host_pid: int) -> None:
        await running.released.wait()
        try:
            if running.withdrawn:
                result = CommandResult(running.action.id, "refused", running.withdrawn)
            else:
                result = await self._terminator.end(running.action.id, host_pid, part.target.start_time_ticks)
        except Exception as error:  # noqa: BLE001 - the action must end, whatever the error is
            result = CommandResult(running.action.id, "failed", f"{type(error).__name__}: {error}"[:500])
        part.end()
        running.terminations.remove(part)
        running.add(termination_rows(part.target, result, self._gpu_labels()))
        self._finish_if_complete(running)

    async def _release_after(self, running: RunningAction, recorded: Awaitable[None]) -> None:
        try:
            await recorded
        finally:
            running.released.set()
            for key in running.commands:
                self._polls.wake(key)

    # Reporters

    async def commands(self, process: ReportingProcess, hold_seconds: float) -> tuple[Command, ...]:
        """Return the commands for a process: now, as soon as there is one, or none after `hold_seconds`.

        Returns early, with none, when a command is to be forgotten: see `cancelled`. A second call for the same
        process ends the first one: only one of them can have a client. Cancelling the call is safe.
        """
        pending = self._pending(process)
        if not pending and hold_seconds > 0:
            await self._polls.wait(process.key, hold_seconds)
            pending = self._pending(process)
        return tuple(self._deliver(running, part) for running, part in pending)

    def cancelled(self, process: ReportingProcess) -> tuple[str, ...]:
        """Return the ids of the commands that a process holds and is to forget."""
        return tuple(
            command_id
            for command_id in process.report.waiting
            if (part := self._part(command_id, process)) is None or part.recalled
        )

    def take_results(self, process: ReportingProcess) -> None:
        """Take what a report says of commands; results of unknown or finished ones are ignored."""
        for command_id in process.report.waiting:
            part = self._part(command_id, process)
            if part is not None:
                part.hold()
        for result in process.report.results:
            part = self._part(result.id, process)
            if part is not None:
                running = self._running[result.id]
                if part.recalled and result.outcome == "refused" and result.reason.startswith("cancelled"):
                    result = replace(result, reason=running.withdrawn)
                self._end_part(running, part, result, process)

    def process_gone(self, key: ProcessKey, reason: str) -> None:
        """End the parts of a process that has exited."""
        self._polls.wake(key)
        for running in list(self._running.values()):
            part = running.commands.get(key)
            if part is not None:
                self._give_up(running, part, "gone", reason)

    def _pending(self, process: ReportingProcess) -> list[tuple[RunningAction, CommandPart]]:
        now = self._clock()
        return [
            (running, part)
            for running in self._running.values()
            if running.released.is_set()
            and (part := self._part(running.action.id, process)) is not None
            and part.on_the_way
            and now < part.deadline_seconds
        ]

    def _deliver(self, running: RunningAction, part: CommandPart) -> Command:
        part.deliver()
        running.start()
        return replace(part.command, deadline_seconds=max(0.0, part.deadline_seconds - self._clock()))

    def _part(self, action_id: str, process: ReportingProcess) -> CommandPart | None:
        running = self._running.get(action_id)
        part = running.commands.get(process.key) if running is not None else None
        return part if part is not None and _same_program(part.process, process) else None

    # Ends

    def cancel(self, action_id: str, *, requested_by: Caller) -> Action | None:
        """Withdraw the parts of an action that have not started; return the action, or None if it is not known.

        A process that holds its command for a step or a rest forgets it. A command that was handed out to run now may
        run, and a process that is being terminated is terminated. The results show which is which.
        """
        running = self._running.get(action_id)
        if running is not None:
            self._withdraw(running, f"cancelled by {requested_by}")
        return self.get(action_id)

    def expire(self) -> None:
        """End the parts that are too late; called about once a second."""
        now = self._clock()
        for running in list(self._running.values()):
            group_is_late = running.action.group and now >= running.started_seconds + GROUP_ANSWER_SECONDS
            for part in list(running.commands.values()):
                if group_is_late and not part.held:
                    late = "the process did not ask for work in time for its group"
                elif part.state is PartState.WAITING and now >= part.deadline_seconds:
                    late = "the process did not ask for work before the deadline"
                elif now >= part.deadline_seconds + ANSWER_GRACE_SECONDS:
                    late = "delivered, but no answer came in time; it may still be under way"
                else:
                    continue
                self._give_up(running, part, "expired", late)

    def _withdraw(self, running: RunningAction, reason: str) -> None:
        """Start no further part: recall the commands that were handed out, and refuse the others."""
        if running.withdrawn:
            return
        running.withdrawn = reason
        for key, part in list(running.commands.items()):
            if part.state is PartState.WAITING:
                self._give_up(running, part, "refused", reason)
            else:
                part.recall()
                self._polls.wake(key)

    def _give_up(self, running: RunningAction, part: CommandPart, outcome: str, reason: str) -> None:
        if running.commands.get(part.process.key) is part:  # else it ended together with another one of its group
            self._end_part(running, part, CommandResult(running.action.id, outcome, reason), part.process)

    def _end_part(
        self, running: RunningAction, part: CommandPart, result: CommandResult, process: ReportingProcess
    ) -> None:
        del running.commands[process.key]
        part.end()
        running.add(rows(part.pid, process, part.samples, result, self._gpu_labels()))
        if running.action.group and result.outcome != "done":
            self._withdraw(running, _NOT_ALL)
        self._finish_if_complete(running)

    def _finish_if_complete(self, running: RunningAction) -> None:
        if running.complete and self._running.pop(running.action.id, None) is not None:
            action = running.finish(self._clock())
            self._history.add(action)
            self._on_finished(action)

    # Questions

    async def wait(self, action_id: str, timeout_seconds: float) -> Action:
        """Return the action when it has ended, or as it is after the timeout.

        Raises:
            KeyError: There is no such action.
        """
        running = self._running.get(action_id)
        if running is not None and timeout_seconds > 0:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(running.finished.wait(), timeout_seconds)
        action = self.get(action_id)
        if action is None:
            raise KeyError(action_id)
        return action

    def get(self, action_id: str) -> Action | None:
        """Return an action as it is now; None if it is not or no longer known."""
        running = self._running.get(action_id)
        return running.action if running is not None else self._history.get(action_id)

    def recent(self) -> tuple[Action, ...]:
        """Return all remembered actions, newest first."""
        actions = [*self._history.all(), *(running.action for running in self._running.values())]
        return tuple(sorted(actions, key=lambda action: action.created_unix_seconds, reverse=True))

    def under_way(self) -> set[ProcessKey]:
        """Return the processes that have a command, or are to get one."""
        return {key for running in self._running.values() for key in running.commands}

    def held(self) -> int:
        """Return the number of requests that are held open."""
        return len(self._polls)

    # Actions without a process here

    def note(self, action: str, *, requested_by: Caller, reason: str) -> Action:
        """Record an action that the exporter performs itself, without a target process."""
        noted = Action(
            id=uuid.uuid4().hex,
            action=action,
            state=ActionState.DONE.value,
            requested_by=str(requested_by),
            created_unix_seconds=self._wall_clock(),
            target=Target(),
            reason=reason,
        )
        self._history.add(noted)
        return noted

    def recall(self, action: Action, submitted: SubmittedAction | None) -> None:
        """Remember an action of an earlier run of the exporter, and the request that started it.

        Called with the newest first. An action of this run is never dropped for one of an earlier run.
        """
        if self.get(action.id) is not None or not self._history.add_older(action):
            return
        if submitted is not None and submitted.idempotency_key is not None:
            self._history.add_older_key(submitted.idempotency_key, submitted.request, action.id)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _gpu_labels(self) -> dict[str, str]:
        return self._store.gpu_labels(self._clock())


def _identities(selection: _Selection) -> tuple[tuple[int | str, str, str], ...]:
    """Name, workload and rank of each selected process."""
    reporting = [(pid, process.report.process) for pid, process, _ in selection.processes]
    return (
        *((pid, identity.workload, identity.rank) for pid, identity in reporting),
        *((listed.pid, "", "") for listed in selection.listed),
    )


def _same_program(one: ReportingProcess, other: ReportingProcess) -> bool:
    """Whether two reports are of the same process and the same program in it: after an exec the session is another."""
    a, b = one.report.process, other.report.process
    return (a.start_time_ticks, a.session) == (b.start_time_ticks, b.session)
