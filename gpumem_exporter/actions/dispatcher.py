"""Carries actions to the processes they are meant for and their results back.

An action becomes one command for each process. A command stays pending until its result has come, its deadline has
passed or its process has gone: a reply that was lost on the way is simply given again with the next report, and a
reporter that gets a command twice answers with the first result. Commands are bound to the reporter (pid, namespace,
start time and session), so that none reaches a later process with the same pid, or another program in the same process.

For the event loop only: not thread-safe.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from gpumem_exporter.actions.model import Action, ActionRequest, ActionResult, Target, gpu_labels
from gpumem_exporter.core.naming import Names
from gpumem_exporter.core.samples import ProcessKey, ReportingProcess, Snapshot
from gpumem_exporter.core.store import Store
from gpumem_exporter.errors import ActionNotAllowedError, IdempotencyConflictError, TargetNotFoundError
from gpumem_exporter.protocol import Command, CommandResult, DeviceResult, DeviceSample

__all__ = ["ANSWER_GRACE_SECONDS", "Dispatcher"]

ANSWER_GRACE_SECONDS = 10.0
"""How long after its deadline a delivered command may still answer: it may have begun just in time."""


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


@dataclass(slots=True)
class _Running:
    """An action that has commands out."""

    action: Action
    started_seconds: float
    orders: dict[ProcessKey, _Order]
    finished: asyncio.Event


class Dispatcher:
    """Takes actions, hands out commands, gathers results.

    Args:
        store: where the targets are looked up.
        allowed: the actions of `--action.allow`.
        clock: monotonic seconds.
        wall_clock: seconds since the epoch.
        on_finished: called once with each action when nothing more will become of it.
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
        kept_actions: int = 1000,
    ) -> None:
        self._store = store
        self._allowed = allowed
        self._clock = clock
        self._wall_clock = wall_clock
        self._on_finished = on_finished
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
        if not targets:
            raise TargetNotFoundError(_what_there_is(request, snapshot))
        action = Action(
            id=uuid.uuid4().hex,
            action=request.action,
            state="queued",
            requested_by=requested_by,
            created_unix_seconds=self._wall_clock(),
            target=request.target,
            dry_run=request.dry_run,
            reason=request.reason,
        )
        if idempotency_key is not None:
            self._by_idempotency_key[idempotency_key] = (request, action.id)
            while len(self._by_idempotency_key) > self._kept_actions:
                self._by_idempotency_key.popitem(last=False)
        running = _Running(action, self._clock(), {}, asyncio.Event())
        self._running[action.id] = running
        for pid, process, samples in targets:
            self._begin(running, request, pid, process, samples, snapshot)
        self._finish_if_complete(running)
        return running.action

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

        A second call for the same process ends the first with none: only one of them can be alive. Cancelling is safe.
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

    def take_results(self, process: ReportingProcess) -> None:
        """Take the results that rode on a process' report; those of unknown or finished commands are ignored."""
        for result in process.report.results:
            running = self._running.get(result.id)
            order = running.orders.get(process.key) if running is not None else None
            if running is None or order is None or not _same_process(order.process, process):
                continue
            del running.orders[process.key]
            self._add(running, _rows(order.pid, process, order.samples, result, self._gpu_labels()))
            self._finish_if_complete(running)

    def process_gone(self, key: ProcessKey, reason: str) -> None:
        """Give up what waits for a process that has gone."""
        waiting = self._waiting.pop(key, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(None)
        for running in list(self._running.values()):
            order = running.orders.get(key)
            if order is not None:
                self._give_up(running, order, "gone", reason)

    def expire(self) -> None:
        """Give up what came too late; called about once a second."""
        now = self._clock()
        for running in list(self._running.values()):
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
        every_device = request.action != "reset_peak" or not (request.target.gpu or request.target.uuid)
        if every_device:
            samples = process.report.devices  # torch clears and collects on every device of the process
        if request.dry_run:
            self._add(running, _dry_rows(pid, process, samples, request, gpu_labels(snapshot)))
            return
        command = Command(
            id=running.action.id,
            action=request.action,
            deadline_seconds=request.deadline_seconds,
            # Not by name: the process may have come to another device since it reported.
            uuids=() if every_device else tuple(sample.uuid for sample in samples),
            collect_garbage=request.collect_garbage,
        )
        order = _Order(command, pid, process, samples, running.started_seconds + request.deadline_seconds)
        if process.report.actions and request.action not in process.report.actions:
            refusal = CommandResult(command.id, "unsupported", f"it runs {', '.join(process.report.actions)}")
            self._add(running, _rows(pid, process, samples, refusal, gpu_labels(snapshot)))
            return
        running.orders[process.key] = order
        waiting = self._waiting.get(process.key)
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    def _pending(self, process: ReportingProcess) -> list[tuple[_Running, _Order]]:
        now = self._clock()
        return [
            (running, order)
            for running in self._running.values()
            if (order := running.orders.get(process.key)) is not None
            and _same_process(order.process, process)
            and now < order.deadline_seconds
        ]

    def _deliver(self, running: _Running, order: _Order) -> Command:
        order.delivered = True
        running.action = replace(running.action, state="running")
        return replace(order.command, deadline_seconds=max(0.0, order.deadline_seconds - self._clock()))

    def _give_up(self, running: _Running, order: _Order, outcome: str, reason: str) -> None:
        running.orders.pop(order.process.key, None)
        result = CommandResult(running.action.id, outcome, reason)
        self._add(running, _rows(order.pid, order.process, order.samples, result, self._gpu_labels()))
        self._finish_if_complete(running)

    def _add(self, running: _Running, rows: Iterator[ActionResult]) -> None:
        running.action = replace(running.action, results=(*running.action.results, *rows))

    def _finish_if_complete(self, running: _Running) -> None:
        if running.orders or running.action.id not in self._running:
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


def _rows(
    pid: int | str,
    process: ReportingProcess,
    samples: tuple[DeviceSample, ...],
    result: CommandResult,
    gpus: dict[str, str],
) -> Iterator[ActionResult]:
    """One row a device that was measured; else one a device that was meant; else one for the process."""
    devices = result.devices or tuple(DeviceResult(sample.uuid) for sample in samples) or (DeviceResult(""),)
    identity = process.report.process
    for device in devices:
        yield ActionResult(
            pid=pid,
            workload=identity.workload,
            rank=identity.rank,
            gpu=gpus.get(device.uuid, ""),
            uuid=device.uuid,
            outcome=result.outcome,
            reason=result.reason,
            reserved_before_bytes=device.reserved_before_bytes,
            reserved_after_bytes=device.reserved_after_bytes,
            allocated_before_bytes=device.allocated_before_bytes,
            allocated_after_bytes=device.allocated_after_bytes,
            freed_bytes=device.freed_bytes,
            device_free_before_bytes=device.device_free_before_bytes,
            device_free_after_bytes=device.device_free_after_bytes,
            duration_seconds=result.duration_seconds,
        )


def _dry_rows(
    pid: int | str,
    process: ReportingProcess,
    samples: tuple[DeviceSample, ...],
    request: ActionRequest,
    gpus: dict[str, str],
) -> Iterator[ActionResult]:
    """What the last report says would come back. What a garbage collection would find cannot be known beforehand."""
    devices = []
    for sample in samples:
        freed = {"empty_cache": sample.reclaimable_bytes, "reset_peak": 0}.get(request.action)
        known = freed is not None and sample.reserved_bytes is not None
        devices.append(
            DeviceResult(
                uuid=sample.uuid,
                reserved_before_bytes=sample.reserved_bytes,
                reserved_after_bytes=sample.reserved_bytes - freed if known else None,  # type: ignore[operator]
                allocated_before_bytes=sample.allocated_bytes,
                freed_bytes=freed,
            )
        )
    return _rows(pid, process, samples, CommandResult("", "done", devices=tuple(devices)), gpus)


def _what_there_is(request: ActionRequest, snapshot: Snapshot) -> str:
    """Why nothing matched, and what could be named instead."""
    reporting = Names.of(snapshot).reporting
    if not reporting:
        return f"nothing matches {request.target.describe()}: no process reports to this exporter"
    shown = [
        f"pid={name}"
        + (f" workload={process.report.process.workload}" if process.report.process.workload else "")
        + (f" rank={process.report.process.rank}" if process.report.process.rank else "")
        for name, process in reporting[:20]
    ]
    more = len(reporting) - len(shown)
    listing = "; ".join(shown) + (f"; and {more} more" if more > 0 else "")
    return f"nothing matches {request.target.describe()}; reporting here: {listing}"
