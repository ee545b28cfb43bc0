"""The states of an action and of each process's part in it, and the transitions between them.

An action is `QUEUED` until a process has fetched a command of it, then `RUNNING`, and ends as `DONE`, `FAILED`,
`EXPIRED` or `CANCELLED`. Each process has a part of its own::

    WAITING ──▶ DELIVERED ──▶ KEPT ──▶ ENDED

Each of these states may be followed by `ENDED`. If the exporter itself acts on the process, it does so while the part
is `WAITING`. A part with a `withdrawal` must not run any more, and its process must forget the command that it has
received. A transition that is not in the table is a defect and raises `IllegalTransitionError`. Used on the event loop
only.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TypeVar

from gpumem_client.wire.protocol import Command, CommandResult
from gpumem_exporter.actions.action import Action, ActionResult, EngineWait, PendingPart, all_waits
from gpumem_exporter.actions.action_options import ActionRequest
from gpumem_exporter.actions.kinds import KINDS, is_done
from gpumem_exporter.actions.results import DriverValues, command_results, outside_results
from gpumem_exporter.actions.selection import SelectedProcess
from gpumem_exporter.actions.timing import Turn
from gpumem_exporter.core.caller import Caller
from gpumem_exporter.core.samples import JobKey, ProcessKey, ReportingProcess
from gpumem_exporter.core.shares import Shares
from gpumem_exporter.errors import IdempotencyConflictError, TooManyActionsError

MAX_BYTES = 16 << 20
MAX_UNDER_WAY = 4096
"""The maximum number of processes in the running actions of one share."""
SETTLING_GRACE_SECONDS = 5.0
"""A process's value may arrive this long after the settling time, and two steps later: steps delay its samples."""
# One dry run is kept for this number of actions.
_DRY_RUNS_SHARE = 4


class ActionState(Enum):
    """The state of an action; the API has the same values."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


class PartState(Enum):
    """The state of one process's part in an action."""

    WAITING = "waiting"
    """An engine must start first, the process has not fetched the command, or the exporter itself acts."""
    DELIVERED = "delivered"
    """The command was sent. It is sent again with the next reply, because a reply may get lost."""
    KEPT = "kept"
    """The process reports that it keeps the command for the end of a step or for an idle time."""
    ENDED = "ended"
    """The result is known."""


_ENDS = frozenset({ActionState.DONE, ActionState.FAILED, ActionState.EXPIRED, ActionState.CANCELLED})
_TRANSITIONS: Mapping[Enum, frozenset[Enum]] = {
    ActionState.QUEUED: frozenset({ActionState.RUNNING}) | _ENDS,
    ActionState.RUNNING: _ENDS,
    PartState.WAITING: frozenset({PartState.DELIVERED, PartState.KEPT, PartState.ENDED}),
    PartState.DELIVERED: frozenset({PartState.KEPT, PartState.ENDED}),
    PartState.KEPT: frozenset({PartState.ENDED}),
}

_log = logging.getLogger(__name__)

State = TypeVar("State", ActionState, PartState)


class IllegalTransitionError(RuntimeError):
    """A state cannot follow the current one: a defect of the exporter."""


def advanced(state: State, to: State) -> State:
    """Return the state `to`, or raise IllegalTransitionError if it cannot follow `state`."""
    if to not in _TRANSITIONS.get(state, ()):
        raise IllegalTransitionError(f"{to.name} cannot follow {state.name}")
    return to


@dataclass(slots=True, kw_only=True, eq=False)
class Part:
    """One process's part in an action."""

    running: RunningAction
    """The action."""
    target: SelectedProcess
    turn: Turn
    state: PartState = PartState.WAITING
    waits: tuple[EngineWait, ...] = ()
    """The engines that must have started before the part may start; until then, it is neither sent nor late."""
    withdrawal: CommandResult | None = None
    """The result if the part does not run after all; None while it may run, and if its process says the result."""
    used_before: Mapping[str, int] = field(default_factory=dict)
    """For an engine, the driver's bytes of the process by device right before it acts."""
    awake_bytes: Mapping[str, int] = field(default_factory=dict)
    """For an engine that wakes, what the driver lists for the process by device once it is awake."""
    asked_seconds: float | None = None
    """For an engine, when its process first asked for its command."""
    measuring: bool = False
    """The engine has done it, and the driver is read again."""
    profile: str = ""
    """The id of the profile that the process has sent for the command."""
    offered_seconds: float = 0.0
    """When the process could get its command, on the dispatcher's clock: a group must hear it soon after."""
    gives_up_seconds: float = 0.0
    """Until when the process may report what stays free, on the dispatcher's clock."""

    def __str__(self) -> str:
        return f"action {self.running.action.id} on {self.target}"

    @property
    def key(self) -> Hashable:
        """The process."""
        return self.target.key

    @property
    def deadline_seconds(self) -> float:
        """On the dispatcher's clock. A part that has not started by then ends."""
        return self.running.started_seconds + self.turn.deadline_seconds

    def advance(self, to: PartState) -> None:
        """Record that the part has reached a state. A repetition has no effect."""
        if self.state is not to or to is PartState.ENDED:
            self.state = advanced(self.state, to)
            _log.debug("%s is %s", self, to.value)

    def withdraw(self, result: CommandResult) -> None:
        """Record that the part must not run any more."""
        self.withdrawal = result
        _log.debug("%s is withdrawn", self)

    @property
    def commanded(self) -> bool:
        """Whether the process itself runs the action; otherwise the exporter ends it, or speaks with its engine."""
        return bool(self.turn.mode)

    @property
    def mode(self) -> str:
        """When the process acts: see `Turn.mode`."""
        return "idle" if self.commanded and self.running.request.wait_idle_seconds else self.turn.mode

    def command(self, now_seconds: float) -> Command:
        """Return the command that the process gets now."""
        request, turn = self.running.request, self.turn
        every_device = not (KINDS[request.action].by_device and (request.target.gpu or request.target.uuid))
        # A wait for an idle engine may end before the action's deadline.
        most_seconds = request.wait_idle_seconds or turn.deadline_seconds
        return Command(
            id=self.running.action.id,
            action=request.action,
            deadline_seconds=min(most_seconds, self.deadline_seconds - now_seconds),
            # No uuids for every device: the process may use another device since its report.
            uuids=() if every_device else tuple(sample.uuid for sample in self.target.samples),
            collect_garbage=request.collect_garbage,
            mode=self.mode,
            at_step=turn.at_step,
            fraction=request.fraction,
            # Of a clear, only the exporter waits for engines.
            force=request.force and request.action != "empty_cache",
            settle_seconds=request.settle_seconds if request.action == "empty_cache" else 0.0,
            duration_seconds=request.duration_seconds,
            search_seconds=request.search_seconds,
            keep=(request.keep,) if request.keep else (),
        )

    def belongs_to(self, process: ReportingProcess) -> bool:
        """Return whether this is the same process, with the same program in it: an exec starts another session."""
        started, reporting = self.target.process.report.process, process.report.process
        return (started.start_time_ticks, started.session) == (reporting.start_time_ticks, reporting.session)


@dataclass(slots=True, eq=False)
class RunningAction:
    """An action that has not ended: its parts that have no result yet, and the results of the others."""

    action: Action
    started_seconds: float
    """On the dispatcher's clock."""
    caller: Caller
    gpus: Mapping[str, str]
    """The NVML index of each device, by uuid."""
    limits: Mapping[str, int]
    """With `set_memory_fraction`, the bytes that a process may reserve on each device, by uuid."""
    parts: dict[Hashable, Part] = field(default_factory=dict)
    """The parts that have no result, by process."""
    recorded: bool = False
    """The request is recorded: processes may get their commands."""
    cancelled: bool = False
    """No part starts any more."""

    @property
    def request(self) -> ActionRequest:
        """The request of the action."""
        return self.action.request

    @property
    def commands(self) -> list[Part]:
        """The parts that processes run."""
        return [part for part in self.parts.values() if part.commanded]

    def group(self, job: JobKey) -> list[Part]:
        """Return the parts of the ranks of a job that act together, or none of them does."""
        return [part for part in self.commands if part.turn.group == job]

    def show_parts(self) -> None:
        """Show in the action which processes act, and when, and for which engines it waits, until its deadline."""
        deadline = self.action.created_unix_seconds + self.action.deadline_seconds
        planned = (
            PendingPart(one.pid, one.workload, one.rank, one.job, part.mode, part.turn.at_step)
            for part in self.commands
            for one in [part.target]
        )
        waits = all_waits(part.waits for part in self.parts.values())
        waits_for = (replace(each, until_unix_seconds=min(each.until_unix_seconds, deadline)) for each in waits)
        self.action = replace(self.action, planned=tuple(planned), waits_for=tuple(waits_for))

    def advance(self, to: ActionState) -> None:
        """Record that the action has reached a state. A repetition has no effect."""
        if self.action.state != to.value:
            self.action = replace(self.action, state=advanced(ActionState(self.action.state), to).value)

    def end(
        self,
        part: Part,
        result: CommandResult,
        *,
        process: ReportingProcess | None = None,
        driver: DriverValues | None = None,
    ) -> None:
        """End a part with its result. `process` is the last report of a process that runs a command."""
        part.advance(PartState.ENDED)
        _log.debug("%s: %s %s", part, result.outcome, result.reason_code)
        del self.parts[part.key]
        if part.commanded:
            target = replace(part.target, reporter=process or part.target.reporter)
            # The process may name any profile; only what it has sent for this command is shown.
            rows = command_results(target, replace(result, profile=part.profile), self.request)
        else:
            rows = outside_results(part.target, result, self.request)
        limits, mode = self.limits if is_done(result.outcome) else {}, part.mode or None
        added = []
        for row in rows:
            gpu, limit_bytes = self.gpus.get(row.uuid, ""), limits.get(row.uuid)
            row = replace(row, gpu=gpu, limit_bytes=limit_bytes, mode=mode, at_step=part.turn.at_step)
            added.append(row if driver is None else driver.of(row, self.request.action))
        self.action = replace(self.action, results=(*self.action.results, *added))

    def finish(self, now_seconds: float) -> Action:
        """End the action, in the state that its results have in common. A cancelled one is done if every part is."""
        outcomes = {result.outcome for result in self.action.results if not is_done(result.outcome)}
        if not outcomes:
            self.advance(ActionState.DONE)
        elif self.cancelled:
            self.advance(ActionState.CANCELLED)
        else:
            self.advance(ActionState.EXPIRED if outcomes == {"expired"} else ActionState.FAILED)
        waits_for = self.action.waits_for if self.request.dry_run else ()
        duration_seconds = now_seconds - self.started_seconds
        self.action = replace(self.action, duration_seconds=duration_seconds, waits_for=waits_for, planned=())
        return self.action


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


class ActionRegistry:
    """Finds actions by id and by idempotency key, which belongs to its caller.

    `max_finished` and `MAX_BYTES` limit the finished actions that are kept, besides dry runs.
    """

    def __init__(self, max_finished: int) -> None:
        self.running: dict[str, RunningAction] = {}
        """The actions that have not ended by id, oldest first."""
        self._finished = _Kept(max_finished, MAX_BYTES)
        # Apart, so that dry runs displace no action.
        self._dry_runs = _Kept(max_finished // _DRY_RUNS_SHARE, MAX_BYTES // _DRY_RUNS_SHARE)

    def get(self, action_id: str) -> Action | None:
        """Return an action as it is now; None if it is unknown or forgotten."""
        running = self.running.get(action_id)
        if running is not None:
            return running.action
        return self._finished.actions.get(action_id) or self._dry_runs.actions.get(action_id)

    @property
    def _known(self) -> list[Action]:
        """All known actions; restored actions of earlier runs come before the actions of this run."""
        known = [*self._finished.actions.values(), *self._dry_runs.actions.values()]
        return known + [running.action for running in self.running.values()]

    def recent(self) -> tuple[Action, ...]:
        """Return all known actions, newest first."""
        listed = (action for action in self._known if not action.unlisted)
        return tuple(sorted(listed, key=lambda action: action.created_unix_seconds, reverse=True))

    def with_key(self, caller: str, key: str, request: ActionRequest) -> Action | None:
        """Return the action that a caller has started with this key, if it is still known.

        Raises IdempotencyConflictError if the caller used the key with another request.
        """
        for action in reversed(self._known):
            if (action.caller, action.idempotency_key) == (caller, key):
                if action.request != request:
                    used = f"Idempotency-Key {key!r} was used for another request (action {action.id})"
                    raise IdempotencyConflictError(f"{used}; send a new key")
                return action
        return None

    def require_room(self, share: str, processes: int) -> None:
        """Raise `TooManyActionsError` if the running actions of a share have too many processes."""
        under_way = sum(
            len(running.parts) + len(running.action.results)
            for running in self.running.values()
            if running.action.share == share
        )
        if under_way and under_way + processes > MAX_UNDER_WAY:
            raise TooManyActionsError(f"{share} has running actions on {under_way} processes; cancel some", 1.0)

    def finish(self, action: Action) -> None:
        """Add a finished action, or move it from the running ones."""
        self.running.pop(action.id, None)
        (self._dry_runs if action.request.dry_run or action.unlisted else self._finished).add(action)

    def replace(self, action: Action) -> None:
        """Replace a finished action by itself with what settled since, unless it is forgotten."""
        if action.id in self._finished.actions:
            self._finished.actions[action.id] = action

    def restore(self, action: Action) -> None:
        """Add an action of an earlier run of the exporter, the newest first. It displaces no action of this run."""
        if self.get(action.id) is None:
            self._finished.add_oldest(action)


class _Kept:
    """Actions of a limited number and size. Who has the most of them loses its oldest one."""

    def __init__(self, max_number: int, max_bytes: int) -> None:
        # An action counts as at least its share of the size, so that one limit is enough for both.
        self._least_bytes = max_bytes // max(1, max_number)
        self._max_bytes = max_bytes
        self._shares = Shares(max_bytes)
        self.actions: OrderedDict[str, Action] = OrderedDict()
        """By id, oldest first."""

    def _size(self, action: Action) -> int:
        return max(self._least_bytes, action.kept_bytes)

    def add(self, action: Action) -> None:
        """Add the newest action."""
        self.actions[action.id] = action
        self._shares.put(action.share, self._size(action))
        while (loser := self._shares.over()) is not None and len(self.actions) > 1:
            oldest = next(kept for kept in self.actions.values() if kept.share == loser)
            del self.actions[oldest.id]
            self._shares.drop(loser, self._size(oldest))

    def add_oldest(self, action: Action) -> None:
        """Add an action before all others, if there is room."""
        if self._shares.total + self._size(action) <= self._max_bytes:
            self.add(action)
            self.actions.move_to_end(action.id, last=False)
