"""The one table of every metric: name, type, help, labels. Nothing else in the package spells a metric's name.

Names and labels are the public surface; dashboards, rules and their tests are held against this table. The order here
is the order on the page. Bytes are bytes, seconds are seconds, ratios run from 0 to 1, but that of an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["METRICS", "SCRAPED", "Metric"]

_DEVICE = ("gpu", "uuid")
_TORCH = ("gpu", "uuid", "pid", "workload", "rank")
_REPORTER = ("pid", "workload", "rank")


@dataclass(frozen=True, slots=True, eq=False)
class Metric:
    """One metric family. There is one object for each: families are compared and hashed by identity."""

    name: str
    """As its series are called, in both formats; a counter's ends in `_total`."""
    type: Literal["gauge", "counter", "histogram"]
    help: str
    """What the number is, for somebody who has never seen it. Holds nothing that either format would have escaped."""
    labels: tuple[str, ...] = ()

    @property
    def family(self) -> str:
        """The family's name in OpenMetrics, which names a counter without its `_total`."""
        return self.name.removesuffix("_total") if self.type == "counter" else self.name


# --- devices, as NVML sees them

DEVICE_INFO = Metric(
    "gpumem_device_info",
    "gauge",
    "What the device is; always 1, the labels tell. mig_profile and parent_uuid are filled for a MIG device. Join on"
    " uuid.",
    (*_DEVICE, "name", "driver_version", "pci_bus_id", "mig_profile", "parent_uuid"),
)
DEVICE_UP = Metric(
    "gpumem_device_up",
    "gauge",
    "1 while the driver answers for the device, 0 when it does not (fell off the bus, cannot be read); its other"
    " figures are absent then.",
    _DEVICE,
)
DEVICE_TOTAL = Metric(
    "gpumem_device_memory_total_bytes",
    "gauge",
    "Memory of the device in bytes, as NVML counts it: used + free + reserved. Somewhat less than the size on the data"
    " sheet.",
    _DEVICE,
)
DEVICE_USED = Metric(
    "gpumem_device_memory_used_bytes",
    "gauge",
    "Bytes in use on the device by whatever process: tensors, allocators' caches, CUDA contexts, libraries (NVML used)."
    " A full device need not be a busy one: see gpumem_ledger_bytes for what could be given back. Includes what the"
    " driver holds back only where gpumem_device_memory_reserved_bytes is absent.",
    _DEVICE,
)
DEVICE_FREE = Metric(
    "gpumem_device_memory_free_bytes",
    "gauge",
    "Bytes of the device that nobody holds (NVML free). What PyTorch caches is not in it, though PyTorch can use it.",
    _DEVICE,
)
DEVICE_RESERVED = Metric(
    "gpumem_device_memory_reserved_bytes",
    "gauge",
    "Bytes that driver and firmware hold back for themselves (NVML reserved). Not PyTorch's reserved: that is"
    " gpumem_torch_reserved_bytes. Absent where the driver does not tell it apart from used.",
    _DEVICE,
)
DEVICE_HOST_MEMORY = Metric(
    "gpumem_device_memory_is_host",
    "gauge",
    "1 for an integrated GPU, which has no memory of its own: total, free and used are the host's then (MemTotal and"
    " MemAvailable of /proc/meminfo), and what programs on the CPU use is in used and in the ledger's unattributed."
    " Absent for every other device.",
    _DEVICE,
)
DEVICE_UTILIZATION = Metric(
    "gpumem_device_utilization_ratio",
    "gauge",
    "Share of the driver's last sampling period (up to a second) in which at least one kernel ran, 0 to 1. Busy time,"
    " not bytes, and not how much of the chip the kernels filled.",
    _DEVICE,
)

# --- the ledger

LEDGER = Metric(
    "gpumem_ledger_bytes",
    "gauge",
    "Where every byte of a device is; the categories of a device add up to gpumem_device_memory_total_bytes."
    " torch_allocated: in tensors. torch_reclaimable: cached, empty_cache gives it back. torch_fragmented: the"
    " rest of the cache: empty_cache cannot give it back, or is not known to. non_torch: CUDA context, NCCL and"
    " libraries of processes that report."
    " other_processes: processes that do not report. driver_reserved: held back by the driver. unattributed: used, but"
    " of no process that the driver lists; signed, since driver and processes are read moments apart. free: nobody's."
    " A category that cannot be known is absent.",
    (*_DEVICE, "category"),
)

# --- processes

PROCESS_USED = Metric(
    "gpumem_process_memory_used_bytes",
    "gauge",
    "Bytes that a process holds on a device, as NVML counts them: tensors, cache, CUDA context, NCCL and libraries."
    " Absent where the driver does not tell. pid is the host's.",
    (*_DEVICE, "pid"),
)
PROCESS_INFO = Metric(
    "gpumem_process_info",
    "gauge",
    "What a process on the devices is; always 1, one series a pid, the labels tell. reporting is true while it reports"
    " its allocator. command is program and script without arguments. pid is the host's; where that cannot be known,"
    " the process' own, followed by @ and the inode of its PID namespace if another process here has the same. Join on"
    " pid.",
    (
        *_REPORTER,
        "command",
        "user",
        "container_id",
        "k8s_pod_uid",
        "k8s_namespace",
        "k8s_pod",
        "k8s_container",
        "slurm_job_id",
        "ray_job_id",
        "reporting",
        "torch_version",
        "allocator_settings",
    ),
)

# --- PyTorch's caching allocator, as each process reports it

TORCH_ALLOCATED = Metric(
    "gpumem_torch_allocated_bytes",
    "gauge",
    "Bytes handed out to tensors, rounded up to the allocator's blocks (torch.cuda.memory_allocated).",
    _TORCH,
)
TORCH_RESERVED = Metric(
    "gpumem_torch_reserved_bytes",
    "gauge",
    "Bytes that PyTorch's caching allocator holds from the driver: tensors plus cache (torch.cuda.memory_reserved). Not"
    " NVML's reserved.",
    _TORCH,
)
TORCH_ACTIVE = Metric(
    "gpumem_torch_active_bytes",
    "gauge",
    "Bytes in tensors or freed but still in use on another CUDA stream (active_bytes.all.current).",
    _TORCH,
)
TORCH_INACTIVE_SPLIT = Metric(
    "gpumem_torch_inactive_split_bytes",
    "gauge",
    "Free bytes in segments that also hold live blocks, so that they cannot go back to the driver"
    " (inactive_split_bytes.all.current). Always 0 with expandable segments: see gpumem_torch_fragmented_bytes.",
    _TORCH,
)
TORCH_REQUESTED = Metric(
    "gpumem_torch_requested_bytes",
    "gauge",
    "Bytes that the program asked for, before rounding (requested_bytes.all.current); allocated less requested is lost"
    " to rounding.",
    _TORCH,
)
TORCH_ALLOCATED_PEAK = Metric(
    "gpumem_torch_allocated_peak_bytes",
    "gauge",
    "Highest gpumem_torch_allocated_bytes since whoever last reset the peaks in this process: the program, a library"
    " or a reset_peak action; the exporter never resets them by itself.",
    _TORCH,
)
TORCH_RESERVED_PEAK = Metric(
    "gpumem_torch_reserved_peak_bytes",
    "gauge",
    "Highest gpumem_torch_reserved_bytes since whoever last reset the peaks in this process: the program, a library or"
    " a reset_peak action; the exporter never resets them by itself.",
    _TORCH,
)
TORCH_PLANNED_RESERVED_PEAK = Metric(
    "gpumem_torch_planned_reserved_peak_bytes",
    "gauge",
    "What the plan of the job, which was made before it ran, expects of gpumem_torch_reserved_peak_bytes. A plan is for"
    " one device a process; of several it stands at the one with the highest peak. Absent without a plan.",
    _TORCH,
)
TORCH_PLAN_ERROR_RATIO = Metric(
    "gpumem_torch_plan_error_ratio",
    "gauge",
    "gpumem_torch_planned_reserved_peak_bytes / gpumem_torch_reserved_peak_bytes - 1. Signed: 0.05 is 5 % too much"
    " planned, -0.05 is 5 % too little. Absent without a plan, until the second step has ended, and where steps are not"
    " counted. A reset of the peaks leaves it as it is unless the cache was emptied, too: then it is of what was"
    " reserved since.",
    _TORCH,
)
TORCH_RECLAIMABLE = Metric(
    "gpumem_torch_reclaimable_bytes",
    "gauge",
    "Bytes that torch.cuda.empty_cache would give back to the driver now. Exact, but for heaps of more than some 4,000"
    " blocks with expandable segments or private pools: those are walked every few seconds, and what could not be"
    " returned then is taken off in between. Absent where it cannot be known.",
    _TORCH,
)
TORCH_FRAGMENTED = Metric(
    "gpumem_torch_fragmented_bytes",
    "gauge",
    "Bytes in no tensor that empty_cache cannot give back: reserved less allocated less reclaimable. Absent where"
    " reclaimable is.",
    _TORCH,
)
TORCH_PRIVATE_POOLS = Metric(
    "gpumem_torch_private_pools_bytes",
    "gauge",
    "Bytes reserved by live private pools (CUDA graphs, torch.cuda.MemPool), part of gpumem_torch_reserved_bytes;"
    " empty_cache leaves them alone. Absent where PyTorch does not tell.",
    _TORCH,
)
TORCH_PINNED_HOST = Metric(
    "gpumem_torch_pinned_host_bytes",
    "gauge",
    "Page-locked host memory held by the process' caching host allocator: main memory, on no device.",
    _REPORTER,
)
TORCH_SLACK_RATIO = Metric(
    "gpumem_torch_slack_ratio",
    "gauge",
    "Share of the reserved bytes that is in no tensor, 0 to 1: cache, be it reclaimable or fragmented. High after a"
    " peak; not fragmentation by itself. Absent while nothing is reserved.",
    _TORCH,
)
TORCH_FRAGMENTATION_RATIO = Metric(
    "gpumem_torch_fragmentation_ratio",
    "gauge",
    "Share of the reserved bytes that is in no tensor and that empty_cache cannot give back, 0 to 1. Absent while"
    " nothing is reserved.",
    _TORCH,
)
TORCH_ALLOC_RETRIES = Metric(
    "gpumem_torch_alloc_retries_total",
    "counter",
    "Allocations that failed at first, upon which the allocator flushed its cache and tried again: each stalls the"
    " program, and an out-of-memory error is near.",
    _TORCH,
)
TORCH_OOMS = Metric(
    "gpumem_torch_ooms_total",
    "counter",
    "Out-of-memory errors that the allocator raised in this process, caught ones included.",
    _TORCH,
)
TORCH_SEGMENTS_ALLOCATED = Metric(
    "gpumem_torch_segments_allocated_total",
    "counter",
    "Segments ever taken from the driver (segment.all.allocated). A steady rate in a steady loop means that the cache"
    " does not hold.",
    _TORCH,
)
TORCH_SEGMENTS_FREED = Metric(
    "gpumem_torch_segments_freed_total",
    "counter",
    "Segments ever given back to the driver (segment.all.freed); giving back waits for the device.",
    _TORCH,
)
TORCH_CACHE_FLUSHES = Metric(
    "gpumem_torch_cache_flushes_total",
    "counter",
    "Times that the allocator waited for all streams to flush its cache, asked for or forced (num_sync_all_streams)."
    " Absent where PyTorch does not count them.",
    _TORCH,
)
TORCH_PEAK_RESETS = Metric(
    "gpumem_torch_peak_resets_total",
    "counter",
    "Times that this process' peaks were seen to have been reset, by the program, a library or a reset_peak action: a"
    " peak that fell between two samples. One that rose again in between is not seen. Begins anew with the reporter.",
    _TORCH,
)
TORCH_STEP = Metric(
    "gpumem_torch_step",
    "gauge",
    "The training step that the process was at when it took its last sample. Absent where steps are not counted.",
    _TORCH,
)
TORCH_PHASE_PEAK = Metric(
    "gpumem_torch_phase_peak_bytes",
    "gauge",
    "Highest known peak of the allocated bytes within each phase that the program names (forward, backward, ...), since"
    " the peaks were last reset. Exact where the phase raised the allocator's own peak or asked for a reset, else a"
    " lower bound.",
    (*_TORCH, "phase"),
)
TORCH_COMPONENT = Metric(
    "gpumem_torch_component_bytes",
    "gauge",
    "Allocated bytes by what they are for: parameters, gradients, optimizer_state, other.",
    (*_TORCH, "component"),
)
TORCH_NON_TORCH = Metric(
    "gpumem_torch_non_torch_bytes",
    "gauge",
    "What NVML says the process uses less what its allocator reserved: CUDA context, NCCL, libraries, other allocators."
    " Signed: negative for as long as the report is ahead of the driver's last reading.",
    _TORCH,
)

# --- the last out-of-memory error of each process on a device

LAST_OOM_TIMESTAMP = Metric(
    "gpumem_last_oom_timestamp_seconds",
    "gauge",
    "When the process last ran out of memory on the device, caught errors included, in seconds since the epoch. Stays"
    " for an hour, also when the process died of it; gpu and pid are as they were then. At most 256 errors are shown,"
    " the last ones.",
    _TORCH,
)
LAST_OOM_REQUESTED = Metric(
    "gpumem_last_oom_requested_bytes",
    "gauge",
    "Bytes that the allocator asked the driver for when the process last ran out of memory: the program's request,"
    " rounded up to a segment.",
    _TORCH,
)
LAST_OOM_DEVICE_FREE = Metric(
    "gpumem_last_oom_device_free_bytes",
    "gauge",
    "Bytes that nobody held on the device when the process last ran out of memory, as the driver said.",
    _TORCH,
)
LAST_OOM_LIMIT = Metric(
    "gpumem_last_oom_limit_bytes",
    "gauge",
    "Bytes that the process could have had at most when it last ran out of memory: the device's memory, or what the"
    " process' memory fraction leaves of it.",
    _TORCH,
)
LAST_OOM_ALLOCATED = Metric(
    "gpumem_last_oom_allocated_bytes",
    "gauge",
    "gpumem_torch_allocated_bytes when the process last ran out of memory.",
    _TORCH,
)
LAST_OOM_RESERVED = Metric(
    "gpumem_last_oom_reserved_bytes",
    "gauge",
    "gpumem_torch_reserved_bytes when the process last ran out of memory, after the allocator had flushed its cache.",
    _TORCH,
)
LAST_OOM_RECLAIMABLE = Metric(
    "gpumem_last_oom_reclaimable_bytes",
    "gauge",
    "gpumem_torch_reclaimable_bytes when the process last ran out of memory, after the allocator had flushed its cache."
    " Absent where it cannot be known.",
    _TORCH,
)
LAST_OOM_FRAGMENTED = Metric(
    "gpumem_last_oom_fragmented_bytes",
    "gauge",
    "gpumem_torch_fragmented_bytes when the process last ran out of memory: where these and the device's free bytes"
    " together would have held the request, fragmentation is why it failed. Absent where reclaimable is.",
    _TORCH,
)

# --- the exporter itself

BUILD_INFO = Metric(
    "gpumem_exporter_build_info",
    "gauge",
    "The exporter; always 1. version is its own, python the interpreter's; source is nvml for real devices, demo for"
    " simulated ones.",
    ("version", "source", "python"),
)
NVML_UP = Metric(
    "gpumem_nvml_up",
    "gauge",
    "1 if the driver's library answered at the last poll and that poll is recent, else 0: then no series of devices"
    " and processes is shown.",
)
POLL_DURATION = Metric("gpumem_poll_duration_seconds", "gauge", "How long the last poll of all devices took.")
POLL_TIMESTAMP = Metric(
    "gpumem_poll_timestamp_seconds",
    "gauge",
    "When the last poll of the devices ended, in seconds since the epoch: what NVML says on this page is of that"
    " moment. Absent once the poll is too old to be shown.",
)
REPORTER_UP = Metric(
    "gpumem_reporter_up",
    "gauge",
    "1 while the process reports; 0 when it fell silent for longer than the report expiry though it is not known to"
    " have ended: its torch series are gone then.",
    _REPORTER,
)
REPORTER_TIMESTAMP = Metric(
    "gpumem_reporter_last_report_timestamp_seconds",
    "gauge",
    "When the exporter took the process' last report, in seconds since the epoch. What it reports may be older: see"
    " gpumem_reporter_sample_timestamp_seconds.",
    _REPORTER,
)
SAMPLE_TIMESTAMP = Metric(
    "gpumem_reporter_sample_timestamp_seconds",
    "gauge",
    "When the process took the sample that its torch series show, in seconds since the epoch by the exporter's clock."
    " While training steps run that is the last step's end, so that with long steps it may be a minute old.",
    _REPORTER,
)
COLLECTOR_SUCCESS = Metric(
    "gpumem_scrape_collector_success",
    "gauge",
    "1 if this part of the page could be made at this scrape, 0 if it failed: its series are absent then, the others"
    " stay right.",
    ("collector",),
)
COLLECTOR_DURATION = Metric(
    "gpumem_scrape_collector_duration_seconds",
    "gauge",
    "How long this part of the page took at this scrape. What was prepared as reports came in is not in it.",
    ("collector",),
)
REPORTS = Metric(
    "gpumem_reports_total",
    "counter",
    "Reports that processes sent, by what became of them.",
    ("outcome",),
)
PROCESSES_DROPPED = Metric(
    "gpumem_processes_dropped_total",
    "counter",
    "Reports turned away because as many processes report already as are allowed (--report.max-processes); each is a"
    " process that this page does not show.",
)
ACTIONS = Metric(
    "gpumem_actions_total",
    "counter",
    "What became of actions in the processes they were meant for: one a process, dry runs left out.",
    ("action", "outcome"),
)
ACTION_FREED = Metric(
    "gpumem_action_freed_bytes_total",
    "counter",
    "Bytes that actions gave back to the driver, as measured in the processes; dry runs left out.",
    ("action",),
)
ACTION_DURATION = Metric(
    "gpumem_action_duration_seconds",
    "histogram",
    "From the request of an action to its last result; dry runs left out.",
    ("action",),
)
EVENTS = Metric(
    "gpumem_events_total",
    "counter",
    "What happened on the node since the exporter was started, by type of event, each once. An event counts once it is"
    " kept, so that /api/v1/events has it; gpumem_events_dropped_total counts those that could not be.",
    ("type",),
)
EVENTS_DROPPED = Metric(
    "gpumem_events_dropped_total",
    "counter",
    "Events that could not be kept: the disk took none, and too many waited for it. /health says why.",
)
HELD_REQUESTS = Metric(
    "gpumem_held_requests",
    "gauge",
    "Requests that are held open until there is something to say: reports that wait for commands, actions that wait for"
    " their end, live pages. About one for each process that reports.",
)
POLICY_EVALUATIONS = Metric(
    "gpumem_policy_evaluations_total",
    "counter",
    "Evaluations of the rules of the policy file, each on a process on a device, by rule and result.",
    ("rule", "result"),
)
ALERTS = Metric(
    "gpumem_alerts_total",
    "counter",
    "Alerts that Alertmanager sent, by what became of them; a body that is no such message counts once, as invalid.",
    ("outcome",),
)

SCRAPED: tuple[Metric, ...] = (
    BUILD_INFO,
    NVML_UP,
    POLL_DURATION,
    POLL_TIMESTAMP,
    DEVICE_INFO,
    DEVICE_UP,
    DEVICE_TOTAL,
    DEVICE_USED,
    DEVICE_FREE,
    DEVICE_RESERVED,
    DEVICE_HOST_MEMORY,
    DEVICE_UTILIZATION,
    LEDGER,
    PROCESS_INFO,
    PROCESS_USED,
    TORCH_ALLOCATED,
    TORCH_RESERVED,
    TORCH_ACTIVE,
    TORCH_INACTIVE_SPLIT,
    TORCH_REQUESTED,
    TORCH_ALLOCATED_PEAK,
    TORCH_RESERVED_PEAK,
    TORCH_PLANNED_RESERVED_PEAK,
    TORCH_PLAN_ERROR_RATIO,
    TORCH_RECLAIMABLE,
    TORCH_FRAGMENTED,
    TORCH_PRIVATE_POOLS,
    TORCH_PINNED_HOST,
    TORCH_SLACK_RATIO,
    TORCH_FRAGMENTATION_RATIO,
    TORCH_ALLOC_RETRIES,
    TORCH_OOMS,
    TORCH_SEGMENTS_ALLOCATED,
    TORCH_SEGMENTS_FREED,
    TORCH_CACHE_FLUSHES,
    TORCH_PEAK_RESETS,
    TORCH_STEP,
    TORCH_PHASE_PEAK,
    TORCH_COMPONENT,
    TORCH_NON_TORCH,
    LAST_OOM_TIMESTAMP,
    LAST_OOM_REQUESTED,
    LAST_OOM_DEVICE_FREE,
    LAST_OOM_LIMIT,
    LAST_OOM_ALLOCATED,
    LAST_OOM_RESERVED,
    LAST_OOM_RECLAIMABLE,
    LAST_OOM_FRAGMENTED,
    REPORTER_UP,
    REPORTER_TIMESTAMP,
    SAMPLE_TIMESTAMP,
    COLLECTOR_SUCCESS,
    COLLECTOR_DURATION,
)
"""What a snapshot shows, in the order of the page."""

METRICS: tuple[Metric, ...] = (
    *SCRAPED,
    REPORTS,
    PROCESSES_DROPPED,
    ACTIONS,
    ACTION_FREED,
    ACTION_DURATION,
    EVENTS,
    EVENTS_DROPPED,
    HELD_REQUESTS,
    POLICY_EVALUATIONS,
    ALERTS,
)
"""Every metric there is; those after `SCRAPED` are counted by the exporter as things happen."""
