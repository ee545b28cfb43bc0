"""Releases and resumes the memory of inference engines, and measures what the driver then lists. Event loop only.

An engine whose reporter can speak with it runs the action as a command. With any other engine, the exporter itself
speaks: `Engines` finds it. Only vLLM is offered, because a mistake can end a server, and vLLM is the one whose real
server the tests run.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, TypeVar
from weakref import WeakValueDictionary

from gpumem_client.wire.protocol import CommandResult, denied_by_owner
from gpumem_client.wire.reason_codes import ReasonCode
from gpumem_client.wire.units import human_bytes
from gpumem_exporter.actions.action_options import ActionRequest
from gpumem_exporter.actions.kinds import KINDS
from gpumem_exporter.actions.lifecycle import ActionRegistry, CommandPart, OutsidePart, RunningAction, Waking
from gpumem_exporter.actions.results import DriverValues
from gpumem_exporter.actions.selection import OutsideTarget, SelectedProcess
from gpumem_exporter.core.caller import Caller, CallerKind
from gpumem_exporter.core.naming import json_pid
from gpumem_exporter.core.samples import NodeReading, ReportingProcess
from gpumem_exporter.core.store import Store

MIN_IDLE_SECONDS = 120.0
"""Policies and alerts let no engine sleep that had a request in this time, or whose last request is not known."""
_THREADS = 16
# The number of engines of one user or container that are spoken with at the same time.
_CALLS_OF_OWNER = 4
_ASK_AGAIN_SECONDS = 0.5
_MEASURE_SECONDS = 5.0
_LOOK_SECONDS = 0.05
_MAX_REASON_LENGTH = 500

_log = logging.getLogger(__name__)

T = TypeVar("T")


class EngineRefusedError(Exception):
    """An engine cannot do what is requested, or does not do it; the result gets `code` and `outcome`."""

    def __init__(self, code: str | None, reason: str, *, outcome: str = "refused") -> None:
        super().__init__(reason[:_MAX_REASON_LENGTH])  # it may have what a server of any user says
        self.code = code
        self.outcome = outcome


def no_engine(target: OutsideTarget) -> EngineRefusedError:
    """Return the error for a process that does not belong to vLLM."""
    reason = f"{target.title or target} is not vLLM, and sleep and wake act on no other engine"
    return EngineRefusedError(ReasonCode.NO_ENGINE, reason, outcome="unsupported")


class Activity(NamedTuple):
    """What an engine does."""

    asleep: bool
    """Whether it has released memory that it has not resumed."""
    requests: int | None
    """The number of running and queued requests; None if the engine does not show it."""


class FoundEngine(Protocol):
    """An engine that the exporter can speak with. The methods block for a bounded time and raise EngineRefusedError."""

    name: str
    """Of the product."""

    @property
    def key(self) -> Hashable:
        """The same for all processes that release their memory together."""

    def activity(self) -> Activity:
        """Return what the engine does."""

    def cache_use(self) -> float | None:
        """Return the part of the key-value cache that requests use, from 0 to 1; None if it is not known."""

    def release(self, keep: str | None, force: bool, /) -> None:
        """Release the memory of the engine, except the component `keep`. With `force`, its requests may be aborted."""

    def resume(self) -> None:
        """Take the memory again."""


class Engines:
    """Finds engines. Thread-safe. This one finds none."""

    def is_engine(self, target: OutsideTarget, /) -> bool:  # noqa: ARG002 - for a finder
        """Return whether a process seems to belong to a known engine. Does not block."""
        return False

    def find(self, target: OutsideTarget, /) -> FoundEngine:
        """Find the engine of a process. Blocks for a bounded time; raises EngineRefusedError."""
        raise no_engine(target)


class EngineMemory:
    """Speaks with engines in threads, and measures the effect."""

    def __init__(
        self,
        store: Store,
        actions: ActionRegistry,
        *,
        clock: Callable[[], float],
        poll_soon: Callable[[], None],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._store = store
        self._actions = actions
        self.finder = Engines()
        """Finds engines; a feature replaces it."""
        self._clock = clock
        self._poll_soon = poll_soon
        self._spawn = spawn
        self._threads = asyncio.Semaphore(_THREADS)
        # By share: root of a container can become every uid.
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        # The calls under way and their parts, by action and engine: all processes of an engine sleep together.
        self._calls: dict[tuple[str, Hashable], tuple[asyncio.Task[None], list[OutsidePart]]] = {}
        # By engine: one action at a time asks what it does and changes it.
        self._locks: WeakValueDictionary[Hashable, asyncio.Lock] = WeakValueDictionary()

    def engines_among(self, targets: list[OutsideTarget], others: int) -> list[OutsideTarget]:
        """Return the targets that seem to be engines; all of them if there is no engine, so that the results say so."""
        return [target for target in targets if self.finder.is_engine(target)] or ([] if others else targets)

    def refusal(
        self, running: RunningAction, process: ReportingProcess | None, earlier: Counter[str] | None = None
    ) -> CommandResult | None:
        """Return the result of an action that must not run, as reports and driver show it now; None if it may.

        `earlier` has the bytes by device that earlier processes of the request will take. This process adds its own.
        """
        request = running.request
        denied = "" if process is None else denied_by_owner(process.report.denied_actions, request.action)
        if denied:
            return CommandResult(running.action.id, "refused", denied, ReasonCode.DENIED_BY_OWNER)
        recent = too_recent(request, running.caller, process)
        if recent is not None:
            return CommandResult(running.action.id, "refused", recent, ReasonCode.ENGINE_BUSY)
        if request.action != "resume_memory" or process is None:
            return None
        earlier = Counter() if earlier is None else earlier
        lacking = lacking_memory(process, self._store.newest_reading, self._waking(besides=process) + earlier)
        if lacking is not None and not request.force:
            return CommandResult(running.action.id, "refused", lacking, ReasonCode.DEVICE_MEMORY_SHORT)
        earlier.update(_unmapped(process))
        return None

    def _waking(self, besides: ReportingProcess) -> Counter[str]:
        """Return the bytes by device that waking engines still take: the driver does not list them yet."""
        taken: Counter[str] = Counter()
        for running in self._actions.running.values():
            for waking in [part.waking for part in running.parts if part.waking is not None]:
                if waking.key != besides.key:
                    used = self.used_by(waking.host_pid)
                    taken.update({uuid: max(0, size - used.get(uuid, 0)) for uuid, size in waking.awake_bytes.items()})
        return taken

    def deliver(self, running: RunningAction, part: CommandPart, process: ReportingProcess) -> CommandResult | None:
        """Check a command right before a process gets it for the first time; return the result if it must not run."""
        refusal = self.refusal(running, process)
        if refusal is None:
            part.used_before = self.used_by(process.host_pid)
            if part.command.action == "resume_memory":
                self._wake(part, process)
        return refusal

    def is_read_since(self, seconds: float) -> bool:
        """Return whether the driver was read since then, or has not answered in time."""
        node, late = self._store.newest_reading, self._clock() - seconds >= _MEASURE_SECONDS
        return node is None or not node.up or late or node.taken_seconds - node.duration_seconds >= seconds

    def _wake(self, part: CommandPart | OutsidePart, process: ReportingProcess) -> None:
        """Record what the driver will list for the process of an engine that wakes now."""
        used = self.used_by(process.host_pid)
        awake_bytes = {uuid: size + used.get(uuid, 0) for uuid, size in _unmapped(process).items()}
        part.waking = Waking(process.key, process.host_pid, awake_bytes)

    def no_engine(self, action_id: str, target: OutsideTarget) -> CommandResult | None:
        """Return the result for a process that does not belong to vLLM; None for any other."""
        if self.finder.is_engine(target):
            return None
        error = no_engine(target)
        return CommandResult(action_id, error.outcome, str(error), error.code)

    async def act(self, running: RunningAction, part: OutsidePart) -> tuple[CommandResult, DriverValues | None]:
        """Let the engine of a process release or resume its memory. Return the result, and what the driver lists."""
        action_id, target = running.action.id, part.target
        # The effect is the difference of the driver's values for the process, and never what the engine says.
        started, part.used_before = self._clock(), self.used_by(target.host_pid)
        try:
            denying = self._denying(target, running.action.action)
            engine = await self._call(target, lambda: self._find(target, denying))
            key = action_id, engine.key
            if key in self._calls:
                call, parts = self._calls[key]
                process = self._reporting(target)
                if process is not None and any(each.waking for each in parts):
                    self._wake(part, process)  # its engine wakes already
                parts.append(part)
            else:
                parts = [part]
                call = asyncio.ensure_future(self._drive(running, parts, engine))
                call.add_done_callback(lambda _: self._calls.pop(key, None))
                self._calls[key] = call, parts
            await asyncio.shield(call)  # other processes of the engine wait for the same call
        except EngineRefusedError as error:
            return CommandResult(action_id, error.outcome, str(error), error.code), None
        duration_seconds = self._clock() - started
        if running.action.dry_run:
            return CommandResult(action_id, KINDS[running.action.action].would), DriverValues(part.used_before, None)
        after = await self.used_after(target.host_pid)
        return CommandResult(action_id, "done", duration_seconds=duration_seconds), DriverValues(
            part.used_before, after
        )

    def _denying(self, target: OutsideTarget, action: str) -> list[OutsideTarget]:
        """Return the engine processes of the target's owner that report that their owner does not allow an action."""
        snapshot = self._store.snapshot(self._clock())
        found = (
            OutsideTarget.of(SelectedProcess(json_pid(name), process, ()), snapshot)
            for name, process in snapshot.names.reporting
            if action in process.report.denied_actions and process.key.share == target.share
        )
        return [each for each in found if self.finder.is_engine(each)]

    def _find(self, target: OutsideTarget, denying: Sequence[OutsideTarget]) -> FoundEngine:
        """Find the engine of a process, unless one of its processes denies the action, because it acts as a whole."""
        engine = self.finder.find(target)
        for each in denying:
            if self._key(each) == engine.key:
                reason = f"its engine acts as a whole, and the owner of {each} does not allow that"
                raise EngineRefusedError(ReasonCode.DENIED_BY_OWNER, reason)
        return engine

    def _key(self, target: OutsideTarget) -> Hashable:
        try:
            return self.finder.find(target).key
        except EngineRefusedError:  # it has exited, or the exporter does not reach its engine
            return None

    async def _drive(self, running: RunningAction, parts: Sequence[OutsidePart], engine: FoundEngine) -> None:
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

    async def _is_ready(
        self, request: ActionRequest, target: OutsideTarget, engine: FoundEngine, *, last: bool
    ) -> bool:
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

    async def _change(self, running: RunningAction, parts: Sequence[OutsidePart], engine: FoundEngine) -> None:
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

    def _require_permitted(self, running: RunningAction, part: OutsidePart) -> None:
        """Check a part again, right before its engine acts."""
        process = self._reporting(part.target)
        refusal = self.refusal(running, process)
        if refusal is not None:
            raise EngineRefusedError(refusal.reason_code, refusal.reason)
        part.used_before = self.used_by(part.target.host_pid)
        if process is not None and running.request.action == "resume_memory":
            self._wake(part, process)

    def _reporting(self, target: OutsideTarget) -> ReportingProcess | None:
        """Return the process of a target with its newest report; None if it does not report."""
        reporter = target.reporter
        return reporter and (self._store.find(reporter.key) or reporter)

    async def _call(
        self, target: OutsideTarget, function: Callable[[], T], require: Callable[[], Awaitable[None]] | None = None
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

    def used_by(self, host_pid: int | None) -> Mapping[str, int]:
        """Return the driver's bytes of a process by device, as the last reading has them."""
        return _used_by(self._store.newest_reading, host_pid)

    async def used_after(self, host_pid: int | None) -> Mapping[str, int]:
        """Return the driver's bytes of a process by device, from a reading that starts now; empty if none arrives."""
        return _used_by(await self._new_reading(), host_pid)

    async def _new_reading(self) -> NodeReading | None:
        asked = self._clock()
        self._poll_soon()
        while self._clock() - asked < _MEASURE_SECONDS:
            node = self._store.newest_reading
            if node is not None and node.up and node.taken_seconds - node.duration_seconds >= asked:
                return node
            await asyncio.sleep(_LOOK_SECONDS)
        return None

    def settle(self, running: RunningAction, call_later: Callable[[float, Callable[[], None]], object]) -> None:
        """Measure after the settling time how much of what the engines released is still free, if that is requested."""
        action = running.action
        released = any(result.outcome == "done" and result.freed_bytes for result in action.results)
        if action.settle_seconds > 0 and released and action.action == "release_memory":
            running.action = replace(action, settling=True)
            call_later(action.settle_seconds, lambda: self._spawn(self._settled(running)))

    async def _settled(self, running: RunningAction) -> None:
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


def _require_none_withdrawn(parts: Iterable[OutsidePart]) -> None:
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


def too_recent(request: ActionRequest, caller: Caller, reporter: ReportingProcess | None) -> str | None:
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


def lacking_memory(process: ReportingProcess, node: NodeReading | None, taken: Mapping[str, int]) -> str | None:
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
