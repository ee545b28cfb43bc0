"""Actions wait until inference engines have started. Used on the event loop only.

Memory that another process releases while an engine starts makes the start fail: see `core.starting_engines`. So an
action that releases memory to the driver waits within its deadline, and is refused at the deadline.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from gpumem_client.wire.protocol import CommandResult
from gpumem_client.wire.reason_codes import ReasonCode
from gpumem_exporter.actions.action import EngineWait
from gpumem_exporter.actions.action_options import ActionRequest
from gpumem_exporter.actions.lifecycle import ActionRegistry, CommandPart, Part, PartState, RunningAction
from gpumem_exporter.actions.selection import OutsideTarget, SelectedProcess, Selection
from gpumem_exporter.core.caller import Caller
from gpumem_exporter.core.naming import json_pid
from gpumem_exporter.core.samples import ReportingProcess, Snapshot, StartingEngine
from gpumem_exporter.core.store import Store
from gpumem_exporter.errors import ActionForbiddenError

# The actions that release memory to the driver or take memory from it. A garbage collection leaves the memory in the
# allocator's cache, and a fraction releases nothing, with or without force.
_DISTURBING = frozenset({"empty_cache", "terminate", "release_memory", "resume_memory"})
_MAX_NAMED = 4


def _starts_on(
    request: ActionRequest, caller: Caller, uuids: Iterable[str], snapshot: Snapshot, ended: Iterable[int | None]
) -> tuple[StartingEngine, ...]:
    """Return the engines that start on these devices and whose start this action must not spoil.

    `ended` are the host pids that the action terminates, or the engine that it addresses: their own start does not
    matter.
    """
    if request.action not in _DISTURBING or not snapshot.starting:
        return ()
    devices, pids = set(uuids), set(() if request.action == "empty_cache" else ended)
    # With `force`, the caller accepts that the start of an engine fails. It may do so for its own engine, or if it may
    # act on every process.
    return tuple(
        engine
        for engine in snapshot.starting
        if engine.uuid in devices
        and (engine.host_pid is None or engine.host_pid not in pids)
        and not (request.force and _may_spoil(caller, engine))
    )


def starts_for(
    request: ActionRequest,
    caller: Caller,
    one: SelectedProcess | OutsideTarget,
    outside: Iterable[OutsideTarget],
    snapshot: Snapshot,
) -> tuple[StartingEngine, ...]:
    """Return the engines that an action waits for on one of its processes; `outside` are all that it terminates."""
    if isinstance(one, OutsideTarget):
        uuids, ended = [uuid for uuid, _ in one.used_bytes], [target.host_pid for target in outside]
        return _starts_on(request, caller, uuids, snapshot, ended)
    return _starts_on(request, caller, _devices_of(one.process, snapshot), snapshot, [one.process.host_pid])


def describe_starts(
    request: ActionRequest,
    caller: Caller,
    processes: Sequence[ReportingProcess],
    ended: Iterable[int | None],
    snapshot: Snapshot,
) -> str:
    """Name the engines whose start an action on these processes would spoil; empty if there is none."""
    uuids = {uuid for process in processes for uuid in _devices_of(process, snapshot)} if snapshot.starting else ()
    starting = _starts_on(request, caller, uuids, snapshot, ended)
    return _describe(_waits(starting, snapshot)) if starting else ""


def _devices_of(process: ReportingProcess, snapshot: Snapshot) -> set[str]:
    """Return the devices that a process reports, and the devices on which the driver lists it."""
    listed = {
        device.uuid
        for device in (snapshot.node.devices if snapshot.node is not None else ())
        for each in device.processes or ()
        if each.pid == process.host_pid
    }
    return listed | {sample.uuid for sample in process.report.devices}


def _waits(
    engines: Iterable[StartingEngine],
    snapshot: Snapshot,
    *,
    unix_offset_seconds: float = 0.0,
    viewer: Caller | None = None,
) -> tuple[EngineWait, ...]:
    """Describe starting engines, each once for each device, with the time at which it counts as started at the latest.

    `unix_offset_seconds` is the time of the Unix epoch at zero of the snapshot's clock. The identities of other users'
    processes are hidden from `viewer`.
    """
    names = {process.key: name for name, process in snapshot.names.reporting}
    found: dict[tuple[int | str, str], EngineWait] = {}
    # An engine may be known by its title and by its report: the entry that counts for longer is shown.
    for engine in sorted(engines, key=lambda each: each.until_seconds):
        reporter, facts = engine.reporter, None
        if engine.host_pid is not None and snapshot.node is not None:
            facts = snapshot.node.facts.get(engine.host_pid)
        name = names.get(reporter.key) if reporter is not None else None
        pid = json_pid(name) if name is not None else engine.host_pid or (reporter.key.pid if reporter else 0)
        hidden = viewer is not None and not _may_spoil(viewer, engine)
        title = "" if hidden else (facts.command if facts is not None else "") or engine.title
        until_unix_seconds = unix_offset_seconds + engine.until_seconds
        found[pid, engine.uuid] = EngineWait(pid, title, engine.gpu, engine.uuid, until_unix_seconds)
    return tuple(found.values())


def _describe(waiting: Sequence[EngineWait]) -> str:
    """Name the engines: `the engine in pid 4711 (VLLM::EngineCore) starts on GPU 0`."""
    named = [
        f"the engine in pid {each.pid}{f' ({each.title})' if each.title else ''} starts on GPU {each.gpu or each.uuid}"
        for each in waiting[:_MAX_NAMED]
    ]
    more = len(waiting) - _MAX_NAMED
    return ", ".join([*named, *([f"and {more} more"] if more > 0 else [])])


def _may_spoil(caller: Caller, engine: StartingEngine) -> bool:
    """Return whether an engine is the caller's own, or the caller may act on every process."""
    if engine.reporter is not None:
        return caller.may_act_on(engine.reporter)
    return caller.may_act_on_listed(engine.owner_uid)


@dataclass(frozen=True, slots=True)
class EngineStarts:
    """Continues blocked parts, ends them at their deadline, and withdraws commands that an engine start overtakes."""

    store: Store
    actions: ActionRegistry
    unix_offset_seconds: Callable[[], float]
    """Returns the time of the Unix epoch at zero of the store's clock."""
    hide_identities: bool
    """Whether the titles of others' engines are hidden from callers without all rights."""

    def seen_by(self, caller: Caller, starting: Sequence[StartingEngine], snapshot: Snapshot) -> tuple[EngineWait, ...]:
        """Return engines as the caller of an action sees them."""
        viewer = caller if self.hide_identities else None
        return _waits(starting, snapshot, unix_offset_seconds=self.unix_offset_seconds(), viewer=viewer)

    def admit(self, request: ActionRequest, caller: Caller, selection: Selection) -> tuple[StartingEngine, ...]:
        """Return the engines that an action waits for.

        Raises ActionForbiddenError if `force` is not sufficient: engines of other users, as of `_starts_on`, start.
        """
        snapshot = selection.snapshot
        targets, commanded = selection.outside_targets(request.action), selection.commanded(request.action)
        devices = {uuid for target in targets for uuid, _ in target.used_bytes}
        devices.update(uuid for selected in commanded for uuid in _devices_of(selected.process, snapshot))
        ended = [*(target.host_pid for target in targets), *(selected.process.host_pid for selected in commanded)]
        starting = _starts_on(request, caller, devices, snapshot, ended)
        if request.force and starting:
            waiting = self.seen_by(caller, starting, snapshot)
            raise ActionForbiddenError(
                f"{_describe(waiting)}, and memory that is released meanwhile can end its start. For the engine of "
                f"another user, {request.action} with force needs {caller.missing_rights}. Without force, the action "
                "waits until the engine has started"
            )
        return starting

    def refusal(self, running: RunningAction, starting: Sequence[StartingEngine], snapshot: Snapshot) -> CommandResult:
        """Return the result of a part that does not run because these engines start."""
        waiting = self.seen_by(running.caller, starting, snapshot)
        latest = time.gmtime(max((each.until_unix_seconds for each in waiting), default=0.0))
        reason = (
            f"{_describe(waiting)}, and memory that is released meanwhile can end its start. It counts as started at "
            f"{time.strftime('%H:%M:%S UTC', latest)} at the latest; use a longer --deadline to wait for it, or --force"
        )
        return CommandResult(running.action.id, "refused", reason, ReasonCode.ENGINE_STARTING)

    def show(self, running: RunningAction, starting: Sequence[StartingEngine], snapshot: Snapshot) -> None:
        """Show in an action for which engines it waits."""
        deadline_unix_seconds = running.action.created_unix_seconds + running.action.deadline_seconds
        waiting = tuple(
            replace(each, until_unix_seconds=min(each.until_unix_seconds, deadline_unix_seconds))
            for each in self.seen_by(running.caller, starting, snapshot)
        )
        running.action = replace(running.action, waits_for=waiting)

    def review(self, now: float) -> Iterator[tuple[RunningAction, Part, CommandResult | None]]:
        """Decide again for every part that releases memory; called about once a second, and after each deadline.

        Yields each part that ends, with its result, and each that continues, without one. The caller ends or continues
        it before the next one.
        """
        concerned = [running for running in self.actions.running.values() if running.action.action in _DISTURBING]
        snapshot = self.store.snapshot(now) if concerned else None
        for running in concerned:
            if snapshot is not None and (snapshot.starting or running.blocked):
                yield from self._review_action(running, snapshot, now)

    def _review_action(
        self, running: RunningAction, snapshot: Snapshot, now: float
    ) -> Iterator[tuple[RunningAction, Part, CommandResult | None]]:
        outside = [part.target for part in running.outside]
        starting: dict[int, tuple[StartingEngine, ...]] = {}
        for part in running.parts:
            one = part.selected if isinstance(part, CommandPart) else part.target
            starting[id(part)] = starts_for(running.request, running.caller, one, outside, snapshot)
        for parts in running.groups.values():
            of_group = tuple(dict.fromkeys(each for part in parts for each in starting[id(part)]))
            starting |= dict.fromkeys(map(id, parts), of_group)
        for part in running.parts:
            found = starting[id(part)]
            # Withdrawing one part of a group ends the others.
            if part.state is PartState.ENDED or not (part.blocked or found):
                continue
            if not found:
                yield running, part, None
            elif not part.blocked or now >= part.deadline_seconds:
                yield running, part, self.refusal(running, found, snapshot)
        if not running.action.finished:
            self.show(running, [each for part in running.blocked for each in starting[id(part)]], snapshot)
