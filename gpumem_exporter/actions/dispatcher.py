"""Delivers actions to the processes that they target, and collects the results.

The path of an action: `submit` creates a part for each process, `commands` delivers its command with the reply to the
process's report, `take_results` takes the result from a later report, and the last result finishes the action. The
states of actions and of their parts are in `lifecycle`. Used on the event loop only.

A command is bound to one process and one reporter session in it. No later process with the same pid gets it, and no
other program in the same process.

A group acts on all ranks or on none, as far as that is possible without a barrier. Its step is some seconds ahead. If a
rank does not have its command in time, the dispatcher recalls the commands of all ranks.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Sequence
from dataclasses import replace
from typing import Any

from gpumem_client.wire.protocol import ENGINE_ACTIONS, MAX_COMMANDS, Command, CommandResult
from gpumem_client.wire.reason_codes import ReasonCode
from gpumem_exporter.actions.action import Action, SubmittedAction
from gpumem_exporter.actions.action_options import (
    ANSWER_GRACE_SECONDS,
    DEVICE_ACTIONS,
    ENGINE_ANSWER_SECONDS,
    OUTSIDE_ACTIONS,
    ActionRequest,
    Target,
)
from gpumem_exporter.actions.by_exporter import OutsideActs
from gpumem_exporter.actions.engine_starts import EngineStarts, starts_for
from gpumem_exporter.actions.engines import EngineMemory
from gpumem_exporter.actions.kinds import KINDS
from gpumem_exporter.actions.lifecycle import (
    ActionRegistry,
    ActionState,
    CommandPart,
    OutsidePart,
    Part,
    PartState,
    RunningAction,
)
from gpumem_exporter.actions.rate_limits import RateLimits
from gpumem_exporter.actions.results import (
    DriverValues,
    command_results,
    dry_run_results,
    expected_refusal,
    outside_results,
    unsupported,
)
from gpumem_exporter.actions.selection import OutsideTarget, SelectedProcess, select
from gpumem_exporter.actions.settling import Settlements
from gpumem_exporter.actions.terminate import Terminator
from gpumem_exporter.actions.timing import Turn, plan, step_of_group
from gpumem_exporter.core.caller import Caller
from gpumem_exporter.core.samples import JobKey, ProcessKey, ReportingProcess, Snapshot, StartingEngine
from gpumem_exporter.core.store import Store

SILENT_GRACE_SECONDS = 0.75
"""The time after a deadline for the result of a process that has not reported since: it may be on the way."""
GROUP_ANSWER_SECONDS = 2.0
"""A rank must report within this time that it keeps its command; otherwise the group does not act."""


class Dispatcher:
    """Accepts actions, delivers commands, collects results.

    A process gets a command of a new action after `record` has stored the action. `wake` ends the held requests that
    wait for a process or for the id of an action. `call_later`, by default of the event loop, lets actions expire in
    time. With `hide_identities`, errors and results show callers without all rights nothing of others' processes.
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
        record: Callable[[SubmittedAction], Awaitable[None]] | None = None,
        wake: Callable[[Hashable], None] = lambda _key: None,
        call_later: Callable[[float, Callable[[], None]], object] = lambda seconds, function: (
            asyncio.get_running_loop().call_later(seconds, function)
        ),
        kept_actions: int = 1000,
        hide_identities: bool = False,
        poll_soon: Callable[[], None] = lambda: None,
    ) -> None:
        self.wake = wake
        self._store = store
        self._poll_soon = poll_soon
        self._allowed = allowed
        self._clock = clock
        self._wall_clock = wall_clock
        self._on_finished = on_finished
        self._limits = limits
        self._record = record
        self._call_later = call_later
        self._hide_identities = hide_identities
        self._actions = ActionRegistry(kept_actions)
        self._settlements = Settlements(self._actions.replace)
        self.engines = EngineMemory(store, self._actions, clock=clock, poll_soon=poll_soon, spawn=self._spawn)
        self._tasks: set[asyncio.Task[None]] = set()
        self.outside = OutsideActs(
            terminator, self.engines, clock=clock, spawn=self._spawn, ended=self.finish_if_complete
        )
        self._engine_starts = EngineStarts(
            store, self._actions, lambda: wall_clock() - clock(), hide_identities=hide_identities
        )

    # 1. A request becomes an action with a part for each process.

    def submit(
        self,
        request: ActionRequest,
        *,
        requested_by: Caller,
        idempotency_key: str | None = None,
        unlisted: bool = False,
    ) -> Action:
        """Start an action. A dry run, or an action that no process supports, ends at once.

        An `unlisted` one has no record: see `Action.unlisted`.

        Raises:
            ActionNotAllowedError: `--action.allow` does not include the action.
            ActionForbiddenError: the caller may not request the action, or not on these processes, or not with `force`
                while the engine of another user starts there.
            TargetNotFoundError: no process matches the names of the target.
            TooManyActionsError: the caller, or a process, has reached its limit.
            IdempotencyConflictError: the caller used the key for another request.
        """
        # Before all checks: the repetition of a request gets its action, whatever has changed since.
        if idempotency_key is not None:
            earlier = self._actions.with_key(requested_by.key, idempotency_key, request)
            if earlier is not None:
                return earlier
        requested_by.require_permission(request.action, self._allowed, force=request.force)
        action = Action.of(request, requested_by, self._wall_clock(), unlisted=unlisted)
        share = action.share

        now = self._clock()
        snapshot = self._store.snapshot(now)
        selection = select(request, requested_by, snapshot, hide_identities=self._hide_identities)
        turns: dict[int | str, Turn] = {}
        if request.action not in OUTSIDE_ACTIONS:
            planned = plan(request, selection.reporting, snapshot, now)
            selection = replace(selection, reporting=tuple(one for one, _ in planned))
            turns = {one.pid: turn for one, turn in planned}
        commanded, targets = selection.commanded(request.action), selection.outside_targets(request.action)
        facts = selection.facts(request)
        # A dry run reaches no process, so it counts for its caller only.
        limited = [] if request.dry_run else selection.limit_keys()
        identities = tuple(selection.identities())
        starting = self._engine_starts.admit(request, requested_by, selection) if snapshot.starting else ()
        if not request.dry_run:
            self._actions.require_room(share, len(selection.reporting))
        # After all checks: an action that is refused does not count.
        self._limits.take(share, limited, per_process=KINDS[request.action].per_minute)

        own_turn = Turn(request.mode, request.deadline_seconds)
        deadline_seconds = max((turn.deadline_seconds for turn in turns.values()), default=request.deadline_seconds)
        steps = {turn.group: turn.at_step for turn in turns.values() if turn.group is not None}
        at_step = next(iter(steps.values())) if len(steps) == 1 else None
        action = replace(action, deadline_seconds=deadline_seconds, group=bool(steps), at_step=at_step)
        running = RunningAction(action, now, request, requested_by, facts)
        if not request.dry_run:
            profile_seconds = request.duration_seconds + request.search_seconds
            self._call_later(deadline_seconds + profile_seconds + SILENT_GRACE_SECONDS, self.expire)
        wakes: Counter[str] = Counter()
        its_starts: dict[int | str, tuple[StartingEngine, ...]] = {}
        of_group: dict[JobKey | None, list[StartingEngine]] = {}
        for selected in commanded if starting else ():
            its = its_starts[selected.pid] = starts_for(request, requested_by, selected, (), snapshot)
            of_group.setdefault(turns.get(selected.pid, own_turn).group, []).extend(its)
        for selected in commanded:
            turn = turns.get(selected.pid, own_turn)
            # A group waits as a whole.
            its = its_starts.get(selected.pid, ()) if turn.group is None else tuple(of_group.get(turn.group, ()))
            self._add_command(running, selected, turn, its, snapshot, wakes)
        running.show_parts()
        if request.action in ENGINE_ACTIONS:
            targets = self.engines.engines_among(targets, len(commanded))
        for target in targets:
            its = starts_for(request, requested_by, target, targets, snapshot) if starting else ()
            self._add_outside(running, target, its, snapshot, wakes)
        if running.blocked or any(each.reason_code == ReasonCode.ENGINE_STARTING for each in running.action.results):
            self._engine_starts.show(running, starting, snapshot)

        self._actions.start(running, request, idempotency_key)
        if running.complete:
            self.finish_if_complete(running)
        if self._record is None or request.dry_run or unlisted:
            running.offer(self.wake, now)
        else:
            submitted = SubmittedAction(running.action, request, idempotency_key, identities)
            self._spawn(self._offer_once(running, self._record(submitted)))
        return running.action

    def _add_command(
        self,
        running: RunningAction,
        selected: SelectedProcess,
        turn: Turn,
        starting: Sequence[StartingEngine],
        snapshot: Snapshot,
        wakes: Counter[str],
    ) -> None:
        """Give a process its command, or the result if the request has no effect there."""
        request = running.request
        every_device = request.action not in DEVICE_ACTIONS or not (request.target.gpu or request.target.uuid)
        if every_device:
            selected = selected._replace(samples=selected.process.report.devices)
        result = unsupported(selected.process, request, turn.mode)
        if result is None and turn.obstacle and turn.mode == "step":
            reason = f"{turn.obstacle}; use mode idle, or now"
            result = CommandResult("", "refused", reason, ReasonCode.GROUP_INCOMPLETE)
        if result is None and request.dry_run:
            result = expected_refusal(selected, request, running.facts)
        if result is None and request.action in ENGINE_ACTIONS:
            result = self.engines.refusal(running, selected.process, wakes)
        if result is None and request.dry_run and starting:
            result = self._engine_starts.refusal(running, starting, snapshot)
        if result is not None or request.dry_run:
            expected = dry_run_results(selected, request, running.facts, turn.obstacle)
            results = expected if result is None else command_results(selected, result, running.facts)
            running.add(results, turn.mode, turn.at_step)
            return
        # No uuids for every device: the process may use another device since its report.
        uuids = () if every_device else tuple(sample.uuid for sample in selected.samples)
        command = CommandPart.command_of(running.action, request, turn, uuids)
        state = PartState.BLOCKED if starting else PartState.WAITING
        deadline_seconds = running.started_seconds + turn.deadline_seconds
        part = CommandPart(command, selected, deadline_seconds, state, group=turn.group)
        running.commands[part.key] = part

    def _add_outside(
        self,
        running: RunningAction,
        target: OutsideTarget,
        starting: Sequence[StartingEngine],
        snapshot: Snapshot,
        wakes: Counter[str],
    ) -> None:
        """Let the exporter act on a process, or add the result if it must not."""
        result = self.outside.refusal(running, target, wakes)
        if result is None and running.action.dry_run:
            waits = bool(starting)
            result = (
                self._engine_starts.refusal(running, starting, snapshot) if waits else self.outside.expected(running)
            )
        if result is not None:
            running.add(outside_results(target, result, running.facts, running.request))
            return
        part = OutsidePart(running.action.id, target, running.started_seconds + running.request.deadline_seconds)
        part.state = PartState.BLOCKED if starting else PartState.ACTING
        running.outside.append(part)
        if not starting:
            self.outside.start(running, part)

    async def _offer_once(self, running: RunningAction, recorded: Awaitable[None]) -> None:
        try:
            await recorded
        finally:
            now = self._clock()
            for group, parts in running.groups.items():
                if not any(part.blocked for part in parts):
                    self._choose_step(running, group, now)
            running.offer(self.wake, now)

    def _choose_step(self, running: RunningAction, group: JobKey, now: float) -> bool:
        """Choose the step of a group again; withdraw the group and return False if no step is possible.

        Its ranks have made steps since the request: the step that was chosen may have passed.
        """
        parts = running.groups[group]
        reported = [(part, self._store.find(part.key)) for part in parts]
        ranks = [part.selected._replace(process=process or part.selected.process) for part, process in reported]
        at_step, obstacle = step_of_group(ranks, running.request, parts[0].deadline_seconds - now, now)
        if at_step is None:
            self._withdraw_group(running, group, obstacle, ReasonCode.GROUP_INCOMPLETE)
            return False
        for part in parts:
            part.command = replace(part.command, at_step=at_step)
        if running.action.at_step is not None:
            running.action = replace(running.action, at_step=at_step)
        running.show_parts()
        return True

    # 2. A reporter receives its commands.

    def commands(self, process: ReportingProcess) -> tuple[Command, ...]:
        """Return the commands for a process, which count as delivered."""
        # Until the process reports that it keeps a command, each reply has it: a reply may get lost. A reporter that
        # gets a command twice repeats the first result.
        now = self._clock()
        pending = [
            (running, part)
            for running in self._actions.running.values()
            if running.recorded.is_set()
            and (part := running.commands.get(process.key)) is not None
            and part.belongs_to(process)
            and part.on_the_way
            and now < part.deadline_seconds
        ][:MAX_COMMANDS]
        delivered = [part for running, part in pending if self._deliver(running, part, process, now)]
        # A wait for an idle engine may end before the action's deadline.
        return tuple(
            [
                replace(part.command, deadline_seconds=min(part.command.deadline_seconds, part.deadline_seconds - now))
                for part in delivered
            ]
        )

    def _deliver(self, running: RunningAction, part: CommandPart, process: ReportingProcess, now: float) -> bool:
        """Record that a process gets its command; return False if it does not."""
        if part.command.action in ENGINE_ACTIONS and part.state is PartState.WAITING:
            if part.asked_seconds is None:
                part.asked_seconds = now
                self._poll_soon()
            if not self.engines.is_read_since(part.asked_seconds):
                return False  # with a later report
            refusal = self.engines.deliver(running, part, process)
            if refusal is not None:
                self._end(running, part, refusal, process)
                return False
        part.deliver()
        running.start()
        return True

    def cancelled(self, process: ReportingProcess) -> tuple[str, ...]:
        """Return the ids of the commands that a process keeps and must forget."""
        # A command of an earlier run of the exporter has no part: its result would reach no caller.
        return tuple(
            command_id
            for command_id in process.report.waiting
            if (found := self._part(command_id, process)) is None or found[1].recalled
        )

    def _part(self, action_id: str, process: ReportingProcess) -> tuple[RunningAction, CommandPart] | None:
        running = self._actions.running.get(action_id)
        part = running.commands.get(process.key) if running is not None else None
        if running is None or part is None or not part.belongs_to(process):
            return None
        return running, part

    # 3. Results arrive, and the last one finishes the action.

    def take_results(self, process: ReportingProcess) -> None:
        """Take the results in a report, and the commands that the process keeps. Unknown ids are ignored."""
        for command_id in process.report.waiting:
            found = self._part(command_id, process)
            if found is not None and not found[1].blocked:
                found[1].keep()
        for result in process.report.results:
            found = self._part(result.id, process)
            if found is not None:
                running, part = found
                if result.reason_code == ReasonCode.CANCELLED and part.withdrawal is not None:
                    result = part.withdrawal
                self._end(running, part, result, process)
        if process.report.still_free:
            self._settlements.take(process)

    def running_profile(self, process: ReportingProcess, action_id: str) -> tuple[RunningAction, CommandPart] | None:
        """Return the action and the part of a process in it, if the process has the command to take this profile.

        None if it has no such command, or has ended it.
        """
        found = self._part(action_id, process)
        if found is None or found[0].action.action != "profile" or found[1].state is PartState.WAITING:
            return None
        return found

    def process_gone(self, key: ProcessKey, reason: str) -> None:
        """End the parts of a process that has exited."""
        self.wake(key)
        self._settlements.gone(key)
        for running in tuple(self._actions.running.values()):
            part = running.commands.get(key)
            if part is not None:
                result = CommandResult(running.action.id, "gone", reason, ReasonCode.PROCESS_EXITED)
                self._end(running, part, result, part.selected.process)

    def _end(self, running: RunningAction, part: CommandPart, result: CommandResult, process: ReportingProcess) -> None:
        if part.command.action in ENGINE_ACTIONS and result.outcome == "done":
            if not part.measuring:
                part.measuring = True
                self._spawn(self._measure(running, part, result, process))
            return
        running.end_command(part, result, process)
        if part.command.settle_seconds > 0 and result.outcome == "done":
            self._settlements.start(running, part, result, self._clock())
        if part.group is not None and result.outcome != "done":
            reason = "not every rank of the group could take part"
            self._withdraw_group(running, part.group, reason, ReasonCode.GROUP_INCOMPLETE)
        self.finish_if_complete(running)

    async def _measure(
        self, running: RunningAction, part: CommandPart, result: CommandResult, process: ReportingProcess
    ) -> None:
        """End the part of an engine that has released or resumed its memory with what the driver lists then."""
        after = await self.engines.used_after(process.host_pid)
        if part.state is not PartState.ENDED:  # the process exited meanwhile
            running.end_command(part, result, process, DriverValues(part.used_before or {}, after))
            self.finish_if_complete(running)

    def finish_if_complete(self, running: RunningAction) -> None:
        """End an action whose parts all have a result."""
        if running.complete and not running.action.finished:
            if running.action.action in ENGINE_ACTIONS:
                self.engines.settle(running, self._call_later)
            action = running.finish(self._clock())
            self._actions.finish(action)
            self._on_finished(action)
            self.wake(action.id)

    # Deadlines and cancellation

    def expire(self) -> None:
        """End the parts that are too late. Called about once a second, and after each deadline."""
        now = self._clock()
        self._settlements.expire(now)
        for running, concerned, result in self._engine_starts.review(now):
            if result is None:
                self._continue(running, concerned, now)
            elif isinstance(concerned, CommandPart) and concerned.group is not None:
                self._withdraw_group(running, concerned.group, result.reason, ReasonCode.ENGINE_STARTING)
            else:
                self._withdraw_part(running, concerned, result)
            self.finish_if_complete(running)
        for running in tuple(self._actions.running.values()):
            for part in tuple(running.commands.values()):
                if part.blocked or part.measuring or part.state is PartState.ENDED:
                    continue  # an engine starts, or is measured; or withdrawn with an earlier part of its group
                in_group = part.group is not None and running.recorded.is_set()
                if in_group and not part.kept and now >= part.offered_seconds + GROUP_ANSWER_SECONDS:
                    late, code = "the process did not report in time for its group", ReasonCode.GROUP_RANK_LATE
                elif part.state is PartState.WAITING and now >= part.deadline_seconds:
                    late, code = "the process did not report before the deadline", ReasonCode.NOT_FETCHED
                elif now >= part.ends_seconds + self._grace_seconds(part):
                    late, code = "delivered without a result in time; it may still be running", ReasonCode.NO_RESULT
                else:
                    continue
                result = CommandResult(running.action.id, "expired", late, code)
                self._end(running, part, result, part.selected.process)

    def _grace_seconds(self, part: CommandPart) -> float:
        """Return how long after its last moment a command may have its result."""
        if part.command.action in ENGINE_ACTIONS:
            # No report arrives while an engine moves its memory: the reporter's thread waits for it.
            return ENGINE_ANSWER_SECONDS
        process = self._store.find(part.key)
        runs = process is not None and process.received_seconds >= part.ends_seconds
        return ANSWER_GRACE_SECONDS if runs else SILENT_GRACE_SECONDS

    def cancel(self, action_id: str, *, requested_by: Caller) -> Action | None:
        """Withdraw the parts of an action that have not started; return the action, or None if it is unknown.

        A process that keeps its command for a step or an idle time forgets it. A command that was delivered to run now
        may run, and a process that is being terminated is terminated. The results show which is which.
        """
        running = self._actions.running.get(action_id)
        if running is not None:
            self.withdraw(running, f"cancelled by {requested_by}", ReasonCode.CANCELLED)
        return self.get(action_id)

    def withdraw(self, running: RunningAction, reason: str, code: ReasonCode) -> None:
        """Refuse the parts whose command was not delivered, and recall the others."""
        if running.withdrawal is not None:
            return
        running.withdrawal = CommandResult(running.action.id, "refused", reason, code)
        for part in running.parts:
            self._withdraw_part(running, part, running.withdrawal)
        self.finish_if_complete(running)

    def _withdraw_group(self, running: RunningAction, group: JobKey, reason: str, code: ReasonCode) -> None:
        """Refuse the parts of a group whose command was not delivered, and recall the others."""
        if running.withdrawal is not None or group in running.withdrawn:
            return
        running.withdrawn.add(group)
        result = CommandResult(running.action.id, "refused", reason, code)
        for part in running.groups.get(group, ()):
            self._withdraw_part(running, part, result)
        self.finish_if_complete(running)

    def _withdraw_part(self, running: RunningAction, part: Part, result: CommandResult) -> None:
        """End a part that has not started with this result, or recall its command. A termination that runs goes on."""
        if isinstance(part, OutsidePart):
            if part.blocked:
                running.end_outside(part, result)
            else:
                part.withdrawal = part.withdrawal or result
        elif part.blocked or part.state is PartState.WAITING:
            self._end(running, part, result, part.selected.process)
        elif not part.recalled and part.state is not PartState.ENDED:
            part.recall(result)
            self.wake(part.key)

    def _continue(self, running: RunningAction, part: Part, now: float) -> None:
        """Continue a blocked part. The parts of a group continue together."""
        if isinstance(part, OutsidePart):
            part.unblock()
            self.outside.start(running, part)
        elif part.group is None or self._choose_step(running, part.group, now):
            for each in [part] if part.group is None else running.groups[part.group]:
                each.unblock(now)
                self.wake(each.key)

    # Queries

    def get(self, action_id: str) -> Action | None:
        """Return an action as it is now; None if it is unknown or forgotten."""
        return self._actions.get(action_id)

    def recent(self) -> tuple[Action, ...]:
        """Return all known actions, newest first."""
        return self._actions.recent()

    def under_way(self) -> set[ProcessKey]:
        """Return the processes that have a pending command."""
        return {key for running in self._actions.running.values() for key in running.commands}

    # Actions of the exporter itself, and of an earlier run

    def note(self, action: str, *, requested_by: Caller, reason: str) -> Action:
        """Record an action that the exporter performs itself, without a target process."""
        noted = Action.of(ActionRequest(action, Target(), reason=reason), requested_by, self._wall_clock())
        noted = replace(noted, state=ActionState.DONE.value)
        self._actions.finish(noted)
        return noted

    def restore(self, action: Action, submitted: SubmittedAction | None) -> None:
        """Remember an action of an earlier run of the exporter, and the request that started it; newest first."""
        self._actions.restore(action, submitted)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
