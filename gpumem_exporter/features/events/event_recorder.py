"""Converts reports and readings to events and queues them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator

from gpumem_client.wire.errors import StorageError
from gpumem_exporter.core.event import Event, Query, process_subject
from gpumem_exporter.core.recorders import Journal, ProcessRecorder
from gpumem_exporter.core.samples import DeviceReading, NodeReading, ProcessKey, ReportingProcess, Snapshot
from gpumem_exporter.core.store import Store
from gpumem_exporter.features.events.process_events import ProcessHistory, ended_unseen
from gpumem_exporter.node.host import Host

_RETRY_SECONDS = 1.0
_STARTS_WITHOUT_END = Query(after=0, types=("process_started",), last_of_subject=True, limit=1000)
# After a reboot, every process has ended. The queue of events has room for more of one user.
_MAX_ENDS = 256


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


class Recorder(ProcessRecorder):
    """Converts reports and readings to events and queues them. No method waits for the disk.

    The event loop calls all methods except `take_reading`, which the poller's thread calls. `job_of` returns the id of
    a process' job.
    """

    def __init__(
        self,
        log: Journal,
        *,
        report_expiry_seconds: float,
        reading_expiry_seconds: float,
        wall_clock: Callable[[], float],
        job_of: Callable[[ReportingProcess], str],
    ) -> None:
        self._log = log
        self._silent_reason = f"no report for {report_expiry_seconds:g} s"
        self._wall_clock = wall_clock
        self._processes = ProcessHistory(
            report_expiry_seconds=report_expiry_seconds,
            reading_expiry_seconds=reading_expiry_seconds,
            job_of=job_of,
            on_left_out=log.count_left_out,
        )
        self._devices = DeviceHistory()

    def take_report(self, process: ReportingProcess) -> None:
        """Record an accepted report."""
        self._put(self._processes.take_report(process))

    def late_process(self, session: str, owner_uid: int | None) -> ReportingProcess | None:
        """Return the process of a session of this user, with its last report, also if it has ended lately."""
        process = self._processes.of_session(session)
        return process if process is not None and process.owner_uid == owner_uid else None

    def gpu_of(self, uuid: str) -> str | None:
        """Return the NVML index of a device in the last reading."""
        return self._processes.gpus.get(uuid)

    def take_reading(self, reading: NodeReading) -> None:
        """Record a reading of the driver."""
        if reading.up:
            self._processes.take_reading(reading)
            self._put(self._devices.take_reading(reading))

    def processes_ended(self, ended: Iterable[tuple[ProcessKey, str]]) -> None:
        """Record that processes are removed from the store, each with the reason; unknown processes are ignored."""
        self._put(self._processes.remove(ended, self._wall_clock()))

    def running(self, job_id: str) -> list[Event]:
        """Return an event for each reporting process of a job, as if the process ended now."""
        return self._processes.running(job_id, self._wall_clock())

    def workloads(self) -> set[str]:
        """Return the workloads of the reporting processes."""
        return self._processes.workloads()

    def sweep(self, snapshot: Snapshot) -> None:
        """Record the end of processes that the store has dropped; called once a second.

        A silent process has not ended: it may run, and report again.
        """
        kept = {process.key for process in snapshot.processes} | {reporter.key for reporter in snapshot.silent}
        dropped = sorted(self._processes.keys() - kept, key=lambda key: key[:2])  # an owner may be None
        self._put(self._processes.remove([(key, self._silent_reason) for key in dropped], self._wall_clock()))

    async def restore_ends(
        self, store: Store, host: Host, *, clock: Callable[[], float], silent_seconds: float
    ) -> None:
        """Record the ends of the processes that reported to an earlier run and ended while no exporter ran.

        A process that the exporter cannot see has ended if it does not report for `silent_seconds`.
        """
        silent_at_seconds = clock() + silent_seconds

        def has_ended(event: Event) -> bool:
            host_pid = event.detail["host_pid"]
            if host_pid is None:
                return clock() >= silent_at_seconds
            return not host.alive(host_pid, event.detail["start_time_ticks"])

        started: list[Event] = []
        while clock() < silent_at_seconds:
            try:
                started = await self._log.pages(_STARTS_WITHOUT_END)
                break
            except StorageError:
                await asyncio.sleep(_RETRY_SECONDS)  # an earlier exporter may still use the storage
        # An earlier version did not record the start time, without which a pid is no process.
        started = [event for event in started if "start_time_ticks" in event.detail]
        while started:
            await asyncio.sleep(store.report_expiry_seconds)  # by then each process that runs has reported again
            reported = {process_subject(session) for session in self._processes.sessions()}
            started = [event for event in started if event.subject not in reported]
            ended = [event for event in started if has_ended(event)][:_MAX_ENDS]
            reason = "the process exited while no exporter ran"
            self._put(ended_unseen(event, reason, self._wall_clock()) for event in ended)
            started = [event for event in started if event not in ended]

    def _put(self, events: Iterable[Event]) -> None:
        for event in events:
            self._log.put((event,))
