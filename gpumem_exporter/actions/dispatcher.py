"""Delivers actions to the processes that they target, and collects the results.

The path of an action: `submit` creates a part for each process, `commands` delivers its command with the reply to the
process's report, `take_results` takes the result from a later report, and the last result finishes the action. A dry
run takes the same path, and ends right before a part would start. The states of actions and of their parts are in
`lifecycle`. Used on the event loop only.

A command is bound to one process and one reporter session in it. No later process with the same pid gets it, and no
other program in the same process.

A group acts on all ranks or on none, as far as that is possible without a barrier. Its step is some seconds ahead. If a
rank does not have its command in time, the dispatcher recalls the commands of all ranks.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gpumem_client.wire.protocol import ENGINE_ACTIONS, MAX_COMMANDS, Command, CommandResult
from gpumem_client.wire.reason_codes import ReasonCode
from gpumem_exporter.actions.action import Action, EngineWait, all_waits, describe_starts
from gpumem_exporter.actions.action_options import ANSWER_GRACE_SECONDS, ENGINE_ANSWER_SECONDS, ActionRequest
from gpumem_exporter.actions.engines import Engines
from gpumem_exporter.actions.kinds import KINDS
from gpumem_exporter.actions.lifecycle import (
    ActionRegistry,
    ActionState,
    Part,
    PartState,
    RunningAction,
    Settlements,
)
from gpumem_exporter.actions.rate_limits import RateLimits
from gpumem_exporter.actions.results import expected_refusal, expected_result, starting_refusal, unsupported
from gpumem_exporter.actions.selection import SelectedProcess, limits_of, processes_of, select
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


@dataclass(kw_only=True, eq=False)
class Dispatcher:
    """Accepts actions, delivers commands, collects results."""

    store: Store
    allowed: frozenset[str]
    clock: Callable[[], float]
    wall_clock: Callable[[], float]
    on_finished: Callable[[Action], None]
    terminator: Terminator
    limits: RateLimits
    actions: ActionRegistry = field(default_factory=lambda: ActionRegistry(1000))
    record: Callable[[RunningAction], Awaitable[None]] | None = None
    """Stores a new action. Before that, no process gets a command of it."""
    wake: Callable[[Hashable], None] = lambda _key: None
    """Ends the held requests that wait for a process or for the id of an action."""

    def __post_init__(self) -> None:
        self.engines = Engines()
        """What is known of inference engines; a feature replaces it."""
        self.get = self.actions.get
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

        An `unlisted` one has no record: see `Action.unlisted`. Raises `ActionRefusedError`: see `errors`.
        """
        # Before all checks: the repetition of a request gets its action, whatever has changed since.
        if idempotency_key is not None:
            earlier = self.actions.with_key(requested_by.key, idempotency_key, request)
            if earlier is not None:
                return earlier
        requested_by.require_permission(request.action, self.allowed, force=request.force)
        now = self.clock()
        snapshot = self.store.snapshot(now)
        running = self._planned(request, requested_by, snapshot, idempotency_key=idempotency_key, unlisted=unlisted)
        refused: Mapping[Hashable, CommandResult | None] = {}
        if request.action in ENGINE_ACTIONS:
            refused = self.engines.refusals(running)
            running.parts = {key: part for key, part in running.parts.items() if key in refused}
        waits = self._waits(running, snapshot)
        if request.force and any(waits.values()):
            raise ActionForbiddenError(
                f"{describe_starts(all_waits(waits.values()))}. For the engine of another user, {request.action} with "
                f"force needs {requested_by.missing_rights}. Without force, the action waits until the engine has "
                "started"
            )
        parts = tuple(running.parts.values())
        if not request.dry_run:
            self.actions.require_room(running.action.share, len(parts))
        # After all checks: an action that is refused does not count. A dry run reaches no process, so it counts for
        # its caller only.
        limited = [] if request.dry_run else [(part.key, str(part.target)) for part in parts]
        self.limits.take(running.action.share, limited, per_process=KINDS[request.action].per_minute)
        outcomes = [self._outcome_before_start(part, refused.get(part.key), waits.get(part.key, ())) for part in parts]
        running.show_parts()
        for part, result in zip(parts, outcomes, strict=True):
            if result is not None:
                running.end(part, result)
        self.actions.running[running.action.id] = running
        self._finish_if_complete(running)
        if self.record is None or request.dry_run or unlisted:
            running.recorded = True
            self._offer(running, running.parts.values())
        else:
            self.spawn(self._offer_once(running, self.record(running)))
        return running.action

    def _planned(
        self, request: ActionRequest, caller: Caller, snapshot: Snapshot, *, idempotency_key: str | None, unlisted: bool
    ) -> RunningAction:
        """Return the action with a part for each process that it selects."""
        now = self.clock()
        planned = plan(request, select(request, caller, snapshot), snapshot, now)
        steps = {turn.group: turn.at_step for _, turn in planned if turn.group is not None}
        action = Action(
            id=uuid.uuid4().hex,
            request=request,
            state=ActionState.QUEUED.value,
            requested_by=str(caller),
            created_unix_seconds=self.wall_clock(),
            group=bool(steps),
            at_step=next(iter(steps.values())) if len(steps) == 1 else None,
            deadline_seconds=max((turn.deadline_seconds for _, turn in planned), default=request.deadline_seconds),
            caller=caller.key,
            idempotency_key=idempotency_key,
            unlisted=unlisted,
        )
        limits = limits_of(request.fraction, snapshot)
        running = RunningAction(action, now, caller, snapshot.gpus, limits)
        parts = [Part(running=running, target=one, turn=turn) for one, turn in planned]
        running.parts = {part.key: part for part in parts}
        return running

    def _waits(self, running: RunningAction, snapshot: Snapshot) -> dict[Hashable, tuple[EngineWait, ...]]:
        """Return the engines whose start each process waits for. The ranks of a group wait together."""
        if not snapshot.starting:
            return {}
        parts = running.parts.values()
        outside = {part.target.host_pid for part in parts if not part.commanded}
        found = {
            part: self.engines.waits_for(running.request, running.caller, part.target, outside, snapshot)
            for part in parts
        }
        of_group: dict[JobKey | None, list[tuple[EngineWait, ...]]] = {}
        for part, waits in found.items():
            of_group.setdefault(part.turn.group, []).append(waits)
        together = {group: all_waits(some) for group, some in of_group.items()}
        return {part.key: together[part.turn.group] if part.turn.group else waits for part, waits in found.items()}

    def _outcome_before_start(
        self, part: Part, refused: CommandResult | None, waits: tuple[EngineWait, ...]
    ) -> CommandResult | None:
        """Return the result of a part that does not start, because it is refused or because of a dry run.

        A part without a result waits for these engines. `refused` is the result of an engine that must not run it.
        """
        request, result = part.running.request, refused
        if part.commanded:
            result = unsupported(part.target.process, request, part.turn.mode)
            if result is None and part.turn.obstacle and part.turn.mode == "step":
                reason = f"{part.turn.obstacle}; use mode idle, or now"
                result = CommandResult("", "refused", reason, ReasonCode.GROUP_INCOMPLETE)
            if result is None and request.dry_run:
                result = expected_refusal(part.target, request, part.running.limits)
            result = result or refused
        elif request.action == "terminate":
            result = self.terminator.refusal(part.target)
        if result is not None:
            return result
        part.waits = waits
        if not request.dry_run:
            return None
        if waits:
            return starting_refusal(waits)
        if part.commanded:
            return expected_result(part.target, request, part.turn.obstacle)
        if request.action == "terminate":
            return CommandResult("", KINDS["terminate"].would, "", ReasonCode.WOULD_TERMINATE)
        return None  # the exporter asks the engine what it would do

    async def _offer_once(self, running: RunningAction, recorded: Awaitable[None]) -> None:
        try:
            await recorded
        finally:
            running.recorded = True
            self._offer(running, running.parts.values())

    # 2. The exporter itself acts, or a reporter receives its commands.

    def _offer(self, running: RunningAction, parts: Iterable[Part]) -> None:
        """Let parts start that no engine blocks, once the action is recorded: wake their processes, or act on them."""
        now, ready = self.clock(), [part for part in parts if not part.waits and running.recorded]
        groups: dict[JobKey, list[Part]] = {}
        for part in ready:
            if part.turn.group is not None:
                groups.setdefault(part.turn.group, []).append(part)
        for ranks in groups.values():
            self._choose_step(ranks, now)
        for part in ready:
            if not part.commanded:
                running.advance(ActionState.RUNNING)
                self.spawn(self._act(part))
            elif part.state is PartState.WAITING:
                part.offered_seconds = now
                self.wake(part.key)
        self._finish_if_complete(running)

    def _choose_step(self, parts: Sequence[Part], now: float) -> None:
        """Choose the step of a group again, or withdraw the group if no step is possible.

        While the request was recorded, or an engine started, its ranks have made steps: the chosen one may have passed.
        """
        running = parts[0].running
        reported = [replace(part.target, reporter=self._newest(part)) for part in parts]
        at_step, obstacle = step_of_group(reported, running.request, parts[0].deadline_seconds - now, now)
        if at_step is None:
            self._withdraw(parts, CommandResult("", "refused", obstacle, ReasonCode.GROUP_INCOMPLETE))
            return
        for part in parts:
            part.turn = part.turn._replace(at_step=at_step)
        if running.action.at_step is not None:
            running.action = replace(running.action, at_step=at_step)
        running.show_parts()

    async def _act(self, part: Part) -> None:
        request, driver = part.running.request, None
        try:
            if part.withdrawal is not None:
                result = part.withdrawal
            elif self.clock() >= part.deadline_seconds:  # an engine started, or the disk was slow
                late = "the deadline passed before the exporter could act"
                result = CommandResult("", "expired", late, ReasonCode.DEADLINE_PASSED)
            elif request.action == "terminate":
                result = await self.terminator.end(part.target, request.grace_seconds)
            else:
                result, driver = await self.engines.act(part)
        except Exception as error:  # noqa: BLE001 - the action must end, whatever the error is
            reason = f"{type(error).__name__}: {error}"[:500]
            result = CommandResult("", "failed", reason, ReasonCode.EXCEPTION)
        part.running.end(part, result, driver=driver)
        self._finish_if_complete(part.running)

    def commands(self, process: ReportingProcess) -> tuple[Command, ...]:
        """Return the commands for a process, which count as delivered."""
        # Until the process reports that it keeps a command, each reply has it: a reply may get lost. A reporter that
        # gets a command twice repeats the first result.
        now = self.clock()
        pending = [
            part
            for running in self.actions.running.values()
            if running.recorded
            and (part := self._part(running.action.id, process)) is not None
            and part.withdrawal is None
            and not part.waits
            and part.state in (PartState.WAITING, PartState.DELIVERED)
            and now < part.deadline_seconds
        ][:MAX_COMMANDS]
        return tuple([part.command(now) for part in pending if self._deliver(part)])

    def _deliver(self, part: Part) -> bool:
        """Record that a process gets its command; return False if it does not."""
        if part.running.request.action in ENGINE_ACTIONS and part.state is PartState.WAITING:
            if not self.engines.is_read_for(part):
                return False  # with a later report
            refusal = self.engines.deliver(part)
            if refusal is not None:
                self._end(part, refusal)
                return False
        part.advance(PartState.DELIVERED)
        part.running.advance(ActionState.RUNNING)
        return True

    def cancelled(self, process: ReportingProcess) -> tuple[str, ...]:
        """Return the ids of the commands that a process keeps and must forget."""
        # A command of an earlier run of the exporter has no part: its result would reach no caller.
        return tuple(
            command_id
            for command_id in process.report.waiting
            if (part := self._part(command_id, process)) is None or part.withdrawal is not None
        )

    def _part(self, action_id: str, process: ReportingProcess) -> Part | None:
        running = self.actions.running.get(action_id)
        part = running.parts.get(process.key) if running is not None else None
        return part if part is not None and part.commanded and part.belongs_to(process) else None

    def _newest(self, part: Part) -> ReportingProcess:
        """Return the process of a part with its last report, which is never of a program that replaced it."""
        found = self.store.find(part.target.process.key)
        return found if found is not None and part.belongs_to(found) else part.target.process

    # 3. Results arrive, and the last one finishes the action.

    def take_results(self, process: ReportingProcess) -> None:
        """Take the results in a report, and the commands that the process keeps. Unknown ids are ignored."""
        for command_id in process.report.waiting:
            part = self._part(command_id, process)
            if part is not None and not part.waits:
                part.advance(PartState.KEPT)
        for result in process.report.results:
            part = self._part(result.id, process)
            if part is not None:
                withdrawn = part.withdrawal if result.reason_code == ReasonCode.CANCELLED else None
                self._end(part, withdrawn or result)
        if process.report.still_free:
            self._settlements.take(process)

    def running_profile(self, process: ReportingProcess, action_id: str) -> Part | None:
        """Return the part of a process that has the command to take this profile, and has not ended it."""
        part = self._part(action_id, process)
        takes = part is not None and part.running.request.action == "profile" and part.state is not PartState.WAITING
        return part if takes else None

    def process_gone(self, key: ProcessKey, reason: str) -> None:
        """End the parts of a process that has exited."""
        self.wake(key)
        self._settlements.expire(self.clock(), gone=key)
        for running in tuple(self.actions.running.values()):
            part = running.parts.get(key)
            if part is not None and part.commanded:
                self._end(part, CommandResult("", "gone", reason, ReasonCode.PROCESS_EXITED))

    def _end(self, part: Part, result: CommandResult) -> None:
        running = part.running
        if running.request.action in ENGINE_ACTIONS and result.outcome == "done":
            if not part.measuring:
                part.measuring = True
                self.spawn(self._measure(part, result))
            return
        running.end(part, result, process=self._newest(part))
        if running.request.settle_seconds > 0 and result.outcome == "done":
            self._settlements.start(part, self.clock())
        if part.turn.group is not None and result.outcome != "done":
            reason = "not every rank of the group could take part"
            others = CommandResult("", "refused", reason, ReasonCode.GROUP_INCOMPLETE)
            self._withdraw(running.group(part.turn.group), others)
        self._finish_if_complete(running)

    async def _measure(self, part: Part, result: CommandResult) -> None:
        """End the part of an engine that has released or resumed its memory with what the driver lists then."""
        driver = await self.engines.measure(part)
        if part.state is not PartState.ENDED:  # the process exited meanwhile
            part.running.end(part, result, process=self._newest(part), driver=driver)
            self._finish_if_complete(part.running)

    def _finish_if_complete(self, running: RunningAction) -> None:
        """End an action whose parts all have a result."""
        if not running.parts and not running.action.finished:
            if running.request.action in ENGINE_ACTIONS:
                self.engines.settle(running)
            action = running.finish(self.clock())
            self.actions.finish(action)
            self.on_finished(action)
            self.wake(action.id)

    # Deadlines and cancellation

    def expire(self) -> None:
        """End the parts that are too late. Called about once a second."""
        now = self.clock()
        self._settlements.expire(now)
        snapshot = self.store.snapshot(now) if self.actions.running else None
        for running in tuple(self.actions.running.values()):
            if snapshot is not None and (snapshot.starting or any(part.waits for part in running.parts.values())):
                self._review_waits(running, snapshot, now)
            for part in running.commands:
                late = self._lateness(part, now)
                if late is not None:
                    self._end(part, CommandResult("", "expired", *late))

    def _review_waits(self, running: RunningAction, snapshot: Snapshot, now: float) -> None:
        """Decide again for each part of an action whether it must wait until an engine has started.

        Continues the parts that need not wait any more, the ranks of a group together. Withdraws those at their
        deadline, and those whose command an engine start has overtaken.
        """
        waits = self._waits(running, snapshot)
        free = [part for part in running.parts.values() if part.waits and not waits.get(part.key)]
        for part in free:
            part.waits = ()
        self._offer(running, free)
        for part in tuple(running.parts.values()):
            found = waits.get(part.key, ())
            if found and (not part.waits or now >= part.deadline_seconds):
                group = part.turn.group
                self._withdraw([part] if group is None else running.group(group), starting_refusal(found))
            elif found:
                part.waits = found
        self._finish_if_complete(running)
        if not running.action.finished:
            running.show_parts()

    def _lateness(self, part: Part, now: float) -> tuple[str, ReasonCode] | None:
        """Return the reason if a command, or its result, is too late."""
        running, request = part.running, part.running.request
        if part.waits or part.measuring or part.state is PartState.ENDED:
            return None  # an engine starts, or is measured; or withdrawn with an earlier part of its group
        in_group = part.turn.group is not None and running.recorded
        if in_group and part.state is not PartState.KEPT and now >= part.offered_seconds + GROUP_ANSWER_SECONDS:
            return "the process did not report in time for its group", ReasonCode.GROUP_RANK_LATE
        if part.state is PartState.WAITING and now >= part.deadline_seconds:
            return "the process did not report before the deadline", ReasonCode.NOT_FETCHED
        # When a command that started at the last moment has run: a profile records and searches for a time.
        ends_seconds = part.deadline_seconds + request.duration_seconds + request.search_seconds
        if request.action in ENGINE_ACTIONS:
            # No report arrives while an engine moves its memory: the reporter's thread waits for it.
            grace_seconds = ENGINE_ANSWER_SECONDS
        elif self._newest(part).received_seconds >= ends_seconds:
            grace_seconds = ANSWER_GRACE_SECONDS
        else:
            grace_seconds = SILENT_GRACE_SECONDS
        if now >= ends_seconds + grace_seconds:
            return "delivered without a result in time; it may still be running", ReasonCode.NO_RESULT
        return None

    def cancel(self, action_id: str, *, requested_by: Caller) -> Action | None:
        """Withdraw the parts of an action that have not started; return the action, or None if it is unknown.

        A process that keeps its command for a step or an idle time forgets it. A command that was delivered to run now
        may run, and a process that is being terminated is terminated. The results show which is which.
        """
        running = self.actions.running.get(action_id)
        if running is not None:
            running.cancelled = True
            result = CommandResult("", "refused", f"cancelled by {requested_by}", ReasonCode.CANCELLED)
            self._withdraw(running.parts.values(), result)
            self._finish_if_complete(running)
        return self.get(action_id)

    def _withdraw(self, parts: Iterable[Part], result: CommandResult) -> None:
        """End the parts that have not started with this result, and recall the commands of the others.

        The first withdrawal of a part counts. A termination that runs goes on.
        """
        for part in tuple(parts):
            if part.withdrawal is not None or part.state is PartState.ENDED:
                continue
            part.withdraw(result)
            if part.waits or (part.commanded and part.state is PartState.WAITING):
                part.running.end(part, result)
            elif part.commanded:
                self.wake(part.key)

    # Queries

    def held_back(self, request: ActionRequest, caller: Caller, process: ReportingProcess, snapshot: Snapshot) -> bool:
        """Return whether an action on a process would wait until an inference engine has started."""
        one = processes_of(snapshot).get(process.key) or SelectedProcess(process.name, process)
        return bool(self.engines.waits_for(request, caller, one, frozenset(), snapshot))

    def under_way(self) -> set[ProcessKey]:
        """Return the processes that have a pending command."""
        return {part.target.process.key for running in self.actions.running.values() for part in running.commands}

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine in the background."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
