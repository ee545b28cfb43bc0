"""Convert the starts and ends of reporting processes to events; an end has the last values, the peaks and the means."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

from gpumem_client.wire.protocol import DeviceSample
from gpumem_exporter.core.event import Event, process_subject
from gpumem_exporter.core.ledger import fragmented_bytes
from gpumem_exporter.core.naming import command_of, json_pid
from gpumem_exporter.core.samples import NodeReading, ProcessFacts, ProcessKey, ReportingProcess

MAX_STARTS_PER_MINUTE = 1024
"""The maximum number of processes of a user whose start in a minute, and whose end, is an event."""
# What a process used is not known between two values that are further apart, and further than readings or reports may
# be; that time does not count.
_GAP_SECONDS = 60.0
# A report of a process that has exited is read a moment after its end, or after a pause of the exporter.
_MAX_ENDED = 256
_FACTS = tuple(f.name for f in fields(ProcessFacts) if f.name not in ("pid", "start_time_ticks", "command"))
_JOBS = ("slurm_job_id", "ray_job_id")
_STARTED = ("pid_namespace", "start_time_ticks", "command", "torch_version", "allocator_settings", "client_version")
_ROW = (
    *("allocated_bytes", "reserved_bytes", "reclaimable_bytes", "allocated_peak_bytes", "reserved_peak_bytes"),
    *("alloc_retries", "ooms"),
)


@dataclass(slots=True)
class _Mean:
    """The mean of a value over time, as if it changed steadily from one reading to the next."""

    value: int | None = None
    _byte_seconds: float = 0.0
    _seconds: float = 0.0
    _last: tuple[int, float] | None = None

    def add(self, value: int, now_seconds: float, gap_seconds: float) -> None:
        """Add a value; later values have later times. More than `gap_seconds` since the last one are left out."""
        before, last_seconds = self._last or (value, now_seconds)
        self._last = value, now_seconds
        passed = now_seconds - last_seconds
        if passed <= gap_seconds:
            self._byte_seconds += (before + value) / 2 * passed
            self._seconds += passed
        self.value = round(self._byte_seconds / self._seconds) if self._seconds else value


@dataclass(slots=True)
class DeviceUsage:
    """The memory of a process on one device. None is unknown."""

    gap_seconds: float = _GAP_SECONDS
    """Between two values that are further apart, the memory is unknown."""
    used_peak_bytes: int | None = None
    """The highest value of the driver; a peak between two polls is not seen."""
    reserved_highest_bytes: int | None = None
    """The highest of the allocator's own peaks, which are exact, over all resets of the peaks."""
    _used: _Mean = field(default_factory=_Mean)
    _idle_cache: _Mean = field(default_factory=_Mean)

    def take_used(self, used_bytes: int, now_seconds: float) -> None:
        """Add a reading of the driver."""
        self.used_peak_bytes = max(used_bytes, self.used_peak_bytes or 0)
        self._used.add(used_bytes, now_seconds, self.gap_seconds)

    def take_sample(self, sample: DeviceSample, now_seconds: float) -> None:
        """Add a sample of the allocator."""
        if sample.reserved_peak_bytes is not None:
            self.reserved_highest_bytes = max(sample.reserved_peak_bytes, self.reserved_highest_bytes or 0)
        if sample.idle_cache_bytes is not None:
            self._idle_cache.add(sample.idle_cache_bytes, now_seconds, self.gap_seconds)

    def row(self) -> dict[str, int | None]:
        """Return the values for an event."""
        return {
            "used_peak_bytes": self.used_peak_bytes,
            "used_mean_bytes": self._used.value,
            "reserved_highest_bytes": self.reserved_highest_bytes,
            "idle_cache_mean_bytes": self._idle_cache.value,
        }


@dataclass(slots=True)
class _TrackedProcess:
    """A process from its first report to its end."""

    process: ReportingProcess
    """The process with its last report, and the samples of the last report that had samples."""
    usage: defaultdict[str, DeviceUsage]
    """By uuid."""
    used: dict[str, tuple[int, float]] = field(default_factory=dict)
    """The driver's last value of the used bytes and its time, by uuid.

    A process that exits leaves its devices one by one, so the times may differ.
    """
    facts: ProcessFacts | None = None
    first_report_unix_seconds: float = 0.0
    left_out: bool = False
    """It has no events, because its user started too many processes."""

    def job_ids(self) -> dict[str, str | None]:
        """Return the ids of the process' jobs, as it reports them, otherwise as the host does."""
        identity = self.process.report.process
        return {name: getattr(identity, name) or getattr(self.facts, name, None) for name in _JOBS}

    def take_samples(self) -> None:
        """Add the samples of the last report to the usage."""
        for sample in self.process.report.devices:
            self.usage[sample.uuid].take_sample(sample, self.process.received_seconds)


class ProcessHistory:
    """Tracks reporting processes. Thread-safe.

    The driver's values that are older than the last report by more than `reading_expiry_seconds` are left out.
    `job_of` returns the id of a process' job. `on_left_out` receives the number of events that are left out, because a
    user starts too many processes.
    """

    def __init__(
        self,
        *,
        report_expiry_seconds: float,
        reading_expiry_seconds: float,
        job_of: Callable[[ReportingProcess], str],
        on_left_out: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._reading_expiry_seconds = reading_expiry_seconds
        self._gap_seconds = max(_GAP_SECONDS, report_expiry_seconds, reading_expiry_seconds)
        self._job_of = job_of
        self._on_left_out = on_left_out
        self._lock = threading.Lock()
        self._minute = 0
        # The number of starts in the minute, by `ProcessKey.share`.
        self._starts: Counter[str] = Counter()
        self._tracked: dict[ProcessKey, _TrackedProcess] = {}
        self._ended: deque[ReportingProcess] = deque(maxlen=_MAX_ENDED)
        self.gpus: dict[str, str] = {}
        """The NVML index of each device by uuid, from the last reading."""
        self._reading: NodeReading | None = None
        # The used bytes of each process in the last reading and their time, by host pid and uuid.
        self._used: dict[int, dict[str, tuple[int, float]]] = {}

    def keys(self) -> set[ProcessKey]:
        """Return the keys of the tracked processes."""
        with self._lock:
            return set(self._tracked)

    def take_report(self, process: ReportingProcess) -> list[Event]:
        """Record an accepted report and return its events."""
        process = process.without_messages()
        identity = process.report.process
        with self._lock:
            tracked = self._tracked.get(process.key)
            if tracked is None:
                return self._start_tracking(process)
            last = tracked.process.report
            if last.process.session != identity.session:
                # An exec, or a second start of the reporter, keeps the start time.
                reason = "another process has its pid"
                if last.process.start_time_ticks == identity.start_time_ticks:
                    reason = "another reporter represents the process"
                ended = self._end(tracked, reason, process.received_unix_seconds)
                return [*ended, *self._start_tracking(process)]
            if process.report.sequence >= last.sequence:
                if not process.report.devices:  # as in the final report
                    process = replace(process, report=replace(process.report, devices=last.devices))
                tracked.process = process
                tracked.take_samples()
            return []

    def take_reading(self, reading: NodeReading) -> None:
        """Record a reading of a driver that answers."""
        used: dict[int, dict[str, tuple[int, float]]] = {}
        for device in reading.devices:
            for listed in device.processes or ():
                if listed.used_bytes is not None:
                    used.setdefault(listed.pid, {})[device.uuid] = (listed.used_bytes, reading.taken_seconds)
        with self._lock:
            self.gpus = {device.uuid: device.gpu for device in reading.devices}
            self._reading, self._used = reading, used
            for tracked in self._tracked.values():
                self._apply_reading(tracked)

    def remove(self, ended: Iterable[tuple[ProcessKey, str]], now_unix_seconds: float) -> list[Event]:
        """Stop tracking processes, each for a reason, and return their events; unknown keys are ignored."""
        with self._lock:
            return [
                event
                for key, reason in ended
                if (tracked := self._tracked.pop(key, None)) is not None
                for event in self._end(tracked, reason, now_unix_seconds)
            ]

    def of_session(self, session: str) -> ReportingProcess | None:
        """Return the process of a session that is tracked or has ended lately."""
        with self._lock:
            known = (*(tracked.process for tracked in self._tracked.values()), *self._ended)
        return next((process for process in known if process.report.process.session == session), None)

    def sessions(self) -> set[str]:
        """Return the sessions of the tracked processes."""
        with self._lock:
            return {tracked.process.report.process.session for tracked in self._tracked.values()}

    def running(self, job_id: str, now_unix_seconds: float) -> list[Event]:
        """Return an event for each tracked process of a job, as if the process ended now: see `Query.job_id`."""
        with self._lock:
            return [
                self._ended_event(tracked, "", now_unix_seconds)
                for tracked in self._tracked.values()
                if job_id in self._names(tracked, numbers_only=job_id.isdecimal())
            ]

    def workloads(self) -> set[str]:
        """Return the workloads of the tracked processes."""
        with self._lock:
            return {tracked.process.report.process.workload for tracked in self._tracked.values()}

    def _names(self, tracked: _TrackedProcess, *, numbers_only: bool) -> Iterator[str | None]:
        yield from tracked.job_ids().values()
        if not numbers_only:
            yield from (tracked.process.report.process.workload, self._job_of(tracked.process))

    def _start_tracking(self, process: ReportingProcess) -> list[Event]:
        usage: defaultdict[str, DeviceUsage] = defaultdict(partial(DeviceUsage, self._gap_seconds))
        tracked = _TrackedProcess(process, usage, first_report_unix_seconds=process.received_unix_seconds)
        self._tracked[process.key] = tracked
        tracked.take_samples()
        self._apply_reading(tracked)  # the process may exit before the next poll
        minute = int(process.received_seconds // 60)
        if minute != self._minute:
            self._minute, self._starts = minute, Counter()
        share = process.key.share
        self._starts[share] += 1
        tracked.left_out = self._starts[share] > MAX_STARTS_PER_MINUTE
        if tracked.left_out:
            self._on_left_out(2)
            return []
        return [self._started(process)]

    def _end(self, tracked: _TrackedProcess, reason: str, now_unix_seconds: float) -> list[Event]:
        self._ended.append(tracked.process)
        return [] if tracked.left_out else [self._ended_event(tracked, reason, now_unix_seconds)]

    def _apply_reading(self, tracked: _TrackedProcess) -> None:
        """Copy the process' values from the last reading."""
        reading, host_pid = self._reading, tracked.process.host_pid
        if reading is None or host_pid is None:
            return
        if host_pid in self._used and reading.pid_belongs_to(tracked.process):
            tracked.used.update(self._used[host_pid])
            for uuid, (used_bytes, seconds) in self._used[host_pid].items():
                tracked.usage[uuid].take_used(used_bytes, seconds)
            tracked.facts = reading.facts.get(host_pid, tracked.facts)

    def _ended_event(self, tracked: _TrackedProcess, reason: str, now_unix_seconds: float) -> Event:
        process = tracked.process
        expired = process.received_seconds - self._reading_expiry_seconds
        used = {uuid: used_bytes for uuid, (used_bytes, seconds) in tracked.used.items() if seconds >= expired}
        samples = {sample.uuid: sample for sample in process.report.devices}
        return Event(
            "process_ended",
            now_unix_seconds,
            **self._columns(process),
            detail={
                "reason": reason,
                "command": command_of(tracked.facts.command if tracked.facts else "", process.report.process.command),
                **{name: getattr(tracked.facts, name, None) for name in _FACTS},
                **tracked.job_ids(),
                **({} if process.owner_uid is None else {"uid": process.owner_uid}),
                "first_report_unix_seconds": tracked.first_report_unix_seconds,
                "step": process.report.step,
                "last_report_unix_seconds": process.received_unix_seconds,
                "pinned_host_bytes": process.report.pinned_host_bytes,
                "devices": [
                    {
                        **_row(uuid, self.gpus.get(uuid), samples.get(uuid), used.get(uuid)),
                        **tracked.usage.get(uuid, DeviceUsage()).row(),
                    }
                    for uuid in dict.fromkeys((*samples, *used))
                ],
            },
            subject=process_subject(process.report.process.session),
        )

    def _started(self, process: ReportingProcess) -> Event:
        identity = process.report.process
        started = self._reading.started_unix_seconds(process) if self._reading is not None else None
        return Event(
            "process_started",
            process.received_unix_seconds if started is None else started,
            **self._columns(process),
            detail={
                "first_report_unix_seconds": process.received_unix_seconds,
                "own_pid": identity.pid,
                "host_pid": process.host_pid,
                **{name: getattr(identity, name) for name in _STARTED},
                "devices": [{"gpu": self.gpus.get(each.uuid), "uuid": each.uuid} for each in process.report.devices],
            },
            subject=process_subject(process.report.process.session),
        )

    def _columns(self, process: ReportingProcess) -> dict[str, Any]:
        identity = process.report.process
        uuids = [sample.uuid for sample in process.report.devices]
        return {
            "gpu": self.gpus.get(uuids[0]) if len(uuids) == 1 else None,
            "uuid": uuids[0] if len(uuids) == 1 else None,
            "pid": json_pid(process.name),
            "workload": identity.workload,
            "rank": identity.rank,
            "owner": process.key.share,
            "job": self._job_of(process),
        }


def ended_unseen(started: Event, reason: str, now_unix_seconds: float) -> Event:
    """Return the end of a process that ended while no exporter ran, from its start; all that it used is unknown."""
    detail = started.detail
    return replace(
        started,
        id=0,
        type="process_ended",
        time_unix_seconds=now_unix_seconds,
        detail={
            "reason": reason,
            "command": detail["command"],
            **dict.fromkeys((*_FACTS, *_JOBS, "step", "last_report_unix_seconds", "pinned_host_bytes")),
            "first_report_unix_seconds": detail.get("first_report_unix_seconds", started.time_unix_seconds),
            "devices": [
                {**_row(each["uuid"], each["gpu"], None, None), **DeviceUsage().row()} for each in detail["devices"]
            ],
        },
    )


def _row(uuid: str, gpu: str | None, sample: DeviceSample | None, used_bytes: int | None) -> dict[str, Any]:
    """Return the last known values of the process on one device."""
    reserved = sample.reserved_bytes if sample is not None else None
    return {
        "gpu": gpu,
        "uuid": uuid,
        "used_bytes": used_bytes,
        **{name: getattr(sample, name, None) for name in _ROW},
        "fragmented_bytes": fragmented_bytes(sample) if sample is not None else None,
        "non_torch_bytes": None if used_bytes is None or reserved is None else used_bytes - reserved,
    }
