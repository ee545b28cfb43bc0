"""Releases and resumes the memory of vLLM, and measures what the driver then lists. Event loop only.

An engine whose reporter can speak with it runs the action as a command. With any other engine, the exporter itself
speaks. Only vLLM is offered, because a mistake can end a server, and vLLM is the one whose real server the tests run.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from gpumem_client.wire.protocol import CommandResult, denied_by_owner
from gpumem_client.wire.reason_codes import ReasonCode
from gpumem_client.wire.units import human_bytes
from gpumem_exporter.actions.action import EngineWait
from gpumem_exporter.actions.action_options import ActionRequest
from gpumem_exporter.actions.engines import MIN_IDLE_SECONDS, Engines
from gpumem_exporter.actions.kinds import KINDS
from gpumem_exporter.actions.lifecycle import ActionRegistry, Part, RunningAction
from gpumem_exporter.actions.results import DriverValues
from gpumem_exporter.actions.selection import SelectedProcess, processes_of
from gpumem_exporter.core.caller import Caller, CallerKind
from gpumem_exporter.core.readings import NodeReading
from gpumem_exporter.core.samples import ReportingProcess, Snapshot
from gpumem_exporter.core.store import Store
from gpumem_exporter.features.engines.engine_control import EngineControl, no_engine
from gpumem_exporter.features.engines.engine_starts import engines_to_wait_for
from gpumem_exporter.features.engines.vllm import EngineRefusedError, Vllm

_THREADS = 16
# The number of engines of one user or container that are spoken with at the same time.
_CALLS_OF_OWNER = 4
_ASK_AGAIN_SECONDS = 0.5
_MEASURE_SECONDS = 5.0
_LOOK_SECONDS = 0.05

_log = logging.getLogger(__name__)

T = TypeVar("T")


class EngineMemory(Engines):
    """Speaks with engines in threads, and measures the effect.

    `finder` finds the engines that the exporter itself speaks with; None finds none. With `hide_identities`, callers
    without all rights see no titles of other users' engines.
    """

    def __init__(
        self,
        store: Store,
        actions: ActionRegistry,
        finder: EngineControl | None,
        *,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        poll_soon: Callable[[], None],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        hide_identities: bool,
    ) -> None:
        self._store = store
        self._actions = actions
        self._finder = finder
        self._clock = clock
        self._wall_clock = wall_clock
        self._poll_soon = poll_soon
        self._spawn = spawn
        self._hide_identities = hide_identities
        self._threads = asyncio.Semaphore(_THREADS)
        # By share: root of a container can become every uid.
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        # The calls under way and their parts, by action and engine: all processes of an engine sleep together.
        self._calls: dict[tuple[str, Hashable], tuple[asyncio.Task[None], list[Part]]] = {}
        # By engine: one action at a time asks what it does and changes it.
        self._locks: WeakValueDictionary[Hashable, asyncio.Lock] = WeakValueDictionary()

    def waits_for(
        self,
        request: ActionRequest,
        caller: Caller,
        one: SelectedProcess,
        outside: AbstractSet[int | None],
        snapshot: Snapshot,
    ) -> tuple[EngineWait, ...]:
        """Return the engines that must have started before the action may act on a process."""
        return engines_to_wait_for(
            request,
            caller,
            one,
            outside,
            snapshot,
            unix_offset_seconds=self._wall_clock() - self._clock(),
            hide_identities=self._hide_identities,
        )

    def refusals(self, running: RunningAction) -> Mapping[Hashable, CommandResult | None]:
        """Return the processes that take part, each with the result if it must not run."""
        # The bytes by device that the engines of this request will take.
        taken: Counter[str] = Counter()
        outside = {part.key: part.target for part in running.parts.values() if not part.commanded}
        others = {key: no_engine(target) for key, target in outside.items() if not self._is_engine(target)}
        if others.keys() == running.parts.keys():  # the results say so
            return {key: CommandResult("", error.outcome, str(error), error.code) for key, error in others.items()}
        engines = [part for part in running.parts.values() if part.key not in others]
        return {part.key: self._refusal(running, part.target.reporter, taken) for part in engines}

    def _is_engine(self, target: SelectedProcess) -> bool:
        return self._finder is not None and self._finder.is_engine(target)

    def _refusal(
        self, running: RunningAction, process: ReportingProcess | None, earlier: Counter[str] | None = None
    ) -> CommandResult | None:
        """Return the result of an action that must not run, as reports and driver show it now; None if it may.

        `earlier` has the bytes by device that earlier processes of the request will take. This process adds its own.
        """
        request = running.request
        denied = "" if process is None else denied_by_owner(process.report.denied_actions, request.action)
        if denied:
            return CommandResult("", "refused", denied, ReasonCode.DENIED_BY_OWNER)
        recent = _too_recent(request, running.caller, process)
        if recent is not None:
            return CommandResult("", "refused", recent, ReasonCode.ENGINE_BUSY)
        if request.action != "resume_memory" or process is None:
            return None
        earlier = Counter() if earlier is None else earlier
        lacking = _lacking_memory(process, self._store.newest_reading, self._waking(besides=process) + earlier)
        if lacking is not None and not request.force:
            return CommandResult("", "refused", lacking, ReasonCode.DEVICE_MEMORY_SHORT)
        earlier.update(_unmapped(process))
        return None

    def _waking(self, besides: ReportingProcess) -> Counter[str]:
        """Return the bytes by device that waking engines still take: the driver does not list them yet."""
        taken: Counter[str] = Counter()
        for running in self._actions.running.values():
            for part in running.parts.values():
                process = part.target.reporter
                if part.awake_bytes and process is not None and process.key != besides.key:
                    used = self._used_by(self._newest(process).host_pid)
                    taken.update({uuid: max(0, size - used.get(uuid, 0)) for uuid, size in part.awake_bytes.items()})
        return taken

    # An engine whose reporter speaks with it

    def deliver(self, part: Part) -> CommandResult | None:
        """Check a command right before a process gets it for the first time; return the result if it must not run."""
        process = self._newest(part.target.process)
        refusal = self._refusal(part.running, process)
        if refusal is None:
            part.used_before = self._used_by(process.host_pid)
            if part.running.request.action == "resume_memory":
                self._wake(part, process)
        return refusal

    def is_read_for(self, part: Part) -> bool:
        """Return whether the driver was read since a process asked for its command, or has not answered in time."""
        if part.asked_seconds is None:
            part.asked_seconds = self._clock()
            self._poll_soon()
        node, late = self._store.newest_reading, self._clock() - part.asked_seconds >= _MEASURE_SECONDS
        return node is None or not node.up or late or node.taken_seconds - node.duration_seconds >= part.asked_seconds

    async def measure(self, part: Part) -> DriverValues:
        """Read the driver, and return what it lists for a process that has run its command."""
        host_pid = self._newest(part.target.process).host_pid
        return DriverValues(part.used_before, _used_by(await self._new_reading(), host_pid))

    def _wake(self, part: Part, process: ReportingProcess) -> None:
        """Record what the driver will list for the process of an engine that wakes now."""
        used = self._used_by(process.host_pid)
        part.awake_bytes = {uuid: size + used.get(uuid, 0) for uuid, size in _unmapped(process).items()}

    # An engine with which the exporter speaks

    async def act(self, part: Part) -> tuple[CommandResult, DriverValues | None]:
        """Let the engine of a process release or resume its memory. Return the result, and what the driver lists."""
        running, target = part.running, part.target
        # The effect is the difference of the driver's values for the process, and never what the engine says.
        started, part.used_before = self._clock(), self._used_by(target.host_pid)
        try:
            denying = self._denying(target, running.request.action)
            engine = await self._call(target, lambda: self._find(target, denying))
            key = running.action.id, engine.key
            if key in self._calls:
                call, parts = self._calls[key]
                process = self._reporting(target)
                if process is not None and any(each.awake_bytes for each in parts):
                    self._wake(part, process)  # its engine wakes already
                parts.append(part)
            else:
                parts = [part]
                call = asyncio.ensure_future(self._drive(running, parts, engine))
                call.add_done_callback(lambda _: self._calls.pop(key, None))
                self._calls[key] = call, parts
            await asyncio.shield(call)  # other processes of the engine wait for the same call
        except EngineRefusedError as error:
            return CommandResult("", error.outcome, str(error), error.code), None
        duration_seconds = self._clock() - started
        if running.request.dry_run:
            return CommandResult("", KINDS[running.request.action].would), DriverValues(part.used_before, None)
        after = _used_by(await self._new_reading(), target.host_pid)
        result = CommandResult("", "done", duration_seconds=duration_seconds)
        return result, DriverValues(part.used_before, after)

    def _denying(self, target: SelectedProcess, action: str) -> list[SelectedProcess]:
        """Return the engine processes of the target's owner that report that their owner does not allow an action."""
        snapshot, is_listed = self._store.snapshot(self._clock()), target.reporter is None
        return [
            each
            for each in processes_of(snapshot).values()
            if each.reporter is not None
            and action in each.reporter.report.denied_actions
            # A process that only the driver lists may be in any container, of which its share does not know.
            and (each.share == target.share or (is_listed and each.owner_uid == target.owner_uid))
            and self._is_engine(each)
        ]

    def _find(self, target: SelectedProcess, denying: Sequence[SelectedProcess]) -> Vllm:
        """Find the engine of a process, unless one of its processes denies the action, because it acts as a whole."""
        if self._finder is None:
            raise no_engine(target)
        engine = self._finder.find(target)
        for each in denying:
            try:
                same = self._finder.find(each).key == engine.key
            except EngineRefusedError:  # it has exited, or the exporter does not reach its engine
                continue
            if same:
                reason = f"its engine acts as a whole, and the owner of {each} does not allow that"
                raise EngineRefusedError(ReasonCode.DENIED_BY_OWNER, reason)
        return engine

    async def _drive(self, running: RunningAction, parts: Sequence[Part], engine: Vllm) -> None:
        """Let an engine act once for its processes; `parts` gets more of them meanwhile."""
        request, deadline_seconds = running.request, parts[0].deadline_seconds
        idle_until = min(deadline_seconds, self._clock() + request.wait_idle_seconds)
        lock = self._locks.setdefault(engine.key, asyncio.Lock())
        while True:
            async with lock:
                _require_none_withdrawn(parts)
                if await self._is_ready(request, parts[0].target, engine, last=self._clock() >= idle_until):
                    await self._change(running, parts, engine)
                    return
            await asyncio.sleep(_ASK_AGAIN_SECONDS)

    async def _is_ready(self, request: ActionRequest, target: SelectedProcess, engine: Vllm, *, last: bool) -> bool:
        """Ask the engine whether it can act now; on the `last` time, requests refuse."""
        activity = await self._call(target, engine.activity)
        if request.action == "resume_memory":
            if not activity.asleep:
                raise EngineRefusedError(ReasonCode.ENGINE_AWAKE, f"{engine.name} does not sleep")
            return True
        if activity.asleep:
            raise EngineRefusedError(ReasonCode.ENGINE_ASLEEP, f"{engine.name} sleeps already")
        if request.force or activity.requests == 0:
            return True
        if activity.requests is None or last:
            raise EngineRefusedError(ReasonCode.ENGINE_BUSY, _busy(engine.name, activity.requests))
        return False

    async def _change(self, running: RunningAction, parts: Sequence[Part], engine: Vllm) -> None:
        """Let the engine act, unless what was true when the action was requested is not true any more."""
        request = running.request

        async def require_start() -> None:
            if not request.dry_run:
                await self._new_reading()
            _require_none_withdrawn(parts)
            if self._clock() >= parts[0].deadline_seconds:
                late = "the deadline passed before the engine could start it"
                raise EngineRefusedError(ReasonCode.DEADLINE_PASSED, late, outcome="expired")
            for part in () if request.dry_run else parts:
                self._require_permitted(running, part)

        if request.dry_run:
            await require_start()
            return
        _log.debug("%s of %s (%s)", request.action, parts[0].target, engine.name)
        if request.action == "release_memory":
            await self._call(parts[0].target, lambda: engine.release(request.keep, request.force), require_start)
        else:
            await self._call(parts[0].target, engine.resume, require_start)

    def _require_permitted(self, running: RunningAction, part: Part) -> None:
        """Check a part again, right before its engine acts."""
        process = self._reporting(part.target)
        refusal = self._refusal(running, process)
        if refusal is not None:
            raise EngineRefusedError(refusal.reason_code, refusal.reason)
        part.used_before = self._used_by(part.target.host_pid)
        if process is not None and running.request.action == "resume_memory":
            self._wake(part, process)

    def _reporting(self, target: SelectedProcess) -> ReportingProcess | None:
        """Return the process of a target with its newest report; None if it does not report."""
        return target.reporter and self._newest(target.reporter)

    def _newest(self, process: ReportingProcess) -> ReportingProcess:
        """Return a process with its newest report."""
        return self._store.find(process.key) or process

    async def _call(
        self, target: SelectedProcess, function: Callable[[], T], require: Callable[[], Awaitable[None]] | None = None
    ) -> T:
        """Run a function that blocks in a thread, in the turn of the target's owner, unless `require` raises then."""
        turn = self._turns.setdefault(target.share, asyncio.Semaphore(_CALLS_OF_OWNER))
        async with turn, self._threads:
            if require is not None:
                await require()
            try:
                return await _in_thread(function)
            except EngineRefusedError:
                raise
            except Exception as error:
                _log.exception("the interface of an engine failed")
                reason = f"{type(error).__name__}: {error}"
                raise EngineRefusedError(ReasonCode.EXCEPTION, reason, outcome="failed") from error

    # What the driver lists

    def _used_by(self, host_pid: int | None) -> Mapping[str, int]:
        """Return the driver's bytes of a process by device, as the last reading has them."""
        return _used_by(self._store.newest_reading, host_pid)

    async def _new_reading(self) -> NodeReading | None:
        asked = self._clock()
        self._poll_soon()
        while self._clock() - asked < _MEASURE_SECONDS:
            node = self._store.newest_reading
            if node is not None and node.up and node.taken_seconds - node.duration_seconds >= asked:
                return node
            await asyncio.sleep(_LOOK_SECONDS)
        return None

    def settle(self, running: RunningAction) -> None:
        """Measure after the settling time how much of what the engines released is still free, if that is requested."""
        action = running.action
        released = any(result.outcome == "done" and result.freed_bytes for result in action.results)
        if running.request.settle_seconds > 0 and released and running.request.action == "release_memory":
            running.action = replace(action, settling=True)
            self._spawn(self._settled(running))

    async def _settled(self, running: RunningAction) -> None:
        await asyncio.sleep(running.request.settle_seconds)
        # The newest reading may be from before the settling time: the driver is read less often, or hangs.
        node = await self._new_reading()
        results = []
        for result in running.action.results:
            before, used = result.driver_before_bytes, None
            if isinstance(result.pid, int):
                used = _used_by(node, result.pid).get(result.uuid)
            if result.freed_bytes is not None and before is not None and used is not None:
                result = replace(result, still_free_bytes=min(result.freed_bytes, max(0, before - used)))
            results.append(result)
        running.action = replace(running.action, results=tuple(results), settling=False)
        self._actions.replace(running.action)


async def _in_thread(function: Callable[[], T]) -> T:
    """Run a function in a thread of its own."""
    # A daemon, unlike the threads of a pool: an engine that hangs must not delay the exit.
    future: Future[T] = Future()

    def run() -> None:
        try:
            result = function()
        except BaseException as error:  # noqa: BLE001 - it is raised again on the event loop
            future.set_exception(error)
        else:
            future.set_result(result)

    future.set_running_or_notify_cancel()  # so that the event loop cannot cancel it before its result
    threading.Thread(target=run, name="gpumem-engine", daemon=True).start()
    return await asyncio.wrap_future(future)


def _require_none_withdrawn(parts: Iterable[Part]) -> None:
    """Raise the withdrawal of any process of an engine, because the engine acts as a whole."""
    for part in parts:
        if part.withdrawal is not None:
            code, reason, outcome = part.withdrawal.reason_code, part.withdrawal.reason, part.withdrawal.outcome
            raise EngineRefusedError(code, reason, outcome=outcome)


def _used_by(node: NodeReading | None, host_pid: int | None) -> dict[str, int]:
    """Return the known bytes of a process by device: 0 only where the driver's list was read and lacks the process."""
    if node is None or not node.up or host_pid is None:
        return {}
    used = {
        device.uuid: {listed.pid: listed.used_bytes for listed in device.processes}.get(host_pid, 0)
        for device in node.devices
        if device.processes is not None
    }
    return {uuid: size for uuid, size in used.items() if size is not None}


def _busy(name: str, requests: int | None) -> str:
    if requests is None:
        return f"{name} does not show whether it has requests; --force aborts them if there are any"
    return f"{name} has {requests} requests; wait for them with --wait-idle, or abort them with --force"


def _too_recent(request: ActionRequest, caller: Caller, reporter: ReportingProcess | None) -> str | None:
    """Return why a policy or an alert must not let an engine sleep; None if it may."""
    automatic = caller.kind in (CallerKind.POLICY, CallerKind.ALERT)
    if request.action != "release_memory" or not automatic or request.force:
        return None
    engine = reporter.report.engine if reporter is not None else None
    if reporter is None or engine is None or engine.idle_seconds is None:
        return "it is not known when the engine had its last request"
    # Requests since the last report are not known.
    if engine.idle_seconds < MIN_IDLE_SECONDS:
        return f"the engine had a request {engine.idle_seconds:.0f} s ago; it is idle after {MIN_IDLE_SECONDS:.0f} s"
    return None


def _lacking_memory(process: ReportingProcess, node: NodeReading | None, taken: Mapping[str, int]) -> str | None:
    """Return which device lacks the memory that an engine needs to wake; None if none is known to.

    `taken` are the bytes by device that other engines will take.
    """
    devices = {device.uuid: device for device in (node.devices if node is not None and node.up else ())}
    for uuid, needed in _unmapped(process).items():
        device, others = devices.get(uuid), taken.get(uuid, 0)
        if device is not None and device.memory is not None and needed > device.memory.free_bytes - others:
            reason = (
                f"the engine needs {human_bytes(needed)} on GPU {device.gpu or uuid}, where "
                f"{human_bytes(device.memory.free_bytes)} are free"
            )
            return reason + (f" and other engines that wake take {human_bytes(others)}" if others else "")
    return None


def _unmapped(process: ReportingProcess) -> dict[str, int]:
    """Return the bytes by device that a process takes when it wakes."""
    return {sample.uuid: sample.unmapped_bytes for sample in process.report.devices if sample.unmapped_bytes}
