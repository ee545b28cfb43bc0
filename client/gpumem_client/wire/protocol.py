"""The messages between a reporter and its exporter, as frozen dataclasses.

A reporter posts a `Report` to `POST /api/v1/reports`. The `Reply` has the commands for the process; their results are
in its next report. The exporter may hold the reply until there is a command or until the report interval has passed.

Compatibility: a reader ignores unknown fields and uses the default of a missing field, so minor versions can be mixed.
`PROTOCOL_VERSION` increases only when that is not sufficient.

Sizes are bytes and `*_seconds` are seconds. None means unknown, never zero. Training processes import this module, so
it uses the standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any

from gpumem_client.wire.errors import WireError

PROTOCOL_VERSION = 1
REPORTS_PATH = "/api/v1/reports"
PROFILES_PATH = "/api/v1/profiles"
"""A reporter posts a memory profile there: JSON as gzip, see `gpumem_client.profile.profile_types`."""

MAX_INTEGER = 2**63 - 1
"""The largest number in a report."""
MAX_COMMANDS = 64
"""The maximum number of commands in one reply. Others follow in the next one."""
MAX_TEXT_LENGTH = 256
"""The maximum length of a text in characters. Reporters cut longer ones; the exporter rejects them."""
MAX_LABEL_LENGTH = 128
"""The maximum length of a label value in characters: workload, rank, phase, component. Reporters and the exporter cut
longer ones."""
MAX_PHASES = 16
"""The maximum number of phases of a device. Reporters and the exporter leave out others."""
MAX_COMPONENTS = 16
"""The maximum number of components of a device. The exporter leaves out others."""

MODES = ("now", "step", "idle")
"""When a command runs. `now`: on the reporter's thread, when it arrives. `step`: in the training thread, at the end of
a step. `idle`: on the reporter's thread, after some seconds without a step or an allocation."""

ENGINE_ACTIONS = ("release_memory", "resume_memory")
"""The commands for an inference engine. In mode `idle`, the process waits until the engine has no request."""
COMMAND_ACTIONS = (
    *("empty_cache", "collect_garbage", "reset_peak", "snapshot", "profile", "set_memory_fraction"),
    *ENGINE_ACTIONS,
)
"""The actions that a process runs itself."""
ACTION_OF_COMMAND: Mapping[str, str] = {
    "clear": "empty_cache",
    "gc": "collect_garbage",
    "reset-peak": "reset_peak",
    "fraction": "set_memory_fraction",
    "sleep": "release_memory",
    "wake": "resume_memory",
}
"""The action of each command of the terminal that has another name."""

OUTCOMES = ("done", "refused", "failed", "expired", "unsupported", "gone")
"""How a command can end in one process."""


@dataclass(frozen=True)
class ProcessIdentity:
    """The reporting process: (`pid_namespace`, `pid`, `start_time_ticks`). Rank and workload are only labels."""

    pid: int
    """In the process's own PID namespace."""
    start_time_ticks: int
    """Field 22 of /proc/self/stat: clock ticks after boot, the same in every PID namespace."""
    pid_namespace: int
    """Inode of /proc/self/ns/pid; 0 if it cannot be read."""
    session: str
    """Random for each reporter: distinguishes the reporters before and after a restart or an exec in one process."""
    session_started_seconds: float
    """CLOCK_MONOTONIC when the reporter started. If a process has two sessions, the later one represents it."""
    workload: str = ""
    rank: str = ""
    command: str = ""
    """Program and script without arguments, because arguments may contain secrets."""
    torch_version: str = ""
    allocator_settings: str = ""
    client_version: str = ""
    slurm_job_id: str = ""
    """SLURM_JOB_ID of its environment."""
    slurm_account: str = ""
    """SLURM_JOB_ACCOUNT of its environment: the account that Slurm charges for the job."""
    ray_job_id: str = ""
    """The job of a Ray worker or driver, from Ray itself, otherwise RAY_JOB_ID of its environment."""
    world_size: int | None = None
    """The number of ranks, at least 1, from the launcher that set the rank."""
    nvml_interceptor: str = ""
    """A library that answers for NVML in this process, such as HAMi's libvgpu.so; empty if there is none."""


# Not frozen, though no code may change a sample: a frozen class of so many fields takes 9 µs for each object instead of
# 1.3 µs, and a report needs up to three for each device.
@dataclass
class DeviceSample:
    """The allocator of one device at one time, in the words of `torch.cuda.memory_stats` (`.all.`, `.current`)."""

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
    """What `empty_cache()` would release to the driver now, including memory that waits for another stream.

    Exact if PyTorch's statistics suffice (classic segments, no private pool) or if the heap was walked for this
    sample. A large heap that keeps changing is not walked each time: then it is reserved − allocated − what the last
    walk found to be not releasable. That walk is at most 500 times its cost ago: 5 s at 20,000 blocks. None for larger
    heaps, for pages of unknown size, and for allocators with too few statistics.

    Cache in a private pool counts once nothing can use the pool any more. The value may therefore be too low after a
    graph was freed under torch before 2.14, or if tensors outlive their `MemPool`, until the next `empty_cache()`.
    """
    idle_cache_bytes: int | None = None
    """The smallest reclaimable value of the last 60 s, and of the last minute of steps: cache that the program did not
    need for a minute.

    It comes from samples, from up to two further readings per second at random moments, and from peaks and retries of
    the allocator. It is above the true minimum by at most what the program used only between two readings. None for the
    first 60 s, and if `reclaimable_bytes` is None.
    """
    unmapped_bytes: int | None = None
    """Bytes that PyTorch counts as reserved and the driver does not hold: torch_memory_saver and vLLM's sleep mode
    release the pages of live tensors. The reserved, allocated, reclaimable and private bytes are without them. None if
    they are not known, and in a process that has loaded no such library."""
    alloc_retries: int | None = None
    ooms: int | None = None
    segments_allocated: int | None = None
    """`segment.all.allocated`: segments allocated from the driver since the start."""
    segments_freed: int | None = None
    """`segment.all.freed`: segments released to the driver since the start."""
    cache_flushes: int | None = None
    """`num_sync_all_streams`: flushes of the cache, requested or forced."""
    peak_resets: int | None = None
    """The number of resets of the peaks that the reporter has seen, by any code."""
    planned_reserved_peak_bytes: int | None = None
    """The planned `reserved_peak_bytes`. A plan is for one device: here, the process's device with the highest peak."""
    nccl_bytes: int | None = None
    """Device memory of NCCL's communicators, which PyTorch's allocator does not count. None before torch 2.15."""
    memory_limit_bytes: int | None = None
    """The most that the process may use on the device: the smallest of the memory fraction of its allocator and of the
    limits that HAMi and KAI set in its environment. None if there is no limit or none is known."""
    phase_peak_bytes: Mapping[str, int] = field(default_factory=dict)
    """The highest known peak of allocated bytes in each named phase; a lower bound where it is not exact."""
    component_bytes: Mapping[str, int] = field(default_factory=dict)
    """Allocated bytes by component: parameters, gradients, optimizer_state, other; of an inference engine weights,
    kv_cache, cuda_graphs, runtime, other. Without unmapped memory."""
    component_unmapped_bytes: Mapping[str, int] = field(default_factory=dict)
    """The unmapped bytes by component, of an engine that sleeps."""
    kv_cache_bytes: Mapping[str, int] = field(default_factory=dict)
    """The bytes of an engine's key-value cache by state, of `KV_CACHE_STATES`; empty if they are not known."""


KV_CACHE_STATES = ("used", "evictable", "free")
"""Used by running requests; kept for later requests with the same prefix, and usable at once; not used."""
ENGINE_STATES = ("starting", "serving", "idle", "asleep")


@dataclass(frozen=True)
class EngineState:
    """The inference engine in the process."""

    name: str
    """Such as `vllm` and `sglang`."""
    version: str = ""
    model: str = ""
    """As the engine's users call it."""
    state: str = ""
    """One of `ENGINE_STATES`; empty if it is not known."""
    idle_seconds: float | None = None
    """The time since the last request; None if it is not known."""


@dataclass(frozen=True)
class OutOfMemory:
    """An allocation that failed even after PyTorch released its cache. The program may have caught the error."""

    uuid: str
    number: int
    """Counts the errors of a session from 1, so that an error that is sent twice is recognized."""
    age_seconds: float = 0.0
    """Seconds between the error and the report, on the reporter's monotonic clock."""
    requested_bytes: int | None = None
    """What the allocator requested from the driver, rounded up to a segment. None if the error was only counted."""
    device_free_bytes: int | None = None
    """Free memory of the device at that time, from the driver."""
    limit_bytes: int | None = None
    """The device's memory, or the part of it that the process's memory fraction allows."""
    step: int | None = None
    phase: str = ""
    """The phase of the allocation; empty outside of phases and where the phase is not certain."""
    sample: DeviceSample | None = None
    """The device's allocator at that time."""


@dataclass(frozen=True)
class DeviceResult:
    """What a command did to one device of one process. `freed_bytes` is what it released to the driver."""

    uuid: str
    reserved_before_bytes: int | None = None
    reserved_after_bytes: int | None = None
    allocated_before_bytes: int | None = None
    allocated_after_bytes: int | None = None
    freed_bytes: int | None = None
    device_free_before_bytes: int | None = None
    """From `cudaMemGetInfo`, for the whole device: other processes change it too."""
    device_free_after_bytes: int | None = None


@dataclass(frozen=True)
class StillFree:
    """How much of what a command freed on one device the process has not reserved again after the settling time."""

    id: str
    """The command."""
    uuid: str
    still_free_bytes: int


@dataclass(frozen=True)
class SnapshotFile:
    """A memory snapshot that a process has written for https://pytorch.org/memory_viz."""

    path: str
    """As the process sees it: in a container, the path in that container."""
    size_bytes: int
    segments: int
    blocks: int
    has_frames: bool
    """Whether it has the stack frames of allocations, because the allocator's history was recorded."""


@dataclass(frozen=True)
class CommandResult:
    """The result of a command in one process."""

    id: str
    outcome: str
    """One of `OUTCOMES`."""
    reason: str = ""
    """The reason for the outcome, for people; empty if there is nothing to explain."""
    reason_code: str | None = None
    """The reason for programs, usually of `wire.reason_codes`; None without a reason, and from older reporters."""
    duration_seconds: float | None = None
    devices: tuple[DeviceResult, ...] = ()
    step: int | None = None
    """The step after which it ran; None before the first step."""
    thread_id: int | None = None
    """The native id of the thread in which it ran."""
    snapshot: SnapshotFile | None = None
    profile: str = ""
    """The id of the profile that the exporter has accepted."""


@dataclass(frozen=True)
class Report:
    """What a reporter sends: the last sample, and the results of commands since the last report."""

    process: ProcessIdentity
    sequence: int
    """Increases by one with each report of a session, so that a report that overtook another is recognized."""
    protocol: int = PROTOCOL_VERSION
    sample_age_seconds: float = 0.0
    """The age of the sample when it was sent, on the reporter's monotonic clock."""
    devices: tuple[DeviceSample, ...] = ()
    pinned_host_bytes: int | None = None
    """Pinned host memory of the process's caching host allocator."""
    step: int | None = None
    results: tuple[CommandResult, ...] = ()
    still_free: tuple[StillFree, ...] = ()
    """For commands with `settle_seconds`, in a later report than the result."""
    ooms: tuple[OutOfMemory, ...] = ()
    """The errors since the last report."""
    actions: tuple[str, ...] = ()
    """The actions that this reporter supports and the process's owner allows."""
    denied_actions: tuple[str, ...] = ()
    """The actions that the process's owner does not allow: GPUMEM_ACTIONS, GPUMEM_PROFILE, `start(actions=…)`."""
    modes: tuple[str, ...] = ("now",)
    """The modes that it supports, of `MODES`."""
    waiting: tuple[str, ...] = ()
    """Ids of the commands that wait in the process for a step or an idle time; they need not be sent again."""
    step_seconds: float | None = None
    """The median duration of the last steps; None before the second step, and after a long time without one."""
    hold_seconds: float = 0.0
    """The maximum time that the exporter may hold the reply; 0 requests an immediate reply."""
    final: bool = False
    """The reporter stops: the exporter forgets this process immediately."""
    engine_starting: bool | None = None
    """Whether the inference engine in the process starts, so that memory released on its devices spoils its start.
    False once it has started; None without an engine that the reporter knows."""
    engine: EngineState | None = None
    inactive_seconds: float | None = None
    """The time since the last step, allocation or request of an engine that the reporter has seen, or since its start.
    None if the allocator does not count allocations and no step ends."""


@dataclass(frozen=True)
class Command:
    """A request to a reporter. It may be sent twice: a reporter remembers ids and repeats the result."""

    id: str
    action: str
    deadline_seconds: float
    """Seconds left when the reply was sent. A command that has not started by then does not run."""
    uuids: tuple[str, ...] = ()
    """The target devices; empty for all. `empty_cache` acts on every device: torch cannot limit it to one."""
    collect_garbage: bool = False
    """Run Python's garbage collector first, which runs the program's finalizers."""
    mode: str = "now"
    """One of `MODES`."""
    at_step: int | None = None
    """In mode `step`: run after exactly this step. None: after the next one."""
    fraction: float | None = None
    """For `set_memory_fraction`: the share of each device that the allocator may reserve, over 0 and at most 1."""
    force: bool = False
    """Set the fraction even if more is reserved already."""
    settle_seconds: float = 0.0
    """For `empty_cache`: report how much of the freed memory is still free after this time. 0: do not."""
    duration_seconds: float = 0.0
    """For `profile`: how long to record. 0: what is live now, without a recording."""
    search_seconds: float = 0.0
    """For `profile`: how long to search for what refers to tensors. 0: no search."""
    keep: tuple[str, ...] = ()
    """For `release_memory`: components that stay, such as `weights`."""


@dataclass(frozen=True)
class Reply:
    """The exporter's reply to a report."""

    commands: tuple[Command, ...] = ()
    cancelled: tuple[str, ...] = ()
    """Ids of commands that must not start any more."""
    report_interval_seconds: float = 1.0
    protocol: int = PROTOCOL_VERSION


def denied_by_owner(denied: Collection[str], action: str, *, collect_garbage: bool = False) -> str:
    """Return why a process does not run an action, for people; empty if its owner allows it."""
    needed = (action, "collect_garbage") if collect_garbage else (action,)
    name = next((each for each in needed if each in denied), None)
    return f"its owner does not allow {name} (GPUMEM_ACTIONS, GPUMEM_PROFILE)" if name else ""


def to_wire(message: object) -> dict[str, Any]:
    """Convert a message, or a part of one, to what `json.dumps` accepts, without the unknown and empty fields."""
    known = {name: item for name, item in vars(message).items() if item is not None and item not in ("", (), {})}
    return {name: item if isinstance(item, (int, float, str)) else _written(item) for name, item in known.items()}


def _written(item: Any) -> Any:
    if isinstance(item, tuple):
        return [_written(part) for part in item]
    return to_wire(item) if is_dataclass(item) else item


def reply_from_wire(document: Any) -> Reply:
    """Read an exporter's reply, of this or a compatible version.

    Raises:
        WireError: the document is not a reply.
    """
    reply: Reply = _read("Reply", document, "")
    if len(reply.commands) > MAX_COMMANDS:
        raise WireError(f"must have at most {MAX_COMMANDS} items", "commands")
    if reply.report_interval_seconds <= 0:
        raise WireError("must be over 0", "report_interval_seconds")
    return reply


def _read(kind: Any, value: Any, where: str) -> Any:
    """Read a value of a type, which is given by its annotation."""
    if kind.endswith(" | None"):
        return None if value is None else _read(kind[:-7], value, where)
    if kind in ("Reply", "Command"):
        if not isinstance(value, dict):
            raise WireError("must be an object", where)
        cls = globals()[kind]
        return cls(
            **{
                each.name: _read(each.type, value.get(each.name), f"{where}.{each.name}".lstrip("."))
                for each in fields(cls)
                if each.name in value or each.default is MISSING
            }
        )
    if kind.startswith("tuple["):
        if not isinstance(value, list):
            raise WireError("must be an array", where)
        return tuple(_read(kind[6:-6], item, f"{where}.{i}") for i, item in enumerate(value))
    if kind == "bool":
        return value is True
    if kind == "str":
        if not isinstance(value, str) or not value:
            raise WireError("must be a string that is not empty", where)
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise WireError("must be a finite number", where)
    return int(value) if kind == "int" else float(value)
