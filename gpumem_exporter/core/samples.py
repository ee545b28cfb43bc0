"""The exporter's inner vocabulary: what the driver said, what the host says of a process, what a process reported.

Everything here is frozen and trusted: it was validated where it came in. Bytes are bytes, `*_seconds` are seconds on
the exporter's monotonic clock unless the name says `unix`, and None means "cannot be known".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from gpumem_exporter.wire.protocol import Report

__all__ = [
    "DeviceMemory",
    "DeviceReading",
    "LastOom",
    "NodeReading",
    "ProcessFacts",
    "ProcessKey",
    "ProcessMemory",
    "ReportingProcess",
    "SilentReporter",
    "Snapshot",
]


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """One device's frame buffer, from one `nvmlDeviceGetMemoryInfo_v2` call: total = used + free + reserved."""

    total_bytes: int
    used_bytes: int
    free_bytes: int
    reserved_bytes: int | None
    """Held back by driver and firmware; None where only the v1 call exists, whose `used` includes it."""
    of_host: bool = False
    """The device has no memory of its own: this is the host's, as /proc/meminfo gives it."""


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """One process on one device, as the driver lists it."""

    pid: int
    """In the host's PID namespace: the driver knows no other."""
    used_bytes: int | None
    """None where the driver answers NVML_VALUE_NOT_AVAILABLE."""


@dataclass(frozen=True, slots=True)
class DeviceReading:
    """One device at one poll. A lost device keeps its identity and has no figures."""

    gpu: str
    """NVML index; `parent:instance` for a MIG device."""
    uuid: str
    name: str = ""
    pci_bus_id: str = ""
    mig_profile: str = ""
    parent_uuid: str = ""
    memory: DeviceMemory | None = None
    processes: tuple[ProcessMemory, ...] | None = None
    """None when the list could not be read; empty when it is empty."""
    utilization_ratio: float | None = None
    error: str = ""
    """Why the device cannot be read; empty while it can."""

    @property
    def up(self) -> bool:
        """The driver answers for this device."""
        return not self.error


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """What the host says of one process: /proc, not the driver and not the process itself."""

    pid: int
    start_time_ticks: int
    command: str = ""
    """Program and script, never arguments: those carry secrets."""
    user: str = ""
    container_id: str = ""
    k8s_namespace: str = ""
    k8s_pod: str = ""
    k8s_container: str = ""
    k8s_pod_uid: str = ""
    slurm_job_id: str = ""
    ray_job_id: str = ""


@dataclass(frozen=True, slots=True)
class NodeReading:
    """One poll of the driver, whole."""

    taken_seconds: float
    """Monotonic, when the poll ended."""
    taken_unix_seconds: float
    duration_seconds: float
    up: bool
    """NVML is initialised and answers."""
    error: str = ""
    """Why it does not; empty while it does."""
    driver_version: str = ""
    devices: tuple[DeviceReading, ...] = ()
    facts: Mapping[int, ProcessFacts] = field(default_factory=dict)
    """By host pid, for the processes on the devices that the host still shows."""

    def lists(self, process: ReportingProcess | SilentReporter) -> bool:
        """What the driver lists under a reporter's host pid is that very process, for all that the host says.

        It is not where the pid had another process when the driver was asked: one that died before the reporter's
        began, or one that began after the reporter's died.
        """
        facts = self.facts.get(process.host_pid) if process.host_pid is not None else None
        return (
            facts is None or 0 in (ticks := (facts.start_time_ticks, process.start_time_ticks)) or ticks[0] == ticks[1]
        )


class ProcessKey(NamedTuple):
    """Which slot of the store a reporter fills: a pid is one process at a time within its PID namespace."""

    pid_namespace: int
    pid: int


@dataclass(frozen=True, slots=True)
class ReportingProcess:
    """A process that reports, and its last report."""

    key: ProcessKey
    host_pid: int | None
    """Its pid as the driver sees it; None when it cannot be known."""
    report: Report
    received_seconds: float
    received_unix_seconds: float

    @property
    def start_time_ticks(self) -> int:
        """When the process began, in clock ticks after boot: tells it from a later one with the same pid."""
        return self.report.process.start_time_ticks

    @property
    def label_pid(self) -> str:
        """The driver's pid where it is known, else its own: its name unless another has it too (see `core.naming`)."""
        return str(self.host_pid if self.host_pid is not None else self.key.pid)

    @property
    def sampled_seconds(self) -> float:
        """When its sample was taken, on the exporter's monotonic clock (transport delay not taken off)."""
        return self.received_seconds - self.report.sample_age_seconds


@dataclass(frozen=True, slots=True)
class SilentReporter:
    """A reporter that fell silent while its process, for all that is known, lives on."""

    key: ProcessKey
    host_pid: int | None
    start_time_ticks: int
    workload: str
    rank: str
    last_report_unix_seconds: float

    @property
    def label_pid(self) -> str:
        """As `ReportingProcess.label_pid`."""
        return str(self.host_pid if self.host_pid is not None else self.key.pid)


@dataclass(frozen=True, slots=True)
class LastOom:
    """The last out-of-memory error of a process on a device, with the figures of that moment.

    What happened, not what is: it outlives its process, and its names are those of that time.
    """

    gpu: str
    """NVML index; empty where that was not known."""
    uuid: str
    pid: str
    """As `core.naming` called the process."""
    workload: str
    rank: str
    session: str
    """Whose error it is; with `number` it tells one that is told again from another."""
    number: int
    """Counts the session's errors."""
    happened_seconds: float
    happened_unix_seconds: float
    requested_bytes: int | None = None
    """What the allocator asked the driver for."""
    device_free_bytes: int | None = None
    limit_bytes: int | None = None
    """The device's memory, or what the process' memory fraction leaves of it."""
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    reclaimable_bytes: int | None = None
    fragmented_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that is known at one moment. Whatever shows something is given one of these and asks nothing else."""

    taken_seconds: float
    node: NodeReading | None
    """The last poll; None before the first, and once the last is too old to be true."""
    processes: tuple[ReportingProcess, ...] = ()
    silent: tuple[SilentReporter, ...] = ()
    ooms: tuple[LastOom, ...] = ()
    """Those of the last hour, one a process and device, in no order."""
