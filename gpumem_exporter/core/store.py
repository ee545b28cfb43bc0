"""The store of the last driver reading and of each process' last report.

Each process has an owner: its user and its place. No report of one owner changes what the store has of another. All
reports that only a token vouches for have the same owner.

The poller and the report route write to it; readers take a snapshot, in any thread. The store is thread-safe: the
poller writes from its thread, everything else from the event loop. No method does I/O.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeAlias

from gpumem_client.wire.protocol import Report
from gpumem_exporter.core.activity import Activity
from gpumem_exporter.core.container import UNKNOWN, Place
from gpumem_exporter.core.pairing import Pairing
from gpumem_exporter.core.readings import LostLauncher, NodeReading
from gpumem_exporter.core.samples import (
    KV_PEAK_WINDOWS,
    KvCachePeak,
    LastOom,
    ProcessKey,
    ReportingProcess,
    SilentReporter,
    Snapshot,
    StartingEngine,
)
from gpumem_exporter.core.shares import Shares
from gpumem_exporter.core.starting_engines import StartingEngines
from gpumem_exporter.errors import ReporterSupersededError, TooManyProcessesError, UnknownDeviceError

# How much of the metrics page the reports of one share may take; more if more processes may report. A process with
# short labels on one device takes 6 to 9 KiB.
_SHARE_BYTES = 6 << 20
_SHARE_BYTES_PER_PROCESS = 12 << 10
_ARRIVAL_SECONDS = 2.0
# The series of a process on one device, without phases and components.
_DEVICE_SERIES = 23
# Name, names of labels and value of a series.
_LINE_BYTES = 120
# The other series and documents of a process.
_PROCESS_BYTES = 2000
# Without a `beat` for this time, the exporter has been paused or cannot take reports: no report expires meanwhile.
_PAUSE_SECONDS = 3.0
_NO_PEAKS: Mapping[tuple[str, str], Mapping[str, KvCachePeak]] = {}
FindOrphans: TypeAlias = Callable[[NodeReading, Sequence[ReportingProcess]], Mapping[int, LostLauncher]]
"""Returns what each orphan of a reading has lost, by host pid. Called with the lock: a pid is of that reading only."""


@dataclass(frozen=True, slots=True)
class _Entry:
    process: ReportingProcess
    seniority: tuple[bool, int, float]
    """Orders the sessions of one pid: a process that /proc shows comes last, then the later process and reporter."""
    page_bytes: int
    starting_since_seconds: float | None
    """Since when the session reports that its engine starts; None if it does not."""
    expires_seconds: float

    @property
    def rank(self) -> int:
        return _rank(self.process)

    @property
    def share(self) -> str:
        return self.process.key.share


class Store:
    """The last reading of the driver and the last report of each process.

    When a report is `report_expiry_seconds` old, its process counts as silent. At most `max_processes` reporters are
    kept, and as many silent ones.
    """

    def __init__(self, *, report_expiry_seconds: float, reading_expiry_seconds: float, max_processes: int) -> None:
        self.report_expiry_seconds = report_expiry_seconds
        self.reading_expiry_seconds = reading_expiry_seconds
        self.max_processes = max_processes
        self.find_orphans: FindOrphans = lambda _, __: {}
        """A feature replaces it, before the first reading."""
        self._lock = threading.Lock()
        self._node: NodeReading | None = None
        # The devices of the last reading.
        self._known_uuids: frozenset[str] = frozenset()
        self._entries: dict[ProcessKey, _Entry] = {}
        self._silent: dict[ProcessKey, SilentReporter] = {}
        # No report expires before this time.
        self._next_expiry_seconds = float("inf")
        # The time of the last `beat`; None before the first one.
        self._beat_seconds: float | None = None
        self._displaced: list[ProcessKey] = []
        self._pairing = Pairing()
        self._starting = StartingEngines()
        self._orphans: Mapping[int, LostLauncher] = {}
        self._activity = Activity()

    def put_reading(self, reading: NodeReading) -> None:
        """Store a reading of the driver; called by the poller's thread."""
        with self._lock:
            self._node = reading
            self._known_uuids = frozenset(device.uuid for device in reading.devices)
            processes = [entry.process for entry in self._entries.values()]
            self._pairing.put_reading(reading, processes)
            self._starting.put_reading(reading)
            self._orphans = self.find_orphans(reading, processes)
            self._activity.put_reading(reading)

    def put_report(
        self,
        report: Report,
        *,
        host_pid: int | None,
        now_seconds: float,
        now_unix_seconds: float,
        owner_uid: int | None = None,
        place: Place = UNKNOWN,
    ) -> ReportingProcess:
        """Store a report and return its process.

        A report older than the stored one of the same session changes nothing. Samples of devices that the driver does
        not have are dropped, because they belong to no ledger. The results and errors of a report are not stored.

        Raises:
            ReporterSupersededError: a later session, or an attested report, represents this process.
            TooManyProcessesError: `max_processes`, or the share of the page, is reached.
            UnknownDeviceError: the driver is up and has none of the devices in the report.
        """
        identity = report.process
        key = ProcessKey(identity.pid_namespace, identity.pid, owner_uid, place)
        with self._lock:
            self._expire(now_seconds)
            report = self._without_unknown_devices(report)
            entry = self._entries.get(key)
            before = entry.process if entry is not None else None
            if before is not None and before.report.process.session != identity.session:
                before = None
            stepped_seconds, active_seconds = _last_activity(report, now_seconds - report.sample_age_seconds, before)
            process = ReportingProcess(
                key,
                host_pid,
                report,
                now_seconds,
                now_unix_seconds,
                stepped_seconds=stepped_seconds,
                active_seconds=active_seconds,
                last_active_seconds=_last_active_seconds(report, now_seconds, before),
            )
            # No reporter started in the future, whatever it claims.
            started_seconds = min(identity.session_started_seconds, now_seconds)
            seniority = (process.seen, identity.start_time_ticks, started_seconds)
            starting_since_seconds = now_seconds if report.engine_starting else None
            if entry is not None and before is not None:
                if report.sequence <= before.report.sequence:
                    return before
                # A start that is claimed for the future was cut to the first report's time. It must not grow with time.
                seniority = (process.seen, *entry.seniority[1:])
                if report.engine_starting and entry.starting_since_seconds is not None:
                    starting_since_seconds = entry.starting_since_seconds
            elif entry is not None and (seniority < entry.seniority or _may_be_anothers(process)):
                raise ReporterSupersededError(f"a newer reporter represents pid {identity.pid}")
            size = _page_bytes(report)
            displaced = []
            # Only growth needs room: a known process is not refused because others have filled the share.
            if entry is None or size > entry.page_bytes:
                displaced += self._displaced_in_share(process, size)
            if entry is None:
                displaced += self._displaced_by(process, displaced)
            for lost in displaced:
                del self._entries[lost]
                self._pairing.forget(lost)
            self._displaced += displaced
            kept = process.without_messages()
            expires_seconds = now_seconds + self.report_expiry_seconds
            self._entries[key] = _Entry(kept, seniority, size, starting_since_seconds, expires_seconds)
            self._next_expiry_seconds = min(self._next_expiry_seconds, expires_seconds)
            self._silent.pop(key, None)
            self._pairing.put_report(kept)
            return process

    def beat(self, now_seconds: float) -> None:
        """Note that the exporter runs; called once a second. A pause before it extends the life of all reports.

        After SIGSTOP, a frozen cgroup or a migration, the reports that were sent meanwhile still wait in the sockets.
        """
        with self._lock:
            before, self._beat_seconds = self._beat_seconds, now_seconds
            paused_seconds = now_seconds - before if before is not None else 0.0
            if paused_seconds > _PAUSE_SECONDS:
                self._entries = {
                    key: replace(entry, expires_seconds=entry.expires_seconds + paused_seconds)
                    for key, entry in self._entries.items()
                }
                self._next_expiry_seconds += paused_seconds

    def take_displaced(self) -> tuple[ProcessKey, ...]:
        """Return the processes that lost their place to others since the last call."""
        with self._lock:
            displaced, self._displaced = tuple(self._displaced), []
            return displaced

    def forget(self, key: ProcessKey) -> None:
        """Remove a process that exited or stopped its reporter; an unknown key is ignored."""
        with self._lock:
            self._entries.pop(key, None)
            self._silent.pop(key, None)
            self._pairing.forget(key)

    def snapshot(
        self,
        now_seconds: float,
        *,
        ooms: tuple[LastOom, ...] = (),
        kv_cache_peaks: Mapping[tuple[str, str], Mapping[str, KvCachePeak]] = _NO_PEAKS,
    ) -> Snapshot:
        """Return the current state without expired data; the readings and samples in it belong together.

        `ooms` and `kv_cache_peaks` are what features have derived from earlier reports.
        """
        with self._lock:
            self._expire(now_seconds)
            node = self._node
            if node is not None and now_seconds - node.taken_seconds > self.reading_expiry_seconds:
                node = None
            if node is not None and node.up:
                node, processes = self._pairing.node, tuple(self._pairing.processes.values())
            else:
                processes = tuple([entry.process for entry in self._entries.values()])
            reporters = [
                (entry.process, entry.starting_since_seconds)
                for entry in self._entries.values()
                if entry.process.report.engine_starting is not None
            ]
            starting: tuple[StartingEngine, ...] = ()
            if reporters or self._starting.titled:  # most nodes have no engine
                starting = self._starting.at(now_seconds, reporters)
            return Snapshot(
                taken_seconds=now_seconds,
                node=node,
                processes=processes,
                silent=tuple(self._silent.values()),
                ooms=ooms,
                starting=starting,
                kv_cache_peaks=kv_cache_peaks,
                orphans=self._orphans if node is not None else {},
                activity=self._activity.found if node is not None else {},
            )

    @property
    def newest_reading(self) -> NodeReading | None:
        """The last reading as the driver returned it, whatever its age and the samples of the processes."""
        return self._node

    def find(self, key: ProcessKey) -> ReportingProcess | None:
        """Return the process with its last report, whatever the age of the report; None if unknown."""
        entry = self._entries.get(key)
        return entry.process if entry else None

    def _displaced_by(self, process: ReportingProcess, displaced: Collection[ProcessKey]) -> list[ProcessKey]:
        """Return the processes that lose their place to a new one, besides the `displaced` ones."""
        key, rank = process.key, _rank(process)
        if rank == 0 and any(each[:2] == key[:2] and entry.rank == 2 for each, entry in self._entries.items()):
            raise ReporterSupersededError(f"pid {key.pid} reports itself, and the kernel attests it")
        # A process that /proc shows replaces an unattested one of the same pid.
        unattested = ProcessKey(key.pid_namespace, key.pid)
        if rank == 2 and unattested in self._entries and unattested not in displaced:
            return [unattested]
        if len(self._entries) - len(displaced) < self.max_processes:
            return []
        # The least known process loses its place, because any client can invent processes that /proc does not show.
        # Among equally known ones, the largest share loses its latest to a smaller share.
        lowest = min(entry.rank for entry in self._entries.values())
        candidates = [entry for entry in self._entries.values() if entry.rank == lowest]
        shares = Shares(0, [entry.share for entry in candidates])
        if lowest == rank:
            shares.put(key.share)
        loser = shares.over()
        if lowest > rank or (lowest == rank and loser == key.share):
            raise TooManyProcessesError(
                f"{len(self._entries)} processes report already; raise --report.max-processes to accept more"
            )
        return [next(entry.process.key for entry in reversed(candidates) if entry.share == loser)]

    def _displaced_in_share(self, process: ReportingProcess, size: int) -> list[ProcessKey]:
        """Return the processes of the same share that lose their place, because the share of the page is exceeded.

        Only a process that /proc shows displaces others: processes that /proc does not show, the latest first.
        """
        key, rank, displaced = process.key, _rank(process), []
        share, limit_bytes = key.share, max(_SHARE_BYTES, self.max_processes * _SHARE_BYTES_PER_PROCESS)
        others = [entry for entry in self._entries.values() if entry.share == share and entry.process.key != key]
        total = size + sum(entry.page_bytes for entry in others)
        for entry in reversed(others):
            if total <= limit_bytes:
                break
            if entry.rank < rank == 2:
                displaced.append(entry.process.key)
                total -= entry.page_bytes
        if total > limit_bytes:
            owner = "reporters with the token" if key.owner_uid is None else f"uid {key.owner_uid}"
            owner = f"container {key.place}" if key.place.container else owner
            raise TooManyProcessesError(
                f"the series of {owner} would take {total} bytes of the page, and one share is {limit_bytes}; use "
                "shorter labels and fewer phases, or raise --report.max-processes"
            )
        return displaced

    def _expire(self, now_seconds: float) -> None:
        if now_seconds <= self._next_expiry_seconds:
            return  # otherwise each report would look at all others
        # Of the threads that call this, any may be the first after a pause.
        if self._beat_seconds is not None and now_seconds - self._beat_seconds > _PAUSE_SECONDS:
            return
        for process in [e.process for e in self._entries.values() if e.expires_seconds < now_seconds]:
            del self._entries[process.key]
            self._pairing.forget(process.key)
            identity = process.report.process
            self._silent[process.key] = SilentReporter(
                key=process.key,
                host_pid=process.host_pid,
                start_time_ticks=identity.start_time_ticks,
                workload=identity.workload,
                rank=identity.rank,
                last_report_seconds=process.received_seconds,
                last_report_unix_seconds=process.received_unix_seconds,
                slurm_job_id=identity.slurm_job_id,
            )
            while len(self._silent) > self.max_processes:
                unseen = [key for key, silent in self._silent.items() if silent.host_pid is None]
                candidates = unseen or list(self._silent)
                loser = Shares(0, [key.share for key in candidates]).over()
                del self._silent[next(key for key in candidates if key.share == loser)]
        self._next_expiry_seconds = min((e.expires_seconds for e in self._entries.values()), default=float("inf"))

    def _without_unknown_devices(self, report: Report) -> Report:
        node, known = self._node, self._known_uuids
        # A device without a uuid was lost before its uuid was read: the report may be about that device.
        if node is None or not node.up or "" in known:
            return report
        devices = tuple([sample for sample in report.devices if sample.uuid in known])
        if len(devices) == len(report.devices):
            return report
        if not devices:
            raise UnknownDeviceError(f"the driver has no device {report.devices[0].uuid!r}")
        return replace(report, devices=devices)


def _last_activity(report: Report, sampled_seconds: float, before: ReportingProcess | None) -> tuple[float, float]:
    """Return the times at which the last step and the last use of the allocator were first seen.

    `before` is the process with the report before, of the same session.
    """
    stepped_seconds = active_seconds = sampled_seconds
    if before is not None:
        if before.report.step == report.step:
            stepped_seconds = before.stepped_seconds
        if _use(before.report) == _use(report):
            active_seconds = before.active_seconds
    return stepped_seconds, active_seconds


def _last_active_seconds(report: Report, now_seconds: float, before: ReportingProcess | None) -> float | None:
    if report.inactive_seconds is None:
        return None
    seconds = now_seconds - report.inactive_seconds
    # A report takes a moment to arrive. Without that moment, the time is the same in each report.
    known = before.last_active_seconds if before is not None else None
    return known if known is not None and abs(seconds - known) < _ARRIVAL_SECONDS else seconds


def _use(report: Report) -> tuple[object, ...]:
    """Return the values that change when a program allocates, frees or steps."""
    samples = report.devices
    return (report.step, *[(each.allocated_bytes, each.reserved_bytes, each.segments_allocated) for each in samples])


def _rank(process: ReportingProcess) -> int:
    """Return how much is known of a process: 2 if /proc shows it, 1 if only the kernel names the sender, else 0."""
    return 0 if not process.attested else 1 + process.seen


def _may_be_anothers(process: ReportingProcess) -> bool:
    """Return whether another session of a pid may be another process: nothing but the uid is known of its sender."""
    return process.attested and not process.seen and not process.key.place.known


def _page_bytes(report: Report) -> int:
    """Return about how many bytes of the metrics page a report takes; the JSON documents take less."""
    # Unknown values count as well, so that the result only depends on the number of devices and on texts.
    identity = report.process
    line = _LINE_BYTES + _label_bytes(identity.workload) + _label_bytes(identity.rank)
    total = _PROCESS_BYTES + sum(map(len, (*report.actions, *report.denied_actions, *report.modes, *report.waiting)))
    if report.engine is not None:
        total += line + sum(map(_label_bytes, (report.engine.name, report.engine.version, report.engine.model)))
    for sample in report.devices:
        names = (*sample.phase_peak_bytes, *sample.component_bytes, *sample.component_unmapped_bytes)
        names += (*sample.kv_cache_bytes, *(2 * [*KV_PEAK_WINDOWS] if sample.kv_cache_bytes else ()))
        total += (_DEVICE_SERIES + len(names)) * (line + _label_bytes(sample.uuid)) + sum(map(_label_bytes, names))
    return total


@lru_cache(maxsize=1024)
def _label_bytes(text: str) -> int:
    """Return the bytes of a label value: UTF-8, with a backslash before some characters."""
    return len(text.encode("utf-8", "replace")) + sum(map(text.count, '"\\\n'))
