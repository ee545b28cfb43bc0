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
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from gpumem_client.wire.protocol import ENGINE_ACTIONS, MAX_COMMANDS, Command, CommandResult
from gpumem_client.wire.reason_codes import ReasonCode
from gpumem_exporter.actions.action import Action, EngineWait, SubmittedAction, describe_starts
from gpumem_exporter.actions.action_options import (
    ANSWER_GRACE_SECONDS,
    ENGINE_ANSWER_SECONDS,
    ActionRequest,
    Target,
)
from gpumem_exporter.actions.engines import Engines
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
    command_results,
    dry_run_results,
    expected_refusal,
    outside_results,
    starting_refusal,
    unsupported,
)
from gpumem_exporter.actions.selection import SelectedProcess, select
from gpumem_exporter.actions.settling import Settlements
from gpumem_exporter.actions.terminate import Terminator
from gpumem_exporter.actions.timing import plan, step_of_group
from gpumem_exporter.core.caller import Caller
from gpumem_exporter.core.samples import JobKey, ProcessKey, ReportingProcess, Snapshot
from gpumem_exporter.core.store import Store
from gpumem_exporter.errors import ActionForbiddenError

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
    ) -> None:
        self.wake = wake
        self.engines = Engines()
        """What is known of inference engines; a feature replaces it."""
        self.actions = ActionRegistry(kept_actions)
        self._store = store
        self._allowed = allowed
        self._clock = clock
        self._wall_clock = wall_clock
        self._on_finished = on_finished
        self._limits = limits
        self._record = record
        self._call_later = call_later
        self._hide_identities = hide_identities
        self._terminator = terminator
        self._settlements = Settlements(self.actions.replace)
        self._tasks: set[asyncio.Task[None]] = set()

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
            earlier = self.actions.with_key(requested_by.key, idempotency_key, request)
            if earlier is not None:
                return earlier
        requested_by.require_permission(request.action, self._allowed, force=request.force)
        now = self._clock()
        snapshot = self._store.snapshot(now)
        selection = select(request, requested_by, snapshot, hide_identities=self._hide_identities)
        planned = plan(request, selection.commanded, snapshot, now)
        selection = replace(selection, commanded=tuple(one for one, _ in planned))
        deadline_seconds = max((turn.deadline_seconds for _, turn in planned), default=request.deadline_seconds)
        steps = {turn.group: turn.at_step for _, turn in planned if turn.group is not None}
        at_step = next(iter(steps.values())) if len(steps) == 1 else None
        action = Action.of(request, requested_by, self._wall_clock(), unlisted=unlisted)
        action = replace(action, deadline_seconds=deadline_seconds, group=bool(steps), at_step=at_step)
        running = RunningAction(action, now, request, requested_by, selection.facts(request, snapshot))
        outside, refusals = selection.outside, dict[int | str, CommandResult | None]()
        if request.action in ENGINE_ACTIONS:
            refusals.update(self.engines.refusals(running, selection))
            outside = tuple(target for target in outside if target.pid in refusals)
        outside_seconds = now + request.deadline_seconds
        parts: list[Part] = [
            *(CommandPart.of(running, one, turn) for one, turn in planned),
            *(OutsidePart(running=running, target=one, deadline_seconds=outside_seconds) for one in outside),
        ]
        waits = self._waits(running, parts, snapshot)
        if request.force and any(waits.values()):
            raise ActionForbiddenError(
                f"{describe_starts(_union(waits.values()))}. For the engine of another user, {request.action} with "
                f"force needs {requested_by.missing_rights}. Without force, the action waits until the engine has "
                "started"
            )
        if not request.dry_run:
            self.actions.require_room(action.share, len(parts))
        # After all checks: an action that is refused does not count. A dry run reaches no process, so it counts for
        # its caller only.
        limited = [] if request.dry_run else [(part.key, str(part.target)) for part in parts]
        self._limits.take(action.share, limited, per_process=KINDS[request.action].per_minute)

        if not request.dry_run:
            profile_seconds = request.duration_seconds + request.search_seconds
            self._call_later(deadline_seconds + profile_seconds + SILENT_GRACE_SECONDS, self.expire)
        for part in parts:
            self._add(part, refusals.get(part.target.pid), waits.get(part.target.pid, ()))
        running.show_parts()
        starting = {each.pid for each in running.action.results if each.reason_code == ReasonCode.ENGINE_STARTING}
        starting.update(part.target.pid for part in running.blocked)
        running.show_waits(_union(found for pid, found in waits.items() if pid in starting))

        self.actions.start(running, idempotency_key)
        self._finish_if_complete(running)
        if self._record is None or request.dry_run or unlisted:
            running.offer(self.wake, now)
        else:
            processes = tuple((part.target.pid, part.target.workload, part.target.rank) for part in parts)
            submitted = SubmittedAction(running.action, request, idempotency_key, processes)
            self.spawn(self._offer_once(running, self._record(submitted)))
        return running.action

    def _waits(
        self, running: RunningAction, parts: Sequence[Part], snapshot: Snapshot
    ) -> dict[int | str, tuple[EngineWait, ...]]:
        """Return the engines whose start each process waits for, by its name. The ranks of a group wait together."""
        if not snapshot.starting:
            return {}
        outside = {part.target.host_pid for part in parts if isinstance(part, OutsidePart)}
        found = {
            part: self.engines.waits_for(running.request, running.caller, part.target, outside, snapshot)
            for part in parts
        }
        of_group: dict[JobKey | None, list[tuple[EngineWait, ...]]] = {}
        for part, waits in found.items():
            of_group.setdefault(part.group, []).append(waits)
        together = {group: _union(some) for group, some in of_group.items()}
        return {part.target.pid: waits if part.group is None else together[part.group] for part, waits in found.items()}

    def _add(self, part: Part, refusal: CommandResult | None, waits: tuple[EngineWait, ...]) -> None:
        """Give a process its command or let the exporter act on it, or add the result if the action does not run.

        `refusal` is the result of an engine that must not run it.
        """
        running, result = part.running, refusal
        request, facts = running.request, running.facts
        if isinstance(part, CommandPart):
            process, turn = part.target.process, part.turn
            result = unsupported(process, request, turn.mode)
            if result is None and turn.obstacle and turn.mode == "step":
                reason = f"{turn.obstacle}; use mode idle, or now"
                result = CommandResult("", "refused", reason, ReasonCode.GROUP_INCOMPLETE)
            if result is None and request.dry_run:
                result = expected_refusal(part.target, request, facts)
            result = result or refusal
        elif request.action == "terminate":
            result = self._terminator.refusal(running.action.id, part.target)
        if result is None and request.dry_run:
            if waits:
                result = starting_refusal(running.action.id, waits)
            elif request.action == "terminate":
                result = CommandResult(running.action.id, KINDS["terminate"].would, "", ReasonCode.WOULD_TERMINATE)
        if isinstance(part, CommandPart) and (result is not None or request.dry_run):
            if result is None:
                results = dry_run_results(part.target, request, facts, part.turn.obstacle)
            else:
                results = command_results(part.target, result, facts)
            running.add(results, part.turn.mode, part.turn.at_step)
        elif isinstance(part, OutsidePart) and result is not None:
            running.add(outside_results(part.target, result, facts, request))
        else:
            running.put(part)
            if waits:
                part.state = PartState.BLOCKED
            elif isinstance(part, OutsidePart):
                self._start_outside(part)

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
        ranks = [part.target._replace(process=process or part.process) for part, process in reported]
        at_step, obstacle = step_of_group(ranks, running.request, parts[0].deadline_seconds - now, now)
        if at_step is None:
            result = CommandResult(running.action.id, "refused", obstacle, ReasonCode.GROUP_INCOMPLETE)
            self._withdraw_group(running, group, result)
            return False
        for part in parts:
            part.command = replace(part.command, at_step=at_step)
        if running.action.at_step is not None:
            running.action = replace(running.action, at_step=at_step)
        running.show_parts()
        return True

    # 2. The exporter itself acts, or a reporter receives its commands.

    def _start_outside(self, part: OutsidePart) -> None:
        """Act on a process, once the action is recorded."""
        part.running.start()
        self.spawn(self._act(part))

    async def _act(self, part: OutsidePart) -> None:
        running, driver = part.running, None
        await running.recorded.wait()
        try:
            if part.withdrawal is not None:
                result = part.withdrawal
            elif self._clock() >= part.deadline_seconds:  # an engine started, or the disk was slow
                late = "the deadline passed before the exporter could act"
                result = CommandResult(running.action.id, "expired", late, ReasonCode.DEADLINE_PASSED)
            elif running.action.action == "terminate":
                result = await self._terminator.end(running.action.id, part.target, running.request.grace_seconds)
            else:
                result, driver = await self.engines.act(running, part)
        except Exception as error:  # noqa: BLE001 - the action must end, whatever the error is
            reason = f"{type(error).__name__}: {error}"[:500]
            result = CommandResult(running.action.id, "failed", reason, ReasonCode.EXCEPTION)
        running.end(part, result, driver=driver)
        self._finish_if_complete(running)

    def commands(self, process: ReportingProcess) -> tuple[Command, ...]:
        """Return the commands for a process, which count as delivered."""
        # Until the process reports that it keeps a command, each reply has it: a reply may get lost. A reporter that
        # gets a command twice repeats the first result.
        now = self._clock()
        pending = [
            part
            for running in self.actions.running.values()
            if running.recorded.is_set()
            and (part := running.commands.get(process.key)) is not None
            and part.belongs_to(process)
            and part.on_the_way
            and now < part.deadline_seconds
        ][:MAX_COMMANDS]
        delivered = [part for part in pending if self._deliver(part, process)]
        # A wait for an idle engine may end before the action's deadline.
        return tuple(
            [
                replace(part.command, deadline_seconds=min(part.command.deadline_seconds, part.deadline_seconds - now))
                for part in delivered
            ]
        )

    def _deliver(self, part: CommandPart, process: ReportingProcess) -> bool:
        """Record that a process gets its command; return False if it does not."""
        if part.command.action in ENGINE_ACTIONS and part.state is PartState.WAITING:
            if not self.engines.is_read_for(part):
                return False  # with a later report
            refusal = self.engines.deliver(part.running, part, process)
            if refusal is not None:
                self._end(part, refusal, process)
                return False
        part.advance(PartState.DELIVERED)
        part.running.start()
        return True

    def cancelled(self, process: ReportingProcess) -> tuple[str, ...]:
        """Return the ids of the commands that a process keeps and must forget."""
        # A command of an earlier run of the exporter has no part: its result would reach no caller.
        return tuple(
            command_id
            for command_id in process.report.waiting
            if (part := self._part(command_id, process)) is None or part.withdrawal is not None
        )

    def _part(self, action_id: str, process: ReportingProcess) -> CommandPart | None:
        running = self.actions.running.get(action_id)
        part = running.commands.get(process.key) if running is not None else None
        return part if part is not None and part.belongs_to(process) else None

    # 3. Results arrive, and the last one finishes the action.

    def take_results(self, process: ReportingProcess) -> None:
        """Take the results in a report, and the commands that the process keeps. Unknown ids are ignored."""
        for command_id in process.report.waiting:
            part = self._part(command_id, process)
            if part is not None and not part.blocked:
                part.advance(PartState.KEPT)
        for result in process.report.results:
            part = self._part(result.id, process)
            if part is not None:
                withdrawn = part.withdrawal if result.reason_code == ReasonCode.CANCELLED else None
                self._end(part, withdrawn or result, process)
        if process.report.still_free:
            self._settlements.take(process)

    def running_profile(self, process: ReportingProcess, action_id: str) -> CommandPart | None:
        """Return the part of a process that has the command to take this profile, and has not ended it."""
        part = self._part(action_id, process)
        takes = part is not None and part.command.action == "profile" and part.state is not PartState.WAITING
        return part if takes else None

    def process_gone(self, key: ProcessKey, reason: str) -> None:
        """End the parts of a process that has exited."""
        self.wake(key)
        self._settlements.gone(key)
        for running in tuple(self.actions.running.values()):
            part = running.commands.get(key)
            if part is not None:
                result = CommandResult(running.action.id, "gone", reason, ReasonCode.PROCESS_EXITED)
                self._end(part, result, part.process)

    def _end(self, part: CommandPart, result: CommandResult, process: ReportingProcess) -> None:
        running = part.running
        if part.command.action in ENGINE_ACTIONS and result.outcome == "done":
            if not part.measuring:
                part.measuring = True
                self.spawn(self._measure(part, result, process))
            return
        running.end(part, result, process=process)
        if part.command.settle_seconds > 0 and result.outcome == "done":
            self._settlements.start(part, self._clock())
        if part.group is not None and result.outcome != "done":
            reason = "not every rank of the group could take part"
            others = CommandResult(running.action.id, "refused", reason, ReasonCode.GROUP_INCOMPLETE)
            self._withdraw_group(running, part.group, others)
        self._finish_if_complete(running)

    async def _measure(self, part: CommandPart, result: CommandResult, process: ReportingProcess) -> None:
        """End the part of an engine that has released or resumed its memory with what the driver lists then."""
        driver = await self.engines.measure(part)
        if part.state is not PartState.ENDED:  # the process exited meanwhile
            part.running.end(part, result, process=process, driver=driver)
            self._finish_if_complete(part.running)

    def _finish_if_complete(self, running: RunningAction) -> None:
        """End an action whose parts all have a result."""
        if not running.parts and not running.action.finished:
            if running.action.action in ENGINE_ACTIONS:
                self.engines.settle(running)
            action = running.finish(self._clock())
            self.actions.finish(action)
            self._on_finished(action)
            self.wake(action.id)

    # Deadlines and cancellation

    def expire(self) -> None:
        """End the parts that are too late. Called about once a second, and after each deadline."""
        now = self._clock()
        self._settlements.expire(now)
        self._review_waits(now)
        for running in tuple(self.actions.running.values()):
            for part in tuple(running.commands.values()):
                if part.blocked or part.measuring or part.state is PartState.ENDED:
                    continue  # an engine starts, or is measured; or withdrawn with an earlier part of its group
                in_group = part.group is not None and running.recorded.is_set()
                if in_group and part.state is not PartState.KEPT and now >= part.offered_seconds + GROUP_ANSWER_SECONDS:
                    late, code = "the process did not report in time for its group", ReasonCode.GROUP_RANK_LATE
                elif part.state is PartState.WAITING and now >= part.deadline_seconds:
                    late, code = "the process did not report before the deadline", ReasonCode.NOT_FETCHED
                elif now >= part.ends_seconds + self._grace_seconds(part):
                    late, code = "delivered without a result in time; it may still be running", ReasonCode.NO_RESULT
                else:
                    continue
                result = CommandResult(running.action.id, "expired", late, code)
                self._end(part, result, part.process)

    def _review_waits(self, now: float) -> None:
        """Decide again for each part whether it must wait until an engine has started.

        Continues the parts that need not wait any more. Withdraws those at their deadline, and those whose command an
        engine start has overtaken.
        """
        snapshot = self._store.snapshot(now) if self.actions.running else None
        for running in tuple(self.actions.running.values()):
            if snapshot is None or not (snapshot.starting or running.blocked):
                continue
            waits = self._waits(running, running.parts, snapshot)
            for part in running.parts:
                found = waits.get(part.target.pid, ())
                if part.blocked and not found:
                    self._continue(part, now)
                elif found and part.state is not PartState.ENDED and (not part.blocked or now >= part.deadline_seconds):
                    result = starting_refusal(running.action.id, found)
                    if part.group is not None:
                        self._withdraw_group(running, part.group, result)
                    else:
                        self._withdraw_part(part, result)
            self._finish_if_complete(running)
            if not running.action.finished:
                running.show_waits(_union(waits.get(part.target.pid, ()) for part in running.blocked))

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
        running = self.actions.running.get(action_id)
        if running is not None and not running.cancelled:
            running.cancelled = True
            reason = f"cancelled by {requested_by}"
            result = CommandResult(action_id, "refused", reason, ReasonCode.CANCELLED)
            for part in running.parts:
                self._withdraw_part(part, result)
            self._finish_if_complete(running)
        return self.get(action_id)

    def _withdraw_group(self, running: RunningAction, group: JobKey, result: CommandResult) -> None:
        """Refuse the parts of a group whose command was not delivered, and recall the others."""
        if running.cancelled or group in running.withdrawn:
            return
        running.withdrawn.add(group)
        for part in running.groups.get(group, ()):
            self._withdraw_part(part, result)
        self._finish_if_complete(running)

    def _withdraw_part(self, part: Part, result: CommandResult) -> None:
        """End a part that has not started with this result, or recall its command. A termination that runs goes on."""
        if isinstance(part, OutsidePart):
            if part.blocked:
                part.running.end(part, result)
            else:
                part.withdraw(result)
        elif part.blocked or part.state is PartState.WAITING:
            self._end(part, result, part.process)
        elif part.withdrawal is None and part.state is not PartState.ENDED:
            part.withdraw(result)
            self.wake(part.key)

    def _continue(self, part: Part, now: float) -> None:
        """Continue a blocked part. The parts of a group continue together."""
        if isinstance(part, OutsidePart):
            part.advance(PartState.WAITING)
            self._start_outside(part)
        elif part.group is None or self._choose_step(part.running, part.group, now):
            for each in [part] if part.group is None else part.running.groups[part.group]:
                each.advance(PartState.WAITING)
                each.offered_seconds = now
                self.wake(each.key)

    # Queries

    def held_back(self, request: ActionRequest, caller: Caller, process: ReportingProcess, snapshot: Snapshot) -> bool:
        """Return whether an action on a process would wait until an inference engine has started."""
        one = SelectedProcess(process.name, process, ())
        return bool(self.engines.waits_for(request, caller, one, frozenset(), snapshot))

    def get(self, action_id: str) -> Action | None:
        """Return an action as it is now; None if it is unknown or forgotten."""
        return self.actions.get(action_id)

    def under_way(self) -> set[ProcessKey]:
        """Return the processes that have a pending command."""
        return {key for running in self.actions.running.values() for key in running.commands}

    # Actions of the exporter itself

    def note(self, action: str, *, requested_by: Caller, reason: str) -> Action:
        """Record an action that the exporter performs itself, without a target process."""
        noted = Action.of(ActionRequest(action, Target(), reason=reason), requested_by, self._wall_clock())
        noted = replace(noted, state=ActionState.DONE.value)
        self.actions.finish(noted)
        return noted

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine in the background."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _union(waits: Iterable[tuple[EngineWait, ...]]) -> tuple[EngineWait, ...]:
    """Return the engines that are waited for, each once for each device."""
    return tuple({(wait.pid, wait.uuid): wait for some in waits for wait in some}.values())
