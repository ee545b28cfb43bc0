"""What the driver and the host show: readings, and the facts of processes. All types are frozen.

`*_seconds` are seconds on the exporter's monotonic clock unless the name contains `unix`. None means that a value
cannot be known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The frame buffer of one device, from one `nvmlDeviceGetMemoryInfo_v2` call: total = used + free + reserved."""

    total_bytes: int
    used_bytes: int
    free_bytes: int
    reserved_bytes: int | None
    """Reserved by driver and firmware; None where only the v1 call exists, whose `used` includes these bytes."""
    of_host: bool = False
    """The values are the host's (/proc/meminfo), because the device has no memory of its own."""


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """One process in the driver's list of a device."""

    pid: int
    """The pid in the host's PID namespace, which is the only one that the driver uses."""
    used_bytes: int | None
    """None where the driver returns NVML_VALUE_NOT_AVAILABLE."""


@dataclass(frozen=True, slots=True)
class DeviceReading:
    """One device in one poll. A lost device keeps its identity and has no values."""

    gpu: str
    """NVML index; `parent:instance` for a MIG device."""
    uuid: str
    name: str = ""
    pci_bus_id: str = ""
    minor: int | None = None
    """N of /dev/nvidiaN; None for a MIG device, and if unknown."""
    mig_profile: str = ""
    parent_uuid: str = ""
    memory: DeviceMemory | None = None
    processes: tuple[ProcessMemory, ...] | None = None
    """None if the list could not be read; empty if there are no processes."""
    utilization_ratio: float | None = None
    active_pids: frozenset[int] | None = field(default=None, compare=False)
    """The processes that used the device in the last seconds; None if the driver does not show that by process."""
    error: str = ""
    """Why the device cannot be read; empty if it can be read."""

    @property
    def up(self) -> bool:
        """Whether the driver answers for this device."""
        return not self.error


@dataclass(frozen=True, slots=True)
class LostLauncher:
    """What a process has lost that should have ended it: the server, the launcher or the container that started it."""

    reason: str
    """`launcher_ended` or `container_gone`."""
    command: str = ""
    """Program and script of what ended; empty if it ended before the exporter saw it."""
    pid: int | None = None
    """Its pid on the host; None like `command`."""
    ended_seconds: float | None = None
    """When the exporter noticed the end; None like `command`."""
    computed_seconds: float = 0.0
    """When the process was last seen to use the CPU, or first seen."""


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """The host's description of one process, from /proc."""

    pid: int
    start_time_ticks: int
    command: str = ""
    """Program and script, without arguments, which may contain secrets."""
    user: str = ""
    container_id: str = ""
    k8s_namespace: str = ""
    k8s_pod: str = ""
    k8s_container: str = ""
    k8s_pod_uid: str = ""
    slurm_job_id: str = ""
    slurm_account: str = ""
    ray_job_id: str = ""
    uid: int | None = None
    """The effective uid; None if it cannot be read."""
    started_seconds: float | None = field(default=None, compare=False)
    """The start of the process; None if it cannot be read. Derived from `start_time_ticks`, so not compared."""
    lost: LostLauncher | None = field(default=None, compare=False)
    """None unless the launcher of the process has ended; `Snapshot.orphans` has the processes that also are idle."""


IDENTITY_FIELDS = (
    *("command", "user", "container_id", "k8s_pod_uid"),
    *("k8s_namespace", "k8s_pod", "k8s_container"),
)
"""The fields that name the user of a process, its program or its pod; `--web.hide-identities` hides them."""


class Reporter(Protocol):
    """A process that reports, or that has reported."""

    @property
    def host_pid(self) -> int | None:
        """Its pid in the driver's list; None if it cannot be known."""

    @property
    def start_time_ticks(self) -> int:
        """As of `ProcessFacts`; 0 if it is unknown."""


@dataclass(frozen=True, slots=True)
class NodeReading:
    """One poll of the driver."""

    taken_seconds: float
    """When the poll ended, on the monotonic clock."""
    taken_unix_seconds: float
    duration_seconds: float
    up: bool
    """NVML is initialized and answers."""
    error: str = ""
    """Why NVML does not answer; empty if it does."""
    driver_version: str = ""
    devices: tuple[DeviceReading, ...] = ()
    facts: Mapping[int, ProcessFacts] = field(default_factory=dict)
    """By host pid, for each process on the devices that /proc has."""

    def unix_seconds(self, seconds: float) -> float:
        """Return a time on the monotonic clock as seconds since the epoch."""
        return seconds + self.taken_unix_seconds - self.taken_seconds

    def facts_of(self, reporter: Reporter) -> ProcessFacts | None:
        """Return the host's description of a reporter's process, unless its pid is of another process."""
        facts = self.facts.get(reporter.host_pid) if reporter.host_pid is not None else None
        return facts if facts is not None and facts.start_time_ticks == reporter.start_time_ticks else None

    def started_unix_seconds(self, reporter: Reporter) -> float | None:
        """Return when a reporter's process started, long before its first report if the exporter started later.

        None if /proc does not show it.
        """
        facts = self.facts_of(reporter)
        return None if facts is None or facts.started_seconds is None else self.unix_seconds(facts.started_seconds)

    def pid_belongs_to(self, process: Reporter) -> bool:
        """Return whether the reporter's host pid in this reading belongs to the reporter's process."""
        # It does not if the pid was reused: the start times differ. An unknown start time counts as equal.
        facts = self.facts.get(process.host_pid) if process.host_pid is not None else None
        return (
            facts is None or 0 in (ticks := (facts.start_time_ticks, process.start_time_ticks)) or ticks[0] == ticks[1]
        )


class DriverActivity(NamedTuple):
    """When the driver last showed that a process used a device. A later one is larger."""

    seen: bool
    """Whether the driver has shown a use at all."""
    seconds: float
    """If it has not, since when it would have shown it."""
