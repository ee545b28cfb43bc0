"""Converts reports and readings to events and queues them."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from typing import Any

from gpumem_client.wire.protocol import DeviceSample, ProcessIdentity
from gpumem_exporter.core.event import Event, Query, process_subject
from gpumem_exporter.core.ledger import fragmented_bytes
from gpumem_exporter.core.naming import command_of, json_pid
from gpumem_exporter.core.readings import NodeReading, ProcessFacts
from gpumem_exporter.core.recorders import Journal, ProcessRecorder
from gpumem_exporter.core.samples import ProcessKey, ReportingProcess, Snapshot
from gpumem_exporter.core.store import Store
from gpumem_exporter.node.host import Host
from gpumem_exporter.node.job_ids import job_of_process

MAX_STARTS_PER_MINUTE = 1024
"""The maximum number of processes of a user whose start in a minute, and whose end, is an event."""
# What a process used is not known between two values that are further apart, and further than readings or reports may
# be; that time does not count.
_GAP_SECONDS = 60.0
_STARTS_WITHOUT_END = Query(after=0, types=("process_started",), last_of_subject=True, limit=1000)
# A report of a process that has exited is read a moment after its end, or after a pause of the exporter.
_MAX_ENDED = 256
_FACTS = tuple(f.name for f in fields(ProcessFacts) if f.name not in ("pid", "start_time_ticks", "command"))
# What two reports of one process have in common. A session alone is a claim.
_same_process = attrgetter("session", "pid_namespace", "pid", "start_time_ticks")
_JOBS = ("slurm_job_id", "ray_job_id")
_STARTED = ("pid_namespace", "start_time_ticks", "command", "torch_version", "allocator_settings", "client_version")
_SAMPLED = (
    *("allocated_bytes", "reserved_bytes", "reclaimable_bytes", "allocated_peak_bytes", "reserved_peak_bytes"),
    *("alloc_retries", "ooms"),
)


@dataclass(slots=True)
class Size:
    """The last value of a size, the highest one, and the mean, as if it changed steadily from one to the next."""

    last: int | None = None
    seconds: float = 0.0
    """When the last value was taken."""
    highest: int | None = None
    mean: int | None = None
    _byte_seconds: float = 0.0
    _mean_seconds: float = 0.0

    def add(self, value: int | None, now_seconds: float, gap_seconds: float) -> None:
        """Add a value, unless it is unknown; later values have later times."""
        if value is None:
            return
        passed = now_seconds - self.seconds
        if self.last is not None and passed <= gap_seconds:
            self._byte_seconds += (self.last + value) / 2 * passed
            self._mean_seconds += passed
        self.mean = round(self._byte_seconds / self._mean_seconds) if self._mean_seconds else value
        self.highest = max(value, self.highest or 0)
        self.last, self.seconds = value, now_seconds


@dataclass(slots=True)
class _DeviceUsage:
    """The memory of a process on one device. None is unknown."""

    used: Size = field(default_factory=Size)
    """The driver's values; a peak between two polls is not seen."""
    reserved_peak: Size = field(default_factory=Size)
    """The allocator's own peaks, which are exact, over all resets of the peaks."""
    idle_cache: Size = field(default_factory=Size)

    def row(self, sample: DeviceSample | None = None, since_seconds: float = 0.0) -> dict[str, int | None]:
        """Return the values for an event: the last ones, if the driver's is not older than a time, peaks and means."""
        used = self.used.last if self.used.seconds >= since_seconds else None
        reserved = sample.reserved_bytes if sample is not None else None
        return {
            "used_bytes": used,
            **{name: getattr(sample, name, None) for name in _SAMPLED},
            "fragmented_bytes": fragmented_bytes(sample) if sample is not None else None,
            "non_torch_bytes": None if used is None or reserved is None else used - reserved,
            "used_peak_bytes": self.used.highest,
            "used_mean_bytes": self.used.mean,
            "reserved_highest_bytes": self.reserved_peak.highest,
            "idle_cache_mean_bytes": self.idle_cache.mean,
        }


@dataclass(slots=True)
class _TrackedProcess:
    """A process from its first report to its end."""

    process: ReportingProcess
    """The process with its last report, and the samples of the last report that had samples."""
    left_out: bool
    """It has no events, because its user started too many processes."""
    first_report_unix_seconds: float
    facts: ProcessFacts | None = None
    usage: defaultdict[str, _DeviceUsage] = field(default_factory=lambda: defaultdict(_DeviceUsage))
    """By uuid."""

    def job_ids(self) -> dict[str, str | None]:
        """Return the ids of the process' jobs, as it reports them, otherwise as the host does."""
        identity = self.process.report.process
        return {name: getattr(identity, name) or getattr(self.facts, name, None) for name in _JOBS}

    def take_report(self, process: ReportingProcess, gap_seconds: float) -> None:
        """Take the process with a new report."""
        if not process.report.devices:  # as in the final report
            process = replace(process, report=replace(process.report, devices=self.process.report.devices))
        self.process = process
        for sample in process.report.devices:
            usage = self.usage[sample.uuid]
            usage.reserved_peak.add(sample.reserved_peak_bytes, process.received_seconds, gap_seconds)
            usage.idle_cache.add(sample.idle_cache_bytes, process.received_seconds, gap_seconds)


class Recorder(ProcessRecorder):
    """Converts reports and readings to events and queues them. Thread-safe; no method waits for the disk.

    The driver's values that are older than the last report by more than the expiry of a reading are left out.
    """

    def __init__(self, log: Journal, store: Store, *, wall_clock: Callable[[], float]) -> None:
        self._log = log
        self._store = store
        self._wall_clock = wall_clock
        self._gap_seconds = max(_GAP_SECONDS, store.report_expiry_seconds, store.reading_expiry_seconds)
        # The number of readings in a row in which a device failed, by uuid, of the devices in the last reading.
        self._failures: dict[str, int] = {}
        self._lock = threading.Lock()
        # The number of starts in the minute, by `ProcessKey.share`.
        self._minute, self._starts = 0, Counter[str]()
        self._tracked: dict[ProcessKey, _TrackedProcess] = {}
        self._ended: deque[ReportingProcess] = deque(maxlen=_MAX_ENDED)
        # The NVML index of each device by uuid, from the last reading.
        self._gpus: dict[str, str] = {}
        self._reading: NodeReading | None = None
        # The used bytes of each process in the last reading, by host pid and uuid; None if the driver has no value.
        self._used: dict[int, dict[str, int | None]] = {}

    def take_report(self, process: ReportingProcess) -> None:
        """Record an accepted report."""
        process = process.without_messages()
        with self._lock:
            tracked, report = self._tracked.get(process.key), process.report
            if tracked is None or tracked.process.report.process.session != report.process.session:
                # After an exec, a second start of the reporter, or in another process with this pid.
                self._end(process.key, "another reporter took its place", process.received_unix_seconds)
                self._start(process)
            elif report.sequence >= tracked.process.report.sequence:
                tracked.take_report(process, self._gap_seconds)

    def take_reading(self, reading: NodeReading) -> None:
        """Record a reading of the driver."""
        if not reading.up:
            return
        used: defaultdict[int, dict[str, int | None]] = defaultdict(dict)
        for device in reading.devices:
            for listed in device.processes or ():
                used[listed.pid][device.uuid] = listed.used_bytes
        with self._lock:
            self._gpus = {device.uuid: device.gpu for device in reading.devices}
            self._reading, self._used = reading, used
            for tracked in self._tracked.values():
                self._apply_reading(tracked)
        for event in self._device_events(reading):
            self._log.put(event)

    def processes_ended(self, ended: Iterable[tuple[ProcessKey, str]]) -> None:
        """Record that processes are removed from the store, each with the reason; unknown processes are ignored."""
        now_unix_seconds = self._wall_clock()
        with self._lock:
            for key, reason in ended:
                self._end(key, reason, now_unix_seconds)

    def late_process(self, identity: ProcessIdentity, owner_uid: int | None) -> ReportingProcess | None:
        """Return the process of this user, with the last report of this session, also if it has ended lately."""
        with self._lock:
            known = (*(tracked.process for tracked in self._tracked.values()), *reversed(self._ended))
        wanted = (owner_uid, *_same_process(identity))
        return next((each for each in known if (each.owner_uid, *_same_process(each.report.process)) == wanted), None)

    def gpu_of(self, uuid: str) -> str | None:
        """Return the NVML index of a device in the last reading."""
        return self._gpus.get(uuid)

    def running(self, job_id: str) -> list[Event]:
        """Return an event for each reporting process of a job, as if the process ended now: see `Query.job_id`."""
        now_unix_seconds = self._wall_clock()
        with self._lock:
            of_job = [tracked for tracked in self._tracked.values() if self._is_of_job(tracked, job_id)]
            return [self._ended_event(tracked, "", now_unix_seconds) for tracked in of_job]

    def workloads(self) -> set[str]:
        """Return the workloads of the reporting processes."""
        with self._lock:
            return {tracked.process.report.process.workload for tracked in self._tracked.values()}

    def sweep(self, snapshot: Snapshot) -> None:
        """Record the end of processes that the store has dropped; called once a second.

        A silent process has not ended: it may run, and report again.
        """
        kept = {process.key for process in snapshot.processes} | {reporter.key for reporter in snapshot.silent}
        with self._lock:
            dropped = [key for key in self._tracked if key not in kept]
        self.processes_ended((key, f"no report for {self._store.report_expiry_seconds:g} s") for key in dropped)

    async def restore_ends(self, host: Host, *, clock: Callable[[], float], silent_seconds: float) -> None:
        """Record the ends of the processes that reported to an earlier run and ended while no exporter ran.

        A process that the exporter cannot see has ended if it does not report for `silent_seconds`.
        """
        silent_at_seconds = clock() + silent_seconds
        waiting = [each for each in await self._log.pages(_STARTS_WITHOUT_END) if "start_time_ticks" in each.detail]
        while waiting:
            await asyncio.sleep(self._store.report_expiry_seconds)  # by then each process that runs has reported again
            with self._lock:
                reported = {process_subject(each.process.report.process.session) for each in self._tracked.values()}
            silent, waiting = [event for event in waiting if event.subject not in reported], []
            for event in silent:
                pid = event.detail["host_pid"]
                seen = pid is not None and host.alive(pid, event.detail["start_time_ticks"])
                if seen or (pid is None and clock() < silent_at_seconds):
                    waiting.append(event)
                else:
                    self._log.put(_ended_unseen(event, self._wall_clock()))

    def _device_events(self, reading: NodeReading) -> Iterator[Event]:
        """Compare a reading with the one before. Only the poller's thread calls it.

        A device is lost when it stops answering, and it returns when it answers again. A device without an error that
        is no longer listed was removed on purpose (a GPU was unbound, a MIG device was destroyed).
        """
        before, self._failures = self._failures, {}
        for device in reading.devices:
            if not device.uuid:
                continue  # the driver cannot identify the device, so that its return could not be detected
            known = before.get(device.uuid)
            failures = self._failures[device.uuid] = 0 if device.up else (known or 0) + 1
            # A MIG device may fail once while it is being destroyed, so only the second failure counts.
            lost = failures == (2 if device.parent_uuid else 1)
            if lost or (device.up and known != 0):
                yield Event(
                    "device_lost" if lost else "device_returned",
                    reading.taken_unix_seconds,
                    gpu=device.gpu,
                    uuid=device.uuid,
                    detail={
                        "error": device.error or None,
                        **{name: getattr(device, name) for name in ("name", "pci_bus_id")},
                        "driver_version": reading.driver_version,
                    },
                    subject=f"device:{device.uuid}",
                    # An exporter that starts while a device is lost has no uuid of it before the device returns:
                    # whether it was lost depends on its last event.
                    only_after="device_lost" if not lost and (known is None or device.parent_uuid) else "",
                )

    # With the lock

    def _start(self, process: ReportingProcess) -> None:
        minute, share = int(process.received_seconds // 60), process.key.share
        if minute != self._minute:
            self._minute, self._starts = minute, Counter()
        self._starts[share] += 1
        left_out = self._starts[share] > MAX_STARTS_PER_MINUTE
        self._tracked[process.key] = tracked = _TrackedProcess(process, left_out, process.received_unix_seconds)
        tracked.take_report(process, self._gap_seconds)
        self._apply_reading(tracked)  # the process may exit before the next poll
        if left_out:
            self._log.count_left_out(2)
        else:
            self._log.put(self._started_event(process))

    def _end(self, key: ProcessKey, reason: str, now_unix_seconds: float) -> None:
        tracked = self._tracked.pop(key, None)
        if tracked is not None:
            self._ended.append(tracked.process)
            if not tracked.left_out:
                self._log.put(self._ended_event(tracked, reason, now_unix_seconds))

    def _apply_reading(self, tracked: _TrackedProcess) -> None:
        """Copy the process' values from the last reading."""
        reading, host_pid = self._reading, tracked.process.host_pid
        if reading is None or host_pid is None or host_pid not in self._used:
            return
        if reading.pid_belongs_to(tracked.process):
            for uuid, used_bytes in self._used[host_pid].items():
                tracked.usage[uuid].used.add(used_bytes, reading.taken_seconds, self._gap_seconds)
            tracked.facts = reading.facts.get(host_pid, tracked.facts)

    def _is_of_job(self, tracked: _TrackedProcess, job_id: str) -> bool:
        """Return whether a process is of a job with a Slurm or Ray id, or another name: see `Query.job_id`."""
        ids, workload = tracked.job_ids().values(), tracked.process.report.process.workload
        return job_id in ids or (not job_id.isdecimal() and job_id in (workload, job_of_process(tracked.process)))

    def _started_event(self, process: ReportingProcess) -> Event:
        identity = process.report.process
        started = self._reading.started_unix_seconds(process) if self._reading is not None else None
        # After an exec, or after a silence that counted as the end, the start of the process lies before that end.
        if any((each.key, each.start_time_ticks) == (process.key, process.start_time_ticks) for each in self._ended):
            started = None
        detail = {
            "first_report_unix_seconds": process.received_unix_seconds,
            "own_pid": identity.pid,
            "host_pid": process.host_pid,
            **{name: getattr(identity, name) for name in _STARTED},
            "devices": [{"gpu": self._gpus.get(each.uuid), "uuid": each.uuid} for each in process.report.devices],
        }
        time_unix_seconds = process.received_unix_seconds if started is None else started
        return self._event("process_started", time_unix_seconds, process, detail)

    def _ended_event(self, tracked: _TrackedProcess, reason: str, now_unix_seconds: float) -> Event:
        process, facts = tracked.process, tracked.facts
        samples = {sample.uuid: sample for sample in process.report.devices}
        # A process that exits leaves its devices one by one, so the times of the driver's values may differ.
        since_seconds = process.received_seconds - self._store.reading_expiry_seconds
        rows = {uuid: usage.row(samples.get(uuid), since_seconds) for uuid, usage in tracked.usage.items()}
        detail = {
            "reason": reason,
            "command": command_of(facts.command if facts else "", process.report.process.command),
            **{name: getattr(facts, name, None) for name in _FACTS},
            **tracked.job_ids(),
            **({} if process.owner_uid is None else {"uid": process.owner_uid}),
            "first_report_unix_seconds": tracked.first_report_unix_seconds,
            "step": process.report.step,
            "last_report_unix_seconds": process.received_unix_seconds,
            "pinned_host_bytes": process.report.pinned_host_bytes,
            "devices": [
                {"gpu": self._gpus.get(uuid), "uuid": uuid, **row}
                for uuid, row in rows.items()
                if uuid in samples or row["used_bytes"] is not None
            ],
        }
        return self._event("process_ended", now_unix_seconds, process, detail)

    def _event(self, type_: str, time_unix_seconds: float, process: ReportingProcess, detail: dict[str, Any]) -> Event:
        identity = process.report.process
        uuids = [sample.uuid for sample in process.report.devices]
        return Event(
            type_,
            time_unix_seconds,
            gpu=self._gpus.get(uuids[0]) if len(uuids) == 1 else None,
            uuid=uuids[0] if len(uuids) == 1 else None,
            pid=json_pid(process.name),
            workload=identity.workload,
            rank=identity.rank,
            detail=detail,
            subject=process_subject(identity.session),
            owner=process.key.share,
            job=job_of_process(process),
        )


def _ended_unseen(started: Event, now_unix_seconds: float) -> Event:
    """Return the end of a process that ended while no exporter ran, from its start; all that it used is unknown."""
    detail = {
        "reason": "the process exited while no exporter ran",
        "command": started.detail["command"],
        **dict.fromkeys((*_FACTS, *_JOBS, "step", "last_report_unix_seconds", "pinned_host_bytes")),
        "first_report_unix_seconds": started.detail["first_report_unix_seconds"],
        "devices": [{**device, **_DeviceUsage().row()} for device in started.detail["devices"]],
    }
    return replace(started, type="process_ended", time_unix_seconds=now_unix_seconds, detail=detail)
