"""Decides which actions wait until an inference engine has started. Pure.

Memory that another process releases while an engine starts makes the start fail: see `core.starting_engines`. So an
action that releases memory to the driver waits within its deadline, and is refused at the deadline.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gpumem_client.wire.protocol import CommandResult, ReasonCode
from gpumem_exporter.actions.caller import Caller, Rights
from gpumem_exporter.actions.model import EngineWait
from gpumem_exporter.actions.permission import may_act_on
from gpumem_exporter.actions.results import host_pids
from gpumem_exporter.actions.selection import Selection
from gpumem_exporter.core.naming import Names, json_pid
from gpumem_exporter.core.samples import ReportingProcess, Snapshot, StartingEngine
from gpumem_exporter.errors import ActionForbiddenError

__all__ = ["RELEASING", "StartGuard", "describe", "devices_of", "refusal", "starts_of_selection", "waits"]

RELEASING = frozenset({"empty_cache", "terminate"})
"""The actions that release memory to the driver. A garbage collection leaves it in the allocator's cache, and a
fraction releases nothing, with or without force."""

_MAX_NAMED = 4


@dataclass(frozen=True, slots=True)
class StartGuard:
    """Which starting engines one action waits for.

    Attributes:
        action: the action.
        caller: its caller.
        force: the caller accepts that the start of an engine fails, if the caller may decide that.
    """

    action: str
    caller: Caller
    force: bool = False

    def waits_for(
        self, uuids: Iterable[str], snapshot: Snapshot, host_pids: Iterable[int] = ()
    ) -> tuple[StartingEngine, ...]:
        """Return the engines that start on these devices and whose start this action must not spoil.

        Args:
            uuids: the devices on which the action releases memory.
            snapshot: the state of the node.
            host_pids: the processes of the action. Their own start does not matter if the action terminates them.
        """
        if self.action not in RELEASING:
            return ()
        devices, ended = set(uuids), set(host_pids) if self.action == "terminate" else set()
        return tuple(
            engine
            for engine in snapshot.starting
            if engine.uuid in devices
            and (engine.host_pid is None or engine.host_pid not in ended)
            and not (self.force and _may_spoil(self.caller, engine))
        )

    def require_permission(self, engines: Sequence[StartingEngine], described: str) -> None:
        """Check that `force` is sufficient: it is not for the engines of other users.

        Args:
            engines: the result of `waits_for`.
            described: the engines, for the message.

        Raises:
            ActionForbiddenError: the action has `force`, and an engine of another user starts.
        """
        if self.force and engines:
            raise ActionForbiddenError(
                f"{described}, and memory that is released meanwhile can end its start. For the engine of another "
                f"user, {self.action} with force needs root or the exporter's user, outside of containers, or the "
                f"token of --action.token-file; {self.caller} has the rights {self.caller.rights.value!r}. Without "
                "force, the action waits until the engine has started"
            )


def devices_of(process: ReportingProcess, snapshot: Snapshot) -> set[str]:
    """Return the devices that a process reports, and the devices on which the driver lists it."""
    listed = {
        device.uuid
        for device in (snapshot.node.devices if snapshot.node is not None else ())
        for each in device.processes or ()
        if each.pid == process.host_pid
    }
    return listed | {sample.uuid for sample in process.report.devices}


def starts_of_selection(guard: StartGuard, selection: Selection) -> tuple[StartingEngine, ...]:
    """Return the engines that an action on these processes waits for."""
    snapshot = selection.snapshot
    if guard.action == "terminate":
        targets = selection.termination_targets()
        devices = {uuid for target in targets for uuid, _ in target.used_bytes}
        return guard.waits_for(devices, snapshot, host_pids(targets))
    devices = {uuid for selected in selection.reporting for uuid in devices_of(selected.process, snapshot)}
    return guard.waits_for(devices, snapshot)


def waits(
    engines: Iterable[StartingEngine],
    snapshot: Snapshot,
    *,
    unix_offset_seconds: float = 0.0,
    viewer: Caller | None = None,
) -> tuple[EngineWait, ...]:
    """Describe starting engines, each once for each device, with the time at which it counts as started at the latest.

    Args:
        engines: the engines.
        snapshot: the state of the node.
        unix_offset_seconds: the time of the Unix epoch at zero of the snapshot's clock.
        viewer: a caller from whom the identities of others' processes are hidden; None shows them.
    """
    names = {process.key: name for name, process in Names.of(snapshot).reporting}
    found: dict[tuple[int | str, str], EngineWait] = {}
    # An engine may be known by its title and by its report: the entry that counts for longer is shown.
    for engine in sorted(engines, key=lambda each: each.until_seconds):
        reporter, facts = engine.reporter, None
        if engine.host_pid is not None and snapshot.node is not None:
            facts = snapshot.node.facts.get(engine.host_pid)
        name = names.get(reporter.key) if reporter is not None else None
        pid = json_pid(name) if name is not None else engine.host_pid or (reporter.key.pid if reporter else 0)
        hidden = viewer is not None and not _may_spoil(viewer, engine)
        found[pid, engine.uuid] = EngineWait(
            pid=pid,
            title="" if hidden else (facts.command if facts is not None else "") or engine.title,
            gpu=engine.gpu,
            uuid=engine.uuid,
            until_unix_seconds=unix_offset_seconds + engine.until_seconds,
        )
    return tuple(found.values())


def describe(waiting: Sequence[EngineWait]) -> str:
    """Name the engines: `the engine in pid 4711 (VLLM::EngineCore) starts on GPU 0`."""
    named = [
        f"the engine in pid {each.pid}{f' ({each.title})' if each.title else ''} starts on GPU {each.gpu or each.uuid}"
        for each in waiting[:_MAX_NAMED]
    ]
    more = len(waiting) - _MAX_NAMED
    return ", ".join([*named, *([f"and {more} more"] if more > 0 else [])])


def refusal(action_id: str, waiting: Sequence[EngineWait]) -> CommandResult:
    """Return the result of an action that does not run because these engines start."""
    latest = time.gmtime(max((each.until_unix_seconds for each in waiting), default=0.0))
    reason = (
        f"{describe(waiting)}, and memory that is released meanwhile can end its start. It counts as started at "
        f"{time.strftime('%H:%M:%S UTC', latest)} at the latest; use a longer --deadline to wait for it, or --force"
    )
    return CommandResult(action_id, "refused", reason, ReasonCode.ENGINE_STARTING)


def _may_spoil(caller: Caller, engine: StartingEngine) -> bool:
    """Return whether an engine is the caller's own, or the caller may act on every process."""
    if caller.rights is not Rights.OWN:
        return caller.rights is Rights.ALL
    if engine.reporter is not None:
        return may_act_on(caller, engine.reporter)
    # The driver's list has no place: only a user outside of containers owns its processes wherever they run.
    return caller.place.here and caller.uid is not None and engine.owner_uid == caller.uid
