"""What reports show: processes and what features derive from them; and the snapshot, which joins it with a reading.

All values are validated where they enter the exporter, and the types are frozen. Times and unknown values are as in
`core.readings`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, wraps
from operator import attrgetter
from typing import NamedTuple, TypeVar, cast

from gpumem_client.wire.protocol import DeviceSample, Report
from gpumem_exporter.core.container import UNKNOWN, Place
from gpumem_exporter.core.naming import pid_order, reporter_name
from gpumem_exporter.core.readings import DriverActivity, LostLauncher, NodeReading

T = TypeVar("T")
# The number of items between two turns of other threads.
_TURN = 16


class ProcessKey(NamedTuple):
    """The key of a reporter in the store: a pid identifies one process at a time within its PID namespace.

    The namespace and the pid are claims of the report. The owner and the place are part of the key, so that no user can
    replace, end or hide a report of another user, and no container one of another place.
    """

    pid_namespace: int
    pid: int
    owner_uid: int | None = None
    """The user of the process, according to the kernel; None if only a token vouches for the report."""
    place: Place = UNKNOWN
    """Where the process runs; where its sender runs if the exporter cannot see the process."""

    @property
    def share(self) -> str:
        """The holder of one share of every limit, as `Caller.share` spells it: see `Place.share`."""
        return self.place.share(self.owner_uid)


class JobKey(NamedTuple):
    """What the processes of a job have in common."""

    workload: str
    slurm_job_id: str
    """Empty outside of Slurm. The tasks of an array often have one name, and are jobs of their own."""
    owner_uid: int | None
    place: Place


class PartKey(NamedTuple):
    """The key of one reporting process on one device, as long as its session lasts."""

    share: str
    """The holder of the share to which the process belongs. A session is a claim, so another user may repeat it."""
    session: str
    uuid: str


@dataclass(frozen=True, slots=True)
class ReportingProcess:
    """A process that reports, with its last report."""

    key: ProcessKey
    host_pid: int | None
    """The pid in the driver's list; None if it cannot be known."""
    report: Report
    received_seconds: float
    received_unix_seconds: float
    unmatched: frozenset[str] = frozenset()
    """The devices whose sample does not fit the reading of the snapshot; see `core.pairing`."""
    stepped_seconds: float = 0.0
    """When the exporter first saw the last step, on its monotonic clock; of no meaning without a step."""
    active_seconds: float = 0.0
    """When the exporter first saw the present use: allocated and reserved bytes, and the step."""
    last_active_seconds: float | None = None
    """When the process last made a step, allocated or had a request; None if its reporter does not know it."""

    @property
    def name(self) -> str:
        """The name of the process: see `core.naming`."""
        return reporter_name(self.host_pid, *self.key)

    @property
    def owner_uid(self) -> int | None:
        """The user of the process, according to the kernel; None if only a token vouches for the report."""
        return self.key.owner_uid

    @property
    def job(self) -> JobKey | None:
        """Its job; None for a process without a workload, which is a job of its own."""
        identity = self.report.process
        return _job_key(self.key, identity.workload, identity.slurm_job_id)

    @property
    def seen(self) -> bool:
        """Whether /proc shows the process that the report describes."""
        return self.host_pid is not None

    @property
    def attested(self) -> bool:
        """Whether the kernel has confirmed that the owner of the process sent the report."""
        return self.key.owner_uid is not None

    @property
    def clears(self) -> bool:
        """Whether the process accepts `empty_cache`. A reporter that lists no actions supports all of them."""
        if "empty_cache" in self.report.denied_actions:
            return False
        return not self.report.actions or "empty_cache" in self.report.actions

    @property
    def start_time_ticks(self) -> int:
        """The process start time in clock ticks after boot; differs for a later process with the same pid."""
        return self.report.process.start_time_ticks

    def part(self, uuid: str) -> PartKey:
        """Return the key of the process on a device."""
        return PartKey(self.key.share, self.report.process.session, uuid)

    def without_messages(self) -> ReportingProcess:
        """Return the process without the results and errors of its report, which are handled once."""
        if not self.report.results and not self.report.ooms:
            return self
        return replace(self, report=replace(self.report, results=(), ooms=()))

    @property
    def sampled_seconds(self) -> float:
        """When the sample was taken, on the exporter's monotonic clock; the transport delay is not subtracted."""
        return self.received_seconds - self.report.sample_age_seconds


@dataclass(frozen=True, slots=True)
class SilentReporter:
    """A reporter that stopped reporting while its process may still run."""

    key: ProcessKey
    host_pid: int | None
    start_time_ticks: int
    workload: str
    rank: str
    last_report_seconds: float
    last_report_unix_seconds: float
    slurm_job_id: str = ""

    @property
    def name(self) -> str:
        """The name of the process: see `core.naming`."""
        return reporter_name(self.host_pid, *self.key)

    @property
    def job(self) -> JobKey | None:
        """As of `ReportingProcess`."""
        return _job_key(self.key, self.workload, self.slurm_job_id)


def _job_key(key: ProcessKey, workload: str, slurm_job_id: str) -> JobKey | None:
    # The Slurm job is a claim of the report. With a false one, a process can join only another job of its owner.
    return JobKey(workload, slurm_job_id, key.owner_uid, key.place) if workload else None


IDLE_SECONDS = 3600.0
"""A process that has been inactive for this time is idle: epochs, evaluations and pauses are shorter."""


@dataclass(frozen=True, slots=True)
class StartingEngine:
    """An inference engine that starts on one device. Memory released there meanwhile spoils its start."""

    uuid: str
    """Of the device."""
    gpu: str
    """NVML index; empty if it is unknown."""
    host_pid: int | None
    title: str
    """The title of its process."""
    until_seconds: float
    """The engine counts as started at this time, if not before."""
    owner_uid: int | None = None
    """The user of the process; None if it is unknown."""
    reporter: ReportingProcess | None = field(default=None, compare=False)
    """The process, if its own report says that the engine starts."""


KV_PEAK_WINDOWS = {"1h": 3600, "24h": 86400}
"""The times until now of which the highest use of a key-value cache is known, in seconds."""


class KvCachePeak(NamedTuple):
    """The highest use of an engine's key-value cache by running requests, in one of `KV_PEAK_WINDOWS`."""

    used_bytes: int
    """From about one reading a second."""
    observed_seconds: int
    """The part of the window in which the use was known. If it is shorter, the use may have been higher."""


@dataclass(frozen=True, slots=True)
class Names:
    """The reporters of a snapshot by name, in the order of `pid_order`; each name and each process once."""

    reporting: tuple[tuple[str, ReportingProcess], ...]
    silent: tuple[tuple[str, SilentReporter], ...]

    @classmethod
    def of(cls, snapshot: Snapshot) -> Names:
        """Name the reporters of a snapshot."""
        facts_by_pid = snapshot.node.facts if snapshot.node is not None and snapshot.node.up else {}

        def replaced(reporter: ReportingProcess | SilentReporter) -> bool:
            """Return whether the host shows that the pid belongs to a process that started later."""
            facts = facts_by_pid.get(reporter.host_pid) if reporter.host_pid is not None else None
            return facts is not None and facts.start_time_ticks > reporter.start_time_ticks > 0

        # If several reporters have one name, an attested reporter gets it, otherwise the reporter of the last report.
        processes = sorted(snapshot.processes, key=attrgetter("attested", "received_seconds"))
        silents = sorted(snapshot.silent, key=attrgetter("last_report_unix_seconds"))
        reporting = {process.name: process for process in processes if not replaced(process)}
        silent = {reporter.name: reporter for reporter in silents if not replaced(reporter)}
        return cls(
            tuple((name, reporting[name]) for name in sorted(reporting, key=pid_order)),
            tuple((name, silent[name]) for name in sorted(silent.keys() - reporting, key=pid_order)),
        )


@dataclass(frozen=True, slots=True)
class LastOom:
    """The last out-of-memory error of a process on a device, with the values at that time.

    The record outlives the process, and its labels keep the values that they had at the time of the error.
    """

    gpu: str
    """NVML index; empty if it was unknown."""
    uuid: str
    pid: str
    """The name of the process by `core.naming`."""
    workload: str
    rank: str
    session: str
    """The reporter's session; together with `number` it identifies the error if it is reported twice."""
    number: int
    """The number of the error within the session."""
    happened_seconds: float
    happened_unix_seconds: float
    requested_bytes: int | None = None
    """The size of the allocator's request to the driver."""
    device_free_bytes: int | None = None
    limit_bytes: int | None = None
    """The memory of the device, or the process' memory fraction of it."""
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    reclaimable_bytes: int | None = None
    fragmented_bytes: int | None = None
    owner: str = ""
    """The holder of one share of the errors that are shown; see `ProcessKey.share`."""
    ended_process: bool = False
    """Whether the process ended soon after the error, or while no exporter ran. False if unknown."""


@dataclass(frozen=True)
class Snapshot:
    """The state of the node at one time. Everything that displays or exports reads only a snapshot."""

    taken_seconds: float
    node: NodeReading | None
    """The last poll; None before the first poll, and if the last poll has expired.

    The memory of its devices and the samples of `processes` belong together: see `core.pairing`.
    """
    processes: tuple[ReportingProcess, ...] = ()
    silent: tuple[SilentReporter, ...] = ()
    ooms: tuple[LastOom, ...] = ()
    """The errors of the last hour, one for each process and device, in no order."""
    starting: tuple[StartingEngine, ...] = ()
    """The inference engines that start, once for each of their devices."""
    kv_cache_peaks: Mapping[tuple[str, str], Mapping[str, KvCachePeak]] = field(default_factory=dict)
    """By window, for the name of each process and the uuid of each device with a key-value cache."""
    orphans: Mapping[int, LostLauncher] = field(default_factory=dict)
    """What each orphan has lost, by host pid; see `features.orphans`."""
    activity: Mapping[int, DriverActivity] = field(default_factory=dict)
    """By host pid; see `core.activity`."""

    @cached_property
    def gpus(self) -> Mapping[str, str]:
        """The NVML index of each device by uuid."""
        return {} if self.node is None else {device.uuid: device.gpu for device in self.node.devices}

    @cached_property
    def names(self) -> Names:
        """The names of the reporters."""
        return Names.of(self)

    @cached_property
    def derived(self) -> dict[Callable[..., object], object]:
        """The results of the functions with `once_per_snapshot`."""
        return {}

    def last_active_seconds(self, reporter: ReportingProcess | None, host_pid: int | None) -> float | None:
        """Return the time of the last step, allocation, engine request or utilization of a process; None if unknown.

        If there was none, it is the time from which on one would have been seen.
        """
        of_driver = self.activity.get(host_pid) if host_pid is not None else None
        reported = reporter.last_active_seconds if reporter is not None else None
        if of_driver is None or (reported is not None and not of_driver.seen):
            return reported
        return of_driver.seconds if reported is None else max(of_driver.seconds, reported)

    def unix_seconds(self, seconds: float, reporter: ReportingProcess | None) -> float:
        """Return a time on the monotonic clock, of a process, as seconds since the epoch."""
        if self.node is not None:
            return self.node.unix_seconds(seconds)
        return seconds + (reporter.received_unix_seconds - reporter.received_seconds if reporter is not None else 0.0)

    def kv_cache_peak(self, pid: str, sample: DeviceSample, window: str) -> KvCachePeak | None:
        """Return the highest use of the cache in `sample`, of the process with this name; None if it is not known."""
        peak = self.kv_cache_peaks.get((pid, sample.uuid), {}).get(window)
        used_bytes = sample.kv_cache_bytes.get("used")
        if peak is None or used_bytes is None:
            return peak
        return peak._replace(used_bytes=max(peak.used_bytes, used_bytes))  # the noted peaks are up to 10 s old


def once_per_snapshot(compute: Callable[[Snapshot], T]) -> Callable[[Snapshot], T]:
    """Let a function compute its result once for each snapshot. The result is shared: nobody may change it."""

    @wraps(compute)
    def shared(snapshot: Snapshot) -> T:
        # The history and the findings of each second read one snapshot. Two threads may both compute the same here.
        derived = cast("dict[Callable[..., object], T]", snapshot.derived)
        if compute not in derived:
            derived[compute] = compute(snapshot)
        return derived[compute]

    return shared


def kv_cache_size_bytes(sample: DeviceSample) -> int:
    """Return the size of an engine's key-value cache. A reporter may know its size and its use, but not its states."""
    return sample.component_bytes.get("kv_cache") or sum(sample.kv_cache_bytes.values())


# The number of steps after which a training has reached its peak. Optimizers create their state in the first step, so
# the second step is the first with all memory in use.
_FULL_STEPS = 2


def plan_error_ratio(sample: DeviceSample, step: int | None) -> float | None:
    """Return planned reserved peak / measured reserved peak − 1: 0.05 means that the plan is 5 % too high.

    The measured peak is the highest value since the last reset. A reset sets it to the bytes reserved at that time,
    including the cache, so the ratio changes only if the cache was emptied as well.

    It is None without a plan, without a measured peak, and unless `step`, the number of completed steps at the time of
    the sample, is known and large enough.
    """
    planned, measured = sample.planned_reserved_peak_bytes, sample.reserved_peak_bytes
    if planned is None or not measured or step is None or step < _FULL_STEPS:
        return None
    return planned / measured - 1


def giving_way(items: Iterable[T]) -> Iterator[T]:
    """Yield the items, and let threads that wait for the interpreter run after every 16th."""
    # Otherwise a request that arrives meanwhile waits for all of it: the event loop gives the interpreter up at each
    # system call, and gets it back a millisecond later.
    for number, item in enumerate(items, 1):
        yield item
        if number % _TURN == 0:
            time.sleep(0)
