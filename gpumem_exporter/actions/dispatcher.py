"""Carries actions to the processes they are meant for and their results back.

An action becomes one command for each process. A command stays pending until its result has come, its deadline has
passed or its process has gone: a reply that was lost on the way is simply given again with the next report, and a
reporter that gets a command twice answers with the first result. Commands are bound to the reporter (pid, namespace,
start time and session), so that none reaches a later process with the same pid, or another program in the same process.

What waits in a process for the end of a step or for a rest, the process names in its reports: it is not given again,
and is cancelled there once nothing here waits for it any more. A group is all ranks or none, as far as that can be had
without a barrier: its step lies some seconds ahead, and if not every rank has its command well before that, those that
have are told to forget it.

For the event loop only: not thread-safe.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from gpumem_exporter.actions.group import GROUP_LEAD_SECONDS, group_of, group_step, lack, who
from gpumem_exporter.actions.limits import RateLimits
from gpumem_exporter.actions.model import Action, ActionRequest, ActionResult, Asked, Target, gpu_labels
from gpumem_exporter.actions.results import Victim, dry_rows, ended_rows, rows, victim
from gpumem_exporter.actions.terminate import Terminator
from gpumem_exporter.core.samples import ProcessKey, ReportingProcess, Snapshot
from gpumem_exporter.core.store import Store
from gpumem_exporter.errors import (
    ActionNotAllowedError,
    IdempotencyConflictError,
    TargetNotFoundError,
)
from gpumem_exporter.wire.protocol import Command, CommandResult, DeviceSample

__all__ = ["ANSWER_GRACE_SECONDS", "GROUP_ANSWER_SECONDS", "GROUP_LEAD_SECONDS", "Dispatcher"]

ANSWER_GRACE_SECONDS = 10.0
"""How long after its deadline a delivered command may still answer: it may have begun just in time."""
GROUP_ANSWER_SECONDS = 2.0
"""A rank that has not said by then that it has its command is not waited for."""
_NOT_ALL = "not every rank of the group could take part"
_OF_DEVICES = ("reset_peak", "set_memory_fraction")
"""Actions on the devices that are meant; torch clears, collects and records on every device of a process."""


@dataclass(slots=True)
class _Order:
    """A command on its way to one process."""

    command: Command
    pid: int | str
    """The process' name when it was chosen."""
    process: ReportingProcess
    samples: tuple[DeviceSample, ...]
    deadline_seconds: float
    delivered: bool = False
    held: bool = False
    """The process has said that it waits there for its moment."""
    cancelled: bool = False


@dataclass(slots=True)
class _Running:
    """An action that has commands out."""

    action: Action
    started_seconds: float
    orders: dict[ProcessKey, _Order]
    finished: asyncio.Event
    released: asyncio.Event
    """Processes may hear of it."""
    called_off: str = ""
    """Why nothing more of it is to begin; empty while it goes on."""
    ending: int = 0
    """Processes that are being terminated."""


class Dispatcher:
    """Takes actions, hands out commands, gathers results.

    Args:
        store: where the targets are looked up.
        allowed: the actions of `--action.allow`.
        clock: monotonic seconds.
        wall_clock: seconds since the epoch.
        on_finished: called once with each action when nothing more will become of it.
        terminator: ends processes.
        limits: how many actions there may be.
        before_release: awaited for each new action before any process hears of it: what is not written down is not
            done.
        kept_actions: how many finished actions are remembered.
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
        before_release: Callable[[Asked], Awaitable[None]] | None = None,
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
        self._kept_actions = kept_actions
        self._running: dict[str, _Running] = {}
        self._finished: OrderedDict[str, Action] = OrderedDict()
        self._by_idempotency_key: OrderedDict[str, tuple[ActionRequest, str]] = OrderedDict()
        self._waiting: dict[ProcessKey, asyncio.Future[None]] = {}

    def submit(self, request: ActionRequest, *, requested_by: str, idempotency_key: str | None = None) -> Action:
        """Begin an action; it may be finished at once (a dry run, or nobody who can do it).

        Raises:
            ActionNotAllowedError: the exporter's operator leaves this action out.
            TargetNotFoundError: no reporting process matches.
            GroupIncompleteError: a rank of the group cannot take part.
            TooManyActionsError: the caller, or a process, has had its share.
            IdempotencyConflictError: the key was used for another request.
        """
        if idempotency_key is not None and idempotency_key in self._by_idempotency_key:
            first, action_id = self._by_idempotency_key[idempotency_key]
            known = self.get(action_id)
            if known is not None:
                if first != request:
                    raise IdempotencyConflictError(
                        f"Idempotency-Key {idempotency_key!r} came before with another request (action {action_id})"
                    )
                return known
        if request.action not in self._allowed:
            raise ActionNotAllowedError(
                f"{request.action} is not allowed here; --action.allow has {', '.join(sorted(self._allowed)) or 'none'}"
            )
        snapshot = self._store.snapshot(self._clock())
        targets = list(request.target.select(snapshot))
        listed = list(request.target.select_listed(snapshot)) if request.action == "terminate" else []
        if not targets and not listed:
            raise TargetNotFoundError(request.target.mismatch(snapshot))
        at_step = None
        if request.group:
            targets = group_of(targets, snapshot)
            at_step = group_step(request, targets, self._clock())
        if not request.dry_run:
            names: list[tuple[Hashable, str]] = [(process.key, who(pid, process)) for pid, process, _ in targets]
            names += [(other.pid, f"pid {other.pid}") for other in listed]
            self._limits.take(_caller(requested_by), names)
        action = Action(
            id=uuid.uuid4().hex,
            action=request.action,
            state="queued",
            requested_by=requested_by,
            created_unix_seconds=self._wall_clock(),
            target=request.target,
            mode=request.mode,
            group=request.group,
            at_step=at_step,
            dry_run=request.dry_run,
            reason=request.reason,
        )
        if idempotency_key is not None:
            self._by_idempotency_key[idempotency_key] = (request, action.id)
            while len(self._by_idempotency_key) > self._kept_actions:
                self._by_idempotency_key.popitem(last=False)
        running = _Running(action, self._clock(), {}, asyncio.Event(), asyncio.Event())
        self._running[action.id] = running
        if self._before_release is None or request.dry_run:
            running.released.set()
        for pid, process, samples in targets:
            if request.action == "terminate":
                self._end(running, victim(pid, process, snapshot))
            else:
                self._begin(running, request, pid, process, samples, snapshot)
        for other in listed:
            self._end(running, Victim(other.pid, "", "", other.pid, other.start_time_ticks, other.used_bytes))
        self._finish_if_complete(running)
        if self._before_release is not None and not running.released.is_set():
            meant = [(pid, process.report.process.workload, process.report.process.rank) for pid, process, _ in targets]
            meant += [(other.pid, "", "") for other in listed]
            asked = Asked(running.action, request, idempotency_key, tuple(meant))
            self._spawn(self._release_after(running, self._before_release(asked)))
        return running.action

    def recall(self, action: Action, asked: Asked | None) -> None:
        """Remember an action that has finished before this dispatcher began, and how it was asked for.

        Those of before are told newest first, and push out none of this run's.
        """
        if self.get(action.id) is not None or len(self._finished) >= self._kept_actions:
            return
        self._finished[action.id] = action
        self._finished.move_to_end(action.id, last=False)
        if asked is not None and asked.idempotency_key is not None:
            self._by_idempotency_key.setdefault(asked.idempotency_key, (asked.request, action.id))

    async def wait(self, action_id: str, timeout_seconds: float) -> Action:
        """The action when it is finished, or as it stands when the time is over.

        Raises:
            KeyError: there is no such action.
        """
        running = self._running.get(action_id)
        if running is not None and timeout_seconds > 0:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(running.finished.wait(), timeout_seconds)
        action = self.get(action_id)
        if action is None:
            raise KeyError(action_id)
        return action

    async def commands(self, process: ReportingProcess, hold_seconds: float) -> tuple[Command, ...]:
        """The commands that wait for this process: now, or as soon as there is one, or none after `hold_seconds`.

        Returns early with none when there is something to cancel there: see `cancelled`. A second call for the same
        process ends the first with none: only one of them can be alive. Cancelling the call is safe.
        """
        pending = self._pending(process)
        if not pending and hold_seconds > 0:
            earlier = self._waiting.pop(process.key, None)
            if earlier is not None and not earlier.done():
                earlier.set_result(None)
            waiting = asyncio.get_running_loop().create_future()
            self._waiting[process.key] = waiting
            try:
                await asyncio.wait_for(waiting, hold_seconds)
            except asyncio.TimeoutError:
                return ()
            finally:
                if self._waiting.get(process.key) is waiting:
                    del self._waiting[process.key]
            pending = self._pending(process)
        return tuple(self._deliver(running, order) for running, order in pending)

    def cancelled(self, process: ReportingProcess) -> tuple[str, ...]:
        """Of the commands that wait in a process, those that it is to forget."""
        return tuple(
            command_id
            for command_id in process.report.waiting
            if (order := self._order(command_id, process)) is None or order.cancelled
        )

    def take_results(self, process: ReportingProcess) -> None:
        """Take what a process' report says of its commands; results of unknown or finished ones are ignored."""
        for command_id in process.report.waiting:
            order = self._order(command_id, process)
            if order is not None:
                order.delivered = order.held = True
        for result in process.report.results:
            running = self._running.get(result.id)
            order = running.orders.get(process.key) if running is not None else None
            if running is None or order is None or not _same_process(order.process, process):
                continue
            del running.orders[process.key]
            if order.cancelled and result.outcome == "refused" and result.reason.startswith("cancelled"):
                result = replace(result, reason=running.called_off)
            self._add(running, rows(order.pid, process, order.samples, result, self._gpu_labels()))
            if result.outcome != "done" and running.action.group:
                self._call_off(running, _NOT_ALL)
            self._finish_if_complete(running)

    def cancel(self, action_id: str, *, requested_by: str) -> Action | None:
        """Take back what has not begun of an action, and return it as it stands; None if it is not known.

        Who waits for the end of a step or for a rest forgets it; what has been handed out to run now may run, and a
        process that is being ended stays so. The results tell which is which.
        """
        running = self._running.get(action_id)
        if running is not None:
            self._call_off(running, f"cancelled by {requested_by}")
        return self.get(action_id)

    def process_gone(self, key: ProcessKey, reason: str) -> None:
        """Give up what waits for a process that has gone."""
        self._release(key)
        for running in list(self._running.values()):
            order = running.orders.get(key)
            if order is not None:
                self._give_up(running, order, "gone", reason)

    def expire(self) -> None:
        """Give up what came too late; called about once a second."""
        now = self._clock()
        for running in list(self._running.values()):
            if running.action.group and now >= running.started_seconds + GROUP_ANSWER_SECONDS:
                for order in [order for order in running.orders.values() if not order.held]:
                    self._give_up(running, order, "expired", "the process did not ask for work in time for its group")
            for order in list(running.orders.values()):
                if not order.delivered and now >= order.deadline_seconds:
                    self._give_up(running, order, "expired", "the process did not ask for work before the deadline")
                elif now >= order.deadline_seconds + ANSWER_GRACE_SECONDS:
                    self._give_up(
                        running, order, "expired", "delivered, but no answer came in time; it may still be under way"
                    )

    def get(self, action_id: str) -> Action | None:
        """An action as it stands now; None if it is not, or no longer, known."""
        running = self._running.get(action_id)
        return running.action if running is not None else self._finished.get(action_id)

    def recent(self) -> tuple[Action, ...]:
        """All remembered actions, newest first."""
        actions = [*self._finished.values(), *(running.action for running in self._running.values())]
        return tuple(sorted(actions, key=lambda action: action.created_unix_seconds, reverse=True))

    def note(self, action: str, *, requested_by: str, reason: str) -> Action:
        """Write down among the actions what was asked of the exporter itself and needs no process."""
        noted = Action(uuid.uuid4().hex, action, "done", requested_by, self._wall_clock(), Target(), reason=reason)
        self._remember(noted)
        return noted

    def under_way(self) -> set[ProcessKey]:
        """The processes that something waits for, or runs in, at the moment."""
        return {key for running in self._running.values() for key in running.orders}

    def held(self) -> int:
        """How many requests are being held right now."""
        return len(self._waiting)

    def _begin(
        self,
        running: _Running,
        request: ActionRequest,
        pid: int | str,
        process: ReportingProcess,
        samples: tuple[DeviceSample, ...],
        snapshot: Snapshot,
    ) -> None:
        every_device = request.action not in _OF_DEVICES or not (request.target.gpu or request.target.uuid)
        if every_device:
            samples = process.report.devices
        if request.dry_run:
            self._add(running, dry_rows(pid, process, samples, request, gpu_labels(snapshot)))
            return
        command = Command(
            id=running.action.id,
            action=request.action,
            deadline_seconds=request.deadline_seconds,
            # Not by name: the process may have come to another device since it reported.
            uuids=() if every_device else tuple(sample.uuid for sample in samples),
            collect_garbage=request.collect_garbage,
            mode=request.mode,
            at_step=running.action.at_step,
            fraction=request.fraction,
            force=request.force,
        )
        order = _Order(command, pid, process, samples, running.started_seconds + request.deadline_seconds)
        lacking = lack(process, request)
        if lacking:
            refusal = CommandResult(command.id, "unsupported", lacking)
            self._add(running, rows(pid, process, samples, refusal, gpu_labels(snapshot)))
            return
        running.orders[process.key] = order
        if running.released.is_set():
            self._release(process.key)

    def _end(self, running: _Running, victim: Victim) -> None:
        """Terminate a process, unless something speaks against it."""
        objection = self._terminator.objection(victim.host_pid, victim.start_time_ticks)
        if objection or victim.host_pid is None:
            self._add(running, ended_rows(victim, CommandResult("", "refused", objection), self._gpu_labels()))
            return
        if running.action.dry_run:
            self._add(running, ended_rows(victim, CommandResult("", "done", "would be ended"), self._gpu_labels()))
            return

        async def end(host_pid: int) -> None:
            await running.released.wait()
            try:
                if running.called_off:
                    result = CommandResult(running.action.id, "refused", running.called_off)
                else:
                    result = await self._terminator.end(running.action.id, host_pid, victim.start_time_ticks)
            except Exception as error:  # noqa: BLE001 - whatever it is, the action has an end
                result = CommandResult(running.action.id, "failed", f"{type(error).__name__}: {error}"[:500])
            running.ending -= 1
            self._add(running, ended_rows(victim, result, self._gpu_labels()))
            self._finish_if_complete(running)

        running.ending += 1
        running.action = replace(running.action, state="running")
        self._spawn(end(victim.host_pid))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _release_after(self, running: _Running, ready: Awaitable[None]) -> None:
        try:
            await ready
        finally:
            running.released.set()
            for order in running.orders.values():
                self._release(order.process.key)

    def _pending(self, process: ReportingProcess) -> list[tuple[_Running, _Order]]:
        now = self._clock()
        return [
            (running, order)
            for running in self._running.values()
            if running.released.is_set()
            and (order := running.orders.get(process.key)) is not None
            and _same_process(order.process, process)
            and not order.held
            and not order.cancelled
            and now < order.deadline_seconds
        ]

    def _order(self, command_id: str, process: ReportingProcess) -> _Order | None:
        running = self._running.get(command_id)
        order = running.orders.get(process.key) if running is not None else None
        return order if order is not None and _same_process(order.process, process) else None

    def _release(self, key: ProcessKey) -> None:
        """Have the held request of a process answered now."""
        waiting = self._waiting.get(key)
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    def _call_off(self, running: _Running, reason: str) -> None:
        """Whoever has not begun is to forget it."""
        if running.called_off:
            return
        running.called_off = reason
        for order in list(running.orders.values()):
            if order.delivered:
                order.cancelled = True
                self._release(order.process.key)
            else:
                self._give_up(running, order, "refused", reason)

    def _deliver(self, running: _Running, order: _Order) -> Command:
        order.delivered = True
        running.action = replace(running.action, state="running")
        return replace(order.command, deadline_seconds=max(0.0, order.deadline_seconds - self._clock()))

    def _give_up(self, running: _Running, order: _Order, outcome: str, reason: str) -> None:
        if running.orders.get(order.process.key) is not order:
            return  # given up already, with another of its group
        del running.orders[order.process.key]
        result = CommandResult(running.action.id, outcome, reason)
        self._add(running, rows(order.pid, order.process, order.samples, result, self._gpu_labels()))
        if running.action.group:
            self._call_off(running, _NOT_ALL)
        self._finish_if_complete(running)

    def _add(self, running: _Running, rows: Iterator[ActionResult]) -> None:
        running.action = replace(running.action, results=(*running.action.results, *rows))

    def _finish_if_complete(self, running: _Running) -> None:
        if running.orders or running.ending or running.action.id not in self._running:
            return
        del self._running[running.action.id]
        action = replace(
            running.action,
            state=_final_state(running.action.results),
            duration_seconds=self._clock() - running.started_seconds,
        )
        running.action = action
        self._remember(action)
        running.finished.set()
        self._on_finished(action)

    def _remember(self, action: Action) -> None:
        self._finished[action.id] = action
        while len(self._finished) > self._kept_actions:
            self._finished.popitem(last=False)

    def _gpu_labels(self) -> dict[str, str]:
        return gpu_labels(self._store.snapshot(self._clock()))


def _same_process(one: ReportingProcess, other: ReportingProcess) -> bool:
    """The same process, and the same program in it: an exec has another session."""
    a, b = one.report.process, other.report.process
    return (a.start_time_ticks, a.session) == (b.start_time_ticks, b.session)


def _final_state(results: tuple[ActionResult, ...]) -> str:
    outcomes = {result.outcome for result in results}
    if outcomes <= {"done"}:
        return "done"
    return "expired" if outcomes <= {"done", "expired"} else "failed"


def _caller(requested_by: str) -> str:
    """Whose share it is: a user over the socket has many pids."""
    return requested_by.partition(":pid=")[0]
