"""What an action is: who is meant, what is asked, what became of it in each process on each device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from gpumem_exporter.core.ledger import sum_of_known
from gpumem_exporter.core.naming import Names, json_pid
from gpumem_exporter.core.samples import ReportingProcess, Snapshot
from gpumem_exporter.wire.protocol import DeviceSample, SnapshotFile

__all__ = [
    "ACTIONS",
    "DEFAULT_ACTIONS",
    "Action",
    "ActionRequest",
    "ActionResult",
    "ListedProcess",
    "SubmittedAction",
    "Target",
]

ACTIONS = ("empty_cache", "collect_garbage", "reset_peak", "snapshot", "set_memory_fraction", "terminate")
DEFAULT_ACTIONS = tuple(action for action in ACTIONS if action != "terminate")
"""What the exporter allows by default: what ends no process."""


@dataclass(frozen=True, slots=True)
class Target:
    """Which reporting processes are meant, and on which devices. Given keys narrow each other."""

    gpu: str | None = None
    uuid: str | None = None
    pid: int | str | None = None
    """A name of `core.naming`: 4711, or "1@4026532007"."""
    workload: str | None = None
    rank: str | None = None
    all: bool = False

    def select(self, snapshot: Snapshot) -> Iterator[tuple[int | str, ReportingProcess, tuple[DeviceSample, ...]]]:
        """The processes meant, each with its name and its samples of the devices meant.

        A process without such a device is out.
        """
        gpus = gpu_labels(snapshot)
        for name, process in Names.of(snapshot).reporting:
            identity = process.report.process
            if self.pid is not None and str(self.pid) != name:
                continue
            if self.workload is not None and self.workload != identity.workload:
                continue
            if self.rank is not None and self.rank != identity.rank:
                continue
            samples = tuple(
                sample
                for sample in process.report.devices
                if (self.uuid is None or self.uuid == sample.uuid)
                and (self.gpu is None or self.gpu == gpus.get(sample.uuid))
            )
            if samples or (self.uuid is None and self.gpu is None):
                yield json_pid(name), process, samples

    def select_listed(self, snapshot: Snapshot) -> Iterator[ListedProcess]:
        """The processes meant that the driver lists and that do not report: `terminate` alone can reach those."""
        node = snapshot.node
        if node is None or not node.up or self.workload is not None or self.rank is not None:
            return
        reporting = {process.host_pid for process in snapshot.processes}
        found: dict[int, list[tuple[str, int | None]]] = {}
        for device in node.devices:
            if self.uuid in (None, device.uuid) and self.gpu in (None, device.gpu):
                for listed in device.processes or ():
                    if listed.pid not in reporting and (self.pid is None or str(self.pid) == str(listed.pid)):
                        found.setdefault(listed.pid, []).append((device.uuid, listed.used_bytes))
        for pid in sorted(found):
            facts = node.facts.get(pid)
            yield ListedProcess(pid, facts.start_time_ticks if facts is not None else 0, tuple(found[pid]))

    def mismatch(self, snapshot: Snapshot) -> str:
        """Why nothing matched, and what could be named instead."""
        reporting = Names.of(snapshot).reporting
        if not reporting:
            return f"nothing matches {self.describe()}: no process reports to this exporter"
        shown = [
            f"pid={name}"
            + (f" workload={process.report.process.workload}" if process.report.process.workload else "")
            + (f" rank={process.report.process.rank}" if process.report.process.rank else "")
            for name, process in reporting[:20]
        ]
        more = len(reporting) - len(shown)
        listing = "; ".join(shown) + (f"; and {more} more" if more > 0 else "")
        return f"nothing matches {self.describe()}; reporting here: {listing}"

    def describe(self) -> str:
        """As a caller would write it: `gpu=0 workload=llm`."""
        given = ((f.name, getattr(self, f.name)) for f in fields(self))
        return " ".join(f"{name}={value}" for name, value in given if value not in (None, False)) or "all"


@dataclass(frozen=True, slots=True)
class ListedProcess:
    """A process that the driver lists on a device and that does not report."""

    pid: int
    """The host's."""
    start_time_ticks: int
    """0 where the host does not say."""
    used_bytes: tuple[tuple[str, int | None], ...]
    """The driver's figure for each device that is meant, by uuid."""


def gpu_labels(snapshot: Snapshot) -> dict[str, str]:
    """The NVML index of each device by uuid, as far as the driver says it."""
    return {} if snapshot.node is None else {device.uuid: device.gpu for device in snapshot.node.devices}


@dataclass(frozen=True, slots=True)
class ActionRequest:
    """What somebody asks for, validated."""

    action: str
    target: Target
    mode: str = "now"
    """One of `protocol.MODES`."""
    group: bool = False
    """Every rank of the target's workload, after the same step."""
    at_step: int | None = None
    """Of a group: after this step; None: the dispatcher chooses one that every rank still has before it."""
    collect_garbage: bool = False
    fraction: float | None = None
    """Of `set_memory_fraction`."""
    force: bool = False
    """Of `set_memory_fraction`: even if more is reserved already."""
    deadline_seconds: float = 30.0
    dry_run: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ActionResult:
    """What became of it in one process on one device. Bytes; None where it was not measured."""

    pid: int | str
    """The process' name, as in `Target`."""
    workload: str
    rank: str
    gpu: str
    uuid: str
    outcome: str
    reason: str = ""
    reserved_before_bytes: int | None = None
    reserved_after_bytes: int | None = None
    allocated_before_bytes: int | None = None
    allocated_after_bytes: int | None = None
    freed_bytes: int | None = None
    device_free_before_bytes: int | None = None
    device_free_after_bytes: int | None = None
    duration_seconds: float | None = None
    step: int | None = None
    """After which step of the process it ran."""
    thread_id: int | None = None
    """The native id of the thread in which it ran."""
    snapshot: SnapshotFile | None = None


@dataclass(frozen=True, slots=True)
class Action:
    """An action as it stands: `state` is queued, running, done, failed or expired."""

    id: str
    action: str
    state: str
    requested_by: str
    created_unix_seconds: float
    target: Target
    mode: str = "now"
    group: bool = False
    at_step: int | None = None
    dry_run: bool = False
    reason: str = ""
    results: tuple[ActionResult, ...] = ()
    duration_seconds: float | None = None
    """From the request to the last result; None while it runs."""

    @property
    def freed_bytes(self) -> int | None:
        """Bytes given back to the driver (dry run: that would be), as far as results say it; None where none does."""
        return sum_of_known([result.freed_bytes for result in self.results])

    @property
    def finished(self) -> bool:
        """Nothing more will become of it."""
        return self.state not in ("queued", "running")


@dataclass(frozen=True, slots=True)
class SubmittedAction:
    """A new action with the request that started it: what a restarted exporter needs to answer for the action."""

    action: Action
    request: ActionRequest
    idempotency_key: str | None
    processes: tuple[tuple[int | str, str, str], ...]
    """Name, workload and rank of each process that is meant."""
