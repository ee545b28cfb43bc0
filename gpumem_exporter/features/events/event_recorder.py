"""Converts reports, readings and actions to events and queues them; converts events back to actions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, TypeVar

from gpumem_client.wire.errors import StorageError
from gpumem_exporter.actions.declarations import ActionRequest, Target
from gpumem_exporter.actions.model import Action, ActionResult, SubmittedAction
from gpumem_exporter.core.event import ACTION_REQUESTED, PLACE, Event, Query
from gpumem_exporter.core.samples import DeviceReading, NodeReading, ProcessKey, ReportingProcess, Snapshot
from gpumem_exporter.features.events.event_log import EventLog
from gpumem_exporter.features.events.process_events import ProcessHistory, ended_unseen, process_subject
from gpumem_exporter.features.oom.oom_events import OomDeduplicator, oom_subject

if TYPE_CHECKING:
    from gpumem_exporter.features.policy.evaluation import Stop

T = TypeVar("T")

_COMMON = ("id", "action", "requested_by", "caller", "created_unix_seconds", "reason", "mode", "group", "at_step")
_RESULT = (*PLACE, "outcome", "reason", "reason_code", "freed_bytes", "step")

# For a report of an older error, the node has changed since.
_NEAR_SECONDS = 5.0
# The last errors of a process among which an error before a restart of the exporter is found.
_MAX_ERRORS = 100
MAX_RESULTS = 512
"""The maximum number of results in an event. Of more results, it has the first ones and the number of the others."""


class DeviceHistory:
    """Compares each reading with the one before. Not thread-safe."""

    def __init__(self) -> None:
        # The last reading of a driver that answered.
        self._reading: NodeReading | None = None
        # The type of the last event of each device, by subject.
        self._last_types: dict[str, str] = {}

    def take_reading(self, reading: NodeReading) -> list[Event]:
        """Take a reading of a driver that answers, and return its events."""
        changes = [
            event
            for event in _device_changes(self._reading, reading)
            if self._last_types.get(event.subject) != event.type
        ]
        self._reading = reading
        present = {f"device:{device.uuid}" for device in reading.devices}
        self._last_types = {subject: type_ for subject, type_ in self._last_types.items() if subject in present}
        self._last_types.update({event.subject: event.type for event in changes})
        return changes


def _device_changes(before: NodeReading | None, after: NodeReading) -> Iterator[Event]:
    """Return the events for devices that were lost or returned between two readings.

    A device is lost when it stops answering, and it returns when it answers again.
    """
    # A device without an error that is no longer listed was removed on purpose (a GPU was unbound, a MIG device was
    # destroyed). Without an earlier reading, the state of a device is compared with its last event.
    earlier = {device.uuid: device for device in before.devices} if before is not None else {}
    for device in after.devices:
        if not device.uuid:
            continue  # the driver cannot identify the device, so that its return could not be detected
        known = earlier.get(device.uuid)
        if device.up:
            # An exporter that starts while a device is lost has no uuid of it before the device returns.
            if known is None or not known.up:
                only_after = "device_lost" if known is None or device.parent_uuid else ""
                yield _device_event("device_returned", device, after, only_after)
        elif device.parent_uuid:
            # A MIG device may fail once while it is being destroyed, so only the second failure counts.
            if known is not None and not known.up:
                yield _device_event("device_lost", device, after)
        elif known is None or known.up:
            yield _device_event("device_lost", device, after)


def _device_event(type_: str, device: DeviceReading, reading: NodeReading, only_after: str = "") -> Event:
    return Event(
        type_,
        reading.taken_unix_seconds,
        gpu=device.gpu,
        uuid=device.uuid,
        detail={
            "error": device.error or None,
            "name": device.name,
            "pci_bus_id": device.pci_bus_id,
            "driver_version": reading.driver_version,
        },
        subject=f"device:{device.uuid}",
        only_after=only_after,
    )


class Recorder:
    """Converts reports, readings and actions to events and queues them. No method waits for the disk.

    The event loop calls all methods except `take_reading`, which the poller's thread calls. `on_ooms` receives each new
    out-of-memory error, even if it cannot be stored, and `on_left_out` the number of events beyond the limits of their
    process or user. `job_of` returns the id of a process' job, and `device_of` who uses a device beside a process.
    """

    def __init__(
        self,
        log: EventLog,
        *,
        report_expiry_seconds: float,
        reading_expiry_seconds: float,
        wall_clock: Callable[[], float],
        on_ooms: Callable[[Sequence[Event]], None],
        job_of: Callable[[ReportingProcess], str],
        device_of: Callable[[str, str], Mapping[str, Any] | None] = lambda _, __: None,
        on_left_out: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.log = log
        self._silent_reason = f"no report for {report_expiry_seconds:g} s"
        self._wall_clock = wall_clock
        self._on_ooms = on_ooms
        self._on_left_out = on_left_out
        self._job_of = job_of
        self._device_of = device_of
        self._processes = ProcessHistory(
            report_expiry_seconds=report_expiry_seconds,
            reading_expiry_seconds=reading_expiry_seconds,
            job_of=job_of,
            on_left_out=on_left_out,
        )
        self._ooms = OomDeduplicator()
        self._devices = DeviceHistory()
        # By session, the errors that are not committed; a report that repeats them must not be acknowledged before.
        self._uncommitted: dict[str, Future[bool]] = {}

    def take_report(self, process: ReportingProcess) -> Future[bool] | None:
        """Record an accepted report.

        The future is true once the report's out-of-memory errors are committed; None if there is nothing to wait for.
        """
        self._put(self._processes.take_report(process))
        return self.take_ooms(process)

    def late_process(self, session: str, owner_uid: int | None) -> ReportingProcess | None:
        """Return the process of a session of this user, with its last report, also if it has ended lately."""
        process = self._processes.of_session(session)
        return process if process is not None and process.owner_uid == owner_uid else None

    def take_ooms(self, process: ReportingProcess) -> Future[bool] | None:
        """Record the out-of-memory errors of an accepted report; returns what `take_report` does."""
        if not process.report.ooms:
            return None
        session = process.report.process.session
        self._uncommitted = {session: future for session, future in self._uncommitted.items() if not future.done()}
        now = self._wall_clock()
        events = self._ooms.new_events(process, self._processes.gpus, now)
        if events:
            # Before `put`, so that a client that reads the event finds its series.
            self._on_ooms(events)
            stored = self._ooms.within_limit(process.key, events, now)
            self._on_left_out(len(events) - len(stored))
            if stored:
                job = self._job_of(process)
                complete = [replace(event, job=job, detail=self._with_device(event, now)) for event in stored]
                self._uncommitted[session] = self.log.put(complete)
        return self._uncommitted.get(session)

    def _with_device(self, event: Event, now_unix_seconds: float) -> Mapping[str, Any]:
        """Return the detail of an error with its device; without the other jobs there if they may have changed."""
        device = self._device_of(event.uuid, str(event.pid)) if event.uuid is not None else None
        if device is not None and now_unix_seconds - event.time_unix_seconds >= _NEAR_SECONDS:
            device = {"total_bytes": device["total_bytes"]}
        return {**event.detail, "device": device}

    def has_error(self, process: ReportingProcess, number: int) -> bool:
        """Return whether a process has reported this out-of-memory error to this run of the exporter."""
        return self._ooms.knows(process.report.process.session, number)

    async def knows_error(self, process: ReportingProcess, number: int) -> bool:
        """Return whether a process has reported this out-of-memory error, also to an earlier run of the exporter."""
        if self.has_error(process, number):
            return True
        session = process.report.process.session
        try:
            page = await self.log.page(Query(types=("oom",), pid=process.name, limit=_MAX_ERRORS))
        except StorageError:
            return False
        subject = oom_subject(session, number)
        return any((event.subject, event.owner) == (subject, process.key.share) for event in page.events)

    def take_reading(self, reading: NodeReading) -> None:
        """Record a reading of the driver."""
        if reading.up:
            self._processes.take_reading(reading)
            self._put(self._devices.take_reading(reading))

    def processes_ended(self, ended: Iterable[tuple[ProcessKey, str]]) -> None:
        """Record that processes are removed from the store, each with the reason; unknown processes are ignored."""
        self._put(self._processes.remove(ended, self._wall_clock()))

    def reported(self) -> set[str]:
        """Return the subjects of the processes that have reported to this run of the exporter and have not ended."""
        return {process_subject(session) for session in self._processes.sessions()}

    def ended_unseen(self, started: Iterable[Event]) -> None:
        """Record the ends of processes that ended while no exporter ran, by the events of their starts."""
        reason = "the process exited while no exporter ran"
        self._put(ended_unseen(event, reason, self._wall_clock()) for event in started)

    def running(self, job_id: str) -> list[Event]:
        """Return an event for each reporting process of a job, as if the process ended now."""
        return self._processes.running(job_id, self._wall_clock())

    def sweep(self, snapshot: Snapshot) -> None:
        """Record the end of processes that the store has dropped; called once a second.

        A silent process has not ended: it may run, and report again.
        """
        kept = {process.key for process in snapshot.processes} | {reporter.key for reporter in snapshot.silent}
        dropped = sorted(self._processes.keys() - kept, key=lambda key: key[:2])  # an owner may be None
        self._put(self._processes.remove([(key, self._silent_reason) for key in dropped], self._wall_clock()))

    def action_requested(self, submitted: SubmittedAction) -> Future[bool]:
        """Record a requested action; the future is true once the record is committed."""
        return self.log.put([requested_event(submitted)])

    def action_finished(self, action: Action) -> Future[bool] | None:
        """Record a finished action; the future is true once the event is committed. A dry run has no event."""
        if action.dry_run or action.unlisted:
            return None
        return self.log.put([action_event(action, self._wall_clock())])

    def _put(self, events: Iterable[Event]) -> None:
        for event in events:
            self.log.put((event,))


def action_event(action: Action, finished_unix_seconds: float) -> Event:
    """Build the event of a finished action.

    Its columns have the device or the process only if all results have the same one.
    """
    results = action.results
    return Event(
        "action",
        finished_unix_seconds,
        **_about(results),
        owner=action.share,
        detail={
            **_common_detail(action),
            "state": action.state,
            "duration_seconds": action.duration_seconds,
            "freed_bytes": action.freed_bytes,
            "results": [_result(result) for result in results[:MAX_RESULTS]],
            "results_left_out": max(0, len(results) - MAX_RESULTS),
        },
    )


def _result(result: ActionResult) -> dict[str, Any]:
    values = {name: getattr(result, name) for name in _RESULT}
    return {**values, "profile": result.profile} if result.profile else values


def requested_event(submitted: SubmittedAction) -> Event:
    """Build the record of a requested action."""
    request = {name: value for name, value in asdict(submitted.request).items() if name != "target"}
    return Event(
        ACTION_REQUESTED,
        submitted.action.created_unix_seconds,
        pid=_one_of([pid for pid, _, _ in submitted.processes]),
        workload=_one_of(workload for _, workload, _ in submitted.processes),
        rank=_one_of(rank for _, _, rank in submitted.processes),
        owner=submitted.action.share,
        detail={
            **_common_detail(submitted.action),
            "request": request,
            "idempotency_key": submitted.idempotency_key,
            "processes": [list(process) for process in submitted.processes[:MAX_RESULTS]],
            "processes_left_out": max(0, len(submitted.processes) - MAX_RESULTS),
        },
    )


def read_requested(event: Event) -> SubmittedAction:
    """Restore a requested action from its record."""
    detail = event.detail
    action = _action(detail, "queued")
    return SubmittedAction(
        action,
        ActionRequest(target=action.target, **detail["request"]),
        detail["idempotency_key"],
        tuple((pid, workload, rank) for pid, workload, rank in detail["processes"]),
    )


def read_action(event: Event) -> Action:
    """Restore the action from an `action` event, without the results that the event left out."""
    detail = event.detail
    results = tuple(ActionResult(**result) for result in detail["results"])
    return replace(_action(detail, detail["state"]), results=results, duration_seconds=detail["duration_seconds"])


def policy_stopped_event(stop: Stop, stopped_unix_seconds: float, until: str) -> Event:
    """Build the event of a rule that stops acting on a process or the ranks of a workload, because it did not help."""
    return Event(
        "policy_stopped",
        stopped_unix_seconds,
        **_about(stop.action.results),
        owner=stop.action.share,
        detail={
            "rule": stop.rule.name,
            "action": stop.action.action,
            "reason": stop.reason,
            "until": until,
            "tries": [asdict(tried) for tried in stop.tries],
        },
    )


def _common_detail(action: Action) -> dict[str, Any]:
    return {**{name: getattr(action, name) for name in _COMMON}, "target": action.target.document()}


def _action(detail: Mapping[str, Any], state: str) -> Action:
    # An earlier version did not record the caller.
    common = {name: detail[name] for name in _COMMON if name in detail}
    return Action(state=state, target=Target(**detail["target"]), **common)


def _about(results: Sequence[ActionResult]) -> dict[str, Any]:
    """Return an event's columns for these results; a column is None unless all results have the same value."""
    return {name: _one_of([getattr(result, name) for result in results]) for name in PLACE}


def _one_of(values: Iterable[T]) -> T | None:
    """Return the value that all have in common; None if they differ."""
    distinct = set(values)
    return distinct.pop() if len(distinct) == 1 else None
