"""The wire between a reporter and its exporter, as frozen dataclasses.

One route carries everything. A reporter posts a `Report` to `POST /api/v1/reports`; the `Reply` carries the commands
that wait for it, and the results of those ride on its next report. The exporter may hold the reply until there is a
command or until the report interval has passed.

Compatibility: a field that is not known is ignored, a field that is not there takes its default; both sides therefore
read messages of older and newer minor versions. `PROTOCOL_VERSION` rises only when that no longer suffices.

Bytes are bytes, `*_seconds` are seconds, and None means "cannot be known", never zero. Standard library only: this
module is imported by training processes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from gpumem_exporter.errors import WireError

__all__ = [
    "MAX_INTEGER",
    "MAX_LABEL_LENGTH",
    "MODES",
    "OUTCOMES",
    "PROTOCOL_VERSION",
    "REPORTS_PATH",
    "Command",
    "CommandResult",
    "DeviceResult",
    "DeviceSample",
    "OutOfMemory",
    "ProcessIdentity",
    "Reply",
    "Report",
    "SnapshotBlock",
    "SnapshotFile",
    "SnapshotSegment",
    "reply_from_wire",
    "to_wire",
]

PROTOCOL_VERSION = 1
REPORTS_PATH = "/api/v1/reports"

MAX_INTEGER = 2**63 - 1
"""No number in a report is larger."""
MAX_LABEL_LENGTH = 256
"""Longest text that may become a label's value, in characters; reporters cut, the exporter refuses."""

MODES = ("now", "step", "idle")
"""When a command runs. `now`: on the reporter's thread, as soon as it arrives. `step`: in the training thread, at the
end of a step. `idle`: on the reporter's thread, once no step has run and nothing was allocated for a while."""

OUTCOMES = ("done", "refused", "failed", "expired", "unsupported", "gone")
"""What can become of a command in one process."""


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """Who reports. The process is (`pid_namespace`, `pid`, `start_time_ticks`); rank and workload are labels only."""

    pid: int
    """As the process sees itself, in its own PID namespace."""
    start_time_ticks: int
    """Field 22 of /proc/self/stat: clock ticks after boot, the same from every PID namespace."""
    pid_namespace: int
    """Inode of /proc/self/ns/pid; 0 where it cannot be read."""
    session: str
    """Random, new for each reporter: tells a restarted or exec'ed one from its predecessor in the same pid."""
    session_started_seconds: float
    """CLOCK_MONOTONIC when the reporter started: of two sessions of one process, the later speaks for it."""
    workload: str = ""
    rank: str = ""
    command: str = ""
    """Program and script, never arguments: those carry secrets."""
    torch_version: str = ""
    allocator_settings: str = ""
    client_version: str = ""
    slurm_job_id: str = ""
    """SLURM_JOB_ID of its environment."""
    ray_job_id: str = ""
    """RAY_JOB_ID of its environment: Ray sets it for its workers."""
    world_size: int | None = None
    """How many ranks there are, at least 1, as the launcher says that has given it its rank."""


@dataclass(frozen=True, slots=True)
class DeviceSample:
    """One device's allocator at one moment, in the words of `torch.cuda.memory_stats` (`.all.` pool, `.current`)."""

    uuid: str
    """As NVML spells it: `GPU-…` or `MIG-…`."""
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    active_bytes: int | None = None
    inactive_split_bytes: int | None = None
    requested_bytes: int | None = None
    allocated_peak_bytes: int | None = None
    reserved_peak_bytes: int | None = None
    private_pools_bytes: int | None = None
    """Reserved by live private pools (CUDA graphs, `torch.cuda.MemPool`)."""
    reclaimable_bytes: int | None = None
    """What `empty_cache()` would give back to the driver now, memory pending on another stream included.

    Exact where PyTorch's statistics tell it (classic segments, no private pool) or where the heap is walked for the
    sample. Between the walks over a large heap that keeps changing (expandable segments, private pools) it is reserved
    − allocated − what could not be returned at the last walk, 500 times its cost ago at most: 5 s at 20,000 blocks.
    None for larger heaps, for pages of unknown size and for allocators that tell too little. Memory cached in a private
    pool counts once it is certain that nothing holds the pool: so it may be too low, by a graph that died under torch
    before 2.14 or by tensors that outlived their `MemPool`, until somebody empties the cache.
    """
    alloc_retries: int | None = None
    ooms: int | None = None
    segments_allocated: int | None = None
    """`segment.all.allocated`: segments ever taken from the driver."""
    segments_freed: int | None = None
    """`segment.all.freed`: segments ever given back."""
    cache_flushes: int | None = None
    """`num_sync_all_streams`: flushes of the cache, wanted or forced."""
    peak_resets: int | None = None
    """How often the peaks were seen to have been reset, by whomever, since the reporter started."""
    planned_reserved_peak_bytes: int | None = None
    """What the job's plan expects of `reserved_peak_bytes`. A plan is for one device: of those of a process, it stands
    at the one with the highest peak."""
    phase_peak_bytes: Mapping[str, int] = field(default_factory=dict)
    """Highest known peak of allocated bytes in each phase the program named: a lower bound where it is not exact."""
    component_bytes: Mapping[str, int] = field(default_factory=dict)
    """Allocated bytes by component: parameters, gradients, optimizer_state, other."""


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """An allocation that found no memory even after PyTorch gave its cache back. The program may have caught it."""

    uuid: str
    number: int
    """Counts a session's errors from 1: one that is sent twice is told by it."""
    age_seconds: float = 0.0
    """How long before sending it happened, on the reporter's monotonic clock."""
    requested_bytes: int | None = None
    """What the allocator asked the driver for: the request, rounded up to a segment. None where it was only counted."""
    device_free_bytes: int | None = None
    """Free on the device at that moment, as the driver said."""
    limit_bytes: int | None = None
    """The device's memory, or what the process' memory fraction leaves of it."""
    step: int | None = None
    phase: str = ""
    """The phase of the program that the allocation belongs to; empty outside of phases, and where none is certain."""
    sample: DeviceSample | None = None
    """The device's allocator at that moment."""


@dataclass(frozen=True, slots=True)
class DeviceResult:
    """What a command did to one device of one process. `freed_bytes` is what went back to the driver."""

    uuid: str
    reserved_before_bytes: int | None = None
    reserved_after_bytes: int | None = None
    allocated_before_bytes: int | None = None
    allocated_after_bytes: int | None = None
    freed_bytes: int | None = None
    device_free_before_bytes: int | None = None
    """`cudaMemGetInfo` right before, device-wide: other processes move it too."""
    device_free_after_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class SnapshotFile:
    """A memory snapshot that a process has written, for https://pytorch.org/memory_viz, and what it shows."""

    path: str
    """As the process sees it: in a container, of that container."""
    size_bytes: int
    segments: int
    blocks: int
    has_frames: bool
    """It says where blocks were allocated: somebody had the allocator's history recorded."""
    largest: tuple[SnapshotBlock, ...] = ()
    """The largest blocks in use, largest first."""
    emptiest: tuple[SnapshotSegment, ...] = ()
    """The segments with the most bytes that are in no tensor, though something else keeps the segment."""


@dataclass(frozen=True, slots=True)
class SnapshotBlock:
    """One block in use."""

    uuid: str
    size_bytes: int
    requested_bytes: int | None = None
    frame: str = ""
    """The program's innermost frame that allocated it, `file:line function`; empty where nobody recorded it."""


@dataclass(frozen=True, slots=True)
class SnapshotSegment:
    """One segment that holds free blocks between live ones."""

    uuid: str
    size_bytes: int
    allocated_bytes: int
    largest_free_bytes: int
    free_blocks: int


@dataclass(frozen=True, slots=True)
class CommandResult:
    """A command's end in one process."""

    id: str
    outcome: str
    """One of `OUTCOMES`."""
    reason: str = ""
    """Why it was not done; empty when it was."""
    duration_seconds: float | None = None
    devices: tuple[DeviceResult, ...] = ()
    step: int | None = None
    """After which step it ran; None where none has been counted."""
    thread_id: int | None = None
    """The native id of the thread in which it ran, as the operating system has it."""
    snapshot: SnapshotFile | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """What a reporter sends: the last sample, and the results of the commands it ran since the last report."""

    process: ProcessIdentity
    sequence: int
    """Rises by one with each report of a session: a report that overtook another is told by it."""
    protocol: int = PROTOCOL_VERSION
    sample_age_seconds: float = 0.0
    """How long before sending the sample was taken, on the reporter's monotonic clock."""
    devices: tuple[DeviceSample, ...] = ()
    pinned_host_bytes: int | None = None
    """Pinned host memory held by this process' caching host allocator."""
    step: int | None = None
    results: tuple[CommandResult, ...] = ()
    ooms: tuple[OutOfMemory, ...] = ()
    """Those since the last report."""
    actions: tuple[str, ...] = ()
    """The actions this reporter can run."""
    modes: tuple[str, ...] = ("now",)
    """The modes it knows, of `MODES`."""
    waiting: tuple[str, ...] = ()
    """Ids of the commands that it has and that wait for their moment: they need not be given again."""
    step_seconds: float | None = None
    """How long a step takes, the median of the last few; None before the second, and once none has ended for long."""
    hold_seconds: float = 0.0
    """How long the sender lets the exporter hold the reply at most; 0 asks for an answer at once."""
    final: bool = False
    """The reporter stops: forget this process now."""


@dataclass(frozen=True, slots=True)
class Command:
    """Something a reporter is asked to do.

    Giving it twice is safe: a reporter remembers ids and repeats the result.
    """

    id: str
    action: str
    deadline_seconds: float
    """Left when the reply was sent; what has not begun by then is not run."""
    uuids: tuple[str, ...] = ()
    """The devices meant, empty for all. `empty_cache` acts on every device of the process: torch has no other."""
    collect_garbage: bool = False
    """Run Python's garbage collector first, which runs the program's finalizers."""
    mode: str = "now"
    """One of `MODES`."""
    at_step: int | None = None
    """In mode `step`: after the step of this number, and no other. None: after the next."""
    fraction: float | None = None
    """Of `set_memory_fraction`: the share of each device's memory that the allocator may reserve, over 0, up to 1."""
    force: bool = False
    """Set the fraction even if more is reserved already."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What the exporter answers."""

    commands: tuple[Command, ...] = ()
    cancelled: tuple[str, ...] = ()
    """Ids of commands that must not run any more, if they have not begun."""
    report_interval_seconds: float = 1.0
    protocol: int = PROTOCOL_VERSION


_FIELD_NAMES: dict[type, tuple[str, ...]] = {
    cls: tuple(f.name for f in fields(cls))
    for cls in (
        ProcessIdentity,
        DeviceSample,
        OutOfMemory,
        DeviceResult,
        SnapshotBlock,
        SnapshotSegment,
        SnapshotFile,
        CommandResult,
        Report,
        Command,
        Reply,
    )
}


def to_wire(message: Report | Reply) -> dict[str, Any]:
    """Turn a message into what `json.dumps` takes; what is unknown or empty is left out."""
    return _object(message)


def _object(value: Any) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name in _FIELD_NAMES[type(value)]:
        item = getattr(value, name)
        if item is None or item == "" or item == () or item == {}:
            continue
        if type(item) in _FIELD_NAMES:
            item = _object(item)
        elif type(item) is tuple:
            item = [_object(part) if type(part) in _FIELD_NAMES else part for part in item]
        out[name] = item
    return out


def reply_from_wire(document: Any) -> Reply:
    """Read an exporter's reply, of this or any compatible version.

    Raises:
        WireError: the document is not a reply; nothing of it is used.
    """
    reply = _mapping(document, "")
    commands = reply.get("commands", [])
    if not isinstance(commands, list):
        raise WireError("must be an array", "commands")
    interval = _number(reply, "report_interval_seconds", "", default=1.0)
    if interval <= 0:
        raise WireError("must be over 0", "report_interval_seconds")
    return Reply(
        commands=tuple(_command(item, f"commands.{i}") for i, item in enumerate(commands)),
        cancelled=_texts(reply, "cancelled", ""),
        report_interval_seconds=interval,
        protocol=int(_number(reply, "protocol", "", default=PROTOCOL_VERSION)),
    )


def _command(item: Any, where: str) -> Command:
    command = _mapping(item, where)
    at_step = _optional_number(command, "at_step", where)
    return Command(
        id=_text(command, "id", where),
        action=_text(command, "action", where),
        deadline_seconds=_number(command, "deadline_seconds", where),
        uuids=_texts(command, "uuids", where),
        collect_garbage=command.get("collect_garbage") is True,
        mode=_text(command, "mode", where) if "mode" in command else "now",
        at_step=None if at_step is None else int(at_step),
        fraction=_optional_number(command, "fraction", where),
        force=command.get("force") is True,
    )


def _mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise WireError("must be an object", where)
    return value


def _text(mapping: dict[str, Any], name: str, where: str) -> str:
    value = mapping.get(name)
    if not isinstance(value, str) or not value:
        raise WireError("must be a string that is not empty", f"{where}.{name}".lstrip("."))
    return value


def _texts(mapping: dict[str, Any], name: str, where: str) -> tuple[str, ...]:
    value = mapping.get(name, [])
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise WireError("must be an array of strings", f"{where}.{name}".lstrip("."))
    return tuple(value)


def _optional_number(mapping: dict[str, Any], name: str, where: str) -> float | None:
    return None if mapping.get(name) is None else _number(mapping, name, where)


def _number(mapping: dict[str, Any], name: str, where: str, default: float | None = None) -> float:
    value = mapping.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise WireError("must be a finite number", f"{where}.{name}".lstrip("."))
    return float(value)
