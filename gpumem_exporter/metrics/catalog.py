"""The table of metrics: name, type, help and labels. A feature has its own metrics in its own folder.

Names and labels are public; tests compare dashboards and rules with this table. The order of the table is the order of
the page. Ratios are from 0 to 1, except the ratio of an error.
"""

from __future__ import annotations

from gpumem_exporter.core.readings import IDENTITY_FIELDS
from gpumem_exporter.metrics.collector_types import Metric

_DEVICE = ("gpu", "uuid")
_TORCH = ("gpu", "uuid", "pid", "workload", "rank")
_REPORTER = ("pid", "workload", "rank")
_SINCE_RESET = (
    " since the last reset of the peaks in this process, by the program, a library or a reset_peak action. The exporter"
    " itself never resets peaks."
)
_table: list[Metric] = []


def _gauge(name: str, help: str, labels: tuple[str, ...] = ()) -> Metric:  # noqa: A002 - the field's name
    return _add(Metric(name, "gauge", help, labels))


def _counter(name: str, help: str, labels: tuple[str, ...] = ()) -> Metric:  # noqa: A002 - the field's name
    return _add(Metric(name, "counter", help, labels))


def _add(metric: Metric) -> Metric:
    _table.append(metric)
    return metric


# --- the exporter and its polls

BUILD_INFO = _gauge(
    "gpumem_exporter_build_info",
    "The exporter; the value is always 1. version is the exporter's, python the interpreter's. source is"
    " nvml for real devices, demo for simulated ones.",
    ("version", "source", "python"),
)
NVML_UP = _gauge(
    "gpumem_nvml_up",
    "1 if NVML answered the last poll and that poll is recent, else 0; the series of devices and processes are then"
    " absent.",
)
POLL_DURATION = _gauge("gpumem_poll_duration_seconds", "Duration of the last poll of all devices.")
POLL_TIMESTAMP = _gauge(
    "gpumem_poll_timestamp_seconds",
    "Time at which the last poll of the devices ended, in seconds since the epoch; the NVML values on this page are"
    " from that time. Absent if the poll has expired.",
)

# --- devices, from NVML

DEVICE_INFO = _gauge(
    "gpumem_device_info",
    "Description of the device; the value is always 1. mig_profile and parent_uuid are set for a MIG device. Join on"
    " uuid.",
    (*_DEVICE, "name", "driver_version", "pci_bus_id", "mig_profile", "parent_uuid"),
)
DEVICE_UP = _gauge(
    "gpumem_device_up",
    "1 if the driver answers for the device, else 0 (it fell off the bus or cannot be read). Its other series are"
    " absent while it is 0.",
    _DEVICE,
)
DEVICE_TOTAL = _gauge(
    "gpumem_device_memory_total_bytes",
    "Memory of the device in bytes (NVML total): used + free + reserved. Slightly less than the size on the data"
    " sheet.",
    _DEVICE,
)
DEVICE_USED = _gauge(
    "gpumem_device_memory_used_bytes",
    "Bytes that all processes use on the device: tensors, allocator caches, CUDA contexts, libraries. It is total minus"
    " free minus reserved; NVML's own used may differ by some MiB. A full device is not necessarily a busy one:"
    " gpumem_ledger_bytes shows the reclaimable part. Includes the driver's reserved memory only if"
    " gpumem_device_memory_reserved_bytes is absent.",
    _DEVICE,
)
DEVICE_FREE = _gauge(
    "gpumem_device_memory_free_bytes",
    "Bytes of the device that no process uses (NVML free). PyTorch's cache does not count as free, although PyTorch"
    " can reuse it.",
    _DEVICE,
)
DEVICE_RESERVED = _gauge(
    "gpumem_device_memory_reserved_bytes",
    "Bytes reserved by driver and firmware (NVML reserved). PyTorch's reserved bytes are gpumem_torch_reserved_bytes."
    " Absent if the driver includes these bytes in used.",
    _DEVICE,
)
DEVICE_HOST_MEMORY = _gauge(
    "gpumem_device_memory_is_host",
    "1 for an integrated GPU, which uses the host's memory. Total, free and used are then the host's (MemTotal and"
    " MemAvailable in /proc/meminfo), and the memory of CPU programs counts as used and, in the ledger, as"
    " unattributed. Absent for other devices.",
    _DEVICE,
)
DEVICE_UTILIZATION = _gauge(
    "gpumem_device_utilization_ratio",
    "Share of the driver's last sampling period (up to a second) in which at least one kernel ran, 0 to 1. It measures"
    " time, not memory, and not how much of the chip the kernels used.",
    _DEVICE,
)

DEVICE_ALLOCATABLE = _gauge(
    "gpumem_device_allocatable_bytes",
    "Bytes that another process can get on the device: the free bytes, plus the idle cache of the processes that accept"
    " a clear. A process whose idle cache is unknown adds nothing. A clear makes the idle cache free.",
    _DEVICE,
)

# --- the ledger

LEDGER = _gauge(
    "gpumem_ledger_bytes",
    "Every byte of the device by category; the categories add up to gpumem_device_memory_total_bytes. torch_allocated:"
    " in tensors. torch_reclaimable: cached, and empty_cache can release it. torch_fragmented: the rest of the cache,"
    " which empty_cache cannot release or may not be able to release. non_torch: CUDA context, NCCL and libraries of"
    " reporting processes. other_processes: processes that do not report. driver_reserved: reserved by the driver."
    " unattributed: used, but by no process that the driver lists; signed, because the driver reads device and"
    " processes at different times. free: used by no process. An unknown category is absent.",
    (*_DEVICE, "category"),
)

# --- processes

PROCESS_INFO = _gauge(
    "gpumem_process_info",
    "Description of a process on the devices; the value is always 1, with one series per pid. reporting is true while"
    " the process reports its allocator. command is program and script without arguments. pid is the host's. If that"
    " is unknown, it is the process' own pid, followed by @, the inode of its PID namespace, and : and the uid of its"
    " connection if the kernel names it. user is a user of the node: empty for a process in a container, unless a user"
    " of the node has started the container. Join on pid.",
    (
        *(*_REPORTER, *IDENTITY_FIELDS, "slurm_job_id", "slurm_account", "ray_job_id"),
        *("reporting", "torch_version", "allocator_settings"),
    ),
)
PROCESS_USED = _gauge(
    "gpumem_process_memory_used_bytes",
    "Bytes that the process uses on the device (NVML): tensors, cache, CUDA context, NCCL and libraries. Absent if the"
    " driver does not report it. pid is the host's.",
    (*_DEVICE, "pid"),
)
PROCESS_LAST_ACTIVITY = _gauge(
    "gpumem_process_last_activity_timestamp_seconds",
    "Time of the last sign of activity of the process, in seconds since the epoch: a training step, an allocation, a"
    " request of its inference engine, or utilization that the driver shows for it. If there has been none, the time"
    " from which on it would have been seen. Absent if neither its reporter nor the driver shows its activity.",
    ("pid",),
)

PROCESS_MEMORY_LIMIT = _gauge(
    "gpumem_process_memory_limit_bytes",
    "The most bytes that a reporting process may use on the device: the smallest of the memory fraction of its"
    " allocator (which limits gpumem_torch_reserved_bytes), HAMi's CUDA_DEVICE_MEMORY_LIMIT and KAI's GPU_PORTION"
    " (which limit its container). Absent if no limit is known.",
    (*_DEVICE, "pid"),
)

# --- PyTorch's caching allocator, from the report of each process

TORCH_ALLOCATED = _gauge(
    "gpumem_torch_allocated_bytes",
    "Bytes allocated to tensors, rounded up to the allocator's blocks (torch.cuda.memory_allocated).",
    _TORCH,
)
TORCH_RESERVED = _gauge(
    "gpumem_torch_reserved_bytes",
    "Bytes that PyTorch's caching allocator has reserved from the driver: tensors and cache"
    " (torch.cuda.memory_reserved). Not NVML's reserved.",
    _TORCH,
)
TORCH_ACTIVE = _gauge(
    "gpumem_torch_active_bytes",
    "Bytes in tensors, or freed but still in use on another CUDA stream (active_bytes.all.current).",
    _TORCH,
)
TORCH_INACTIVE_SPLIT = _gauge(
    "gpumem_torch_inactive_split_bytes",
    "Free bytes in segments with live blocks, which the allocator cannot release to the driver"
    " (inactive_split_bytes.all.current). Always 0 with expandable segments: see gpumem_torch_fragmented_bytes.",
    _TORCH,
)
TORCH_REQUESTED = _gauge(
    "gpumem_torch_requested_bytes",
    "Bytes that the program requested, before rounding (requested_bytes.all.current). Allocated minus requested is"
    " lost to rounding.",
    _TORCH,
)
TORCH_ALLOCATED_PEAK = _gauge(
    "gpumem_torch_allocated_peak_bytes",
    f"Highest gpumem_torch_allocated_bytes{_SINCE_RESET}",
    _TORCH,
)
TORCH_RESERVED_PEAK = _gauge(
    "gpumem_torch_reserved_peak_bytes",
    f"Highest gpumem_torch_reserved_bytes{_SINCE_RESET}",
    _TORCH,
)
TORCH_PLANNED_RESERVED_PEAK = _gauge(
    "gpumem_torch_planned_reserved_peak_bytes",
    "Expected gpumem_torch_reserved_peak_bytes according to the plan that was made before the job ran. A plan covers"
    " one device per process; with several devices, the series is on the device with the highest peak. Absent without"
    " a plan.",
    _TORCH,
)
TORCH_PLAN_ERROR_RATIO = _gauge(
    "gpumem_torch_plan_error_ratio",
    "gpumem_torch_planned_reserved_peak_bytes / gpumem_torch_reserved_peak_bytes - 1. Signed: 0.05 means that the plan"
    " is 5 % too high, -0.05 that it is 5 % too low. Absent without a plan, before the end of the second step, and if"
    " steps are not counted. A reset of the peaks changes it only if the cache was emptied as well; it then refers to"
    " the bytes reserved since.",
    _TORCH,
)
TORCH_RECLAIMABLE = _gauge(
    "gpumem_torch_reclaimable_bytes",
    "Bytes that torch.cuda.empty_cache would release to the driver now. Exact, except for heaps of more than about"
    " 4,000 blocks with expandable segments or private pools: those are examined every few seconds, and the bytes that"
    " could not be released then are subtracted in between. Absent if unknown.",
    _TORCH,
)
TORCH_IDLE_CACHE = _gauge(
    "gpumem_torch_idle_cache_bytes",
    "Smallest gpumem_torch_reclaimable_bytes of the last 60 s, and of the last minute of training steps: cache that the"
    " process did not need for a minute, and that a clear releases for good. From up to three readings per second;"
    " memory that is used only between two readings may be included. Absent for the first 60 s, and if reclaimable is"
    " absent.",
    _TORCH,
)
TORCH_FRAGMENTED = _gauge(
    "gpumem_torch_fragmented_bytes",
    "Cached bytes that empty_cache cannot release: reserved minus allocated minus reclaimable. Absent if reclaimable"
    " is absent.",
    _TORCH,
)
TORCH_UNMAPPED = _gauge(
    "gpumem_torch_unmapped_bytes",
    "Bytes that PyTorch counts as reserved and the driver does not hold: torch_memory_saver or vLLM's sleep mode has"
    " released the pages of live tensors. They are not memory of the device, and the allocated, reclaimable, fragmented"
    " and reserved bytes are without them. Absent if there are none and the process has loaded no such library.",
    _TORCH,
)
TORCH_PRIVATE_POOLS = _gauge(
    "gpumem_torch_private_pools_bytes",
    "Bytes reserved by live private pools (CUDA graphs, torch.cuda.MemPool), included in gpumem_torch_reserved_bytes."
    " empty_cache does not release them. Absent if PyTorch does not report it.",
    _TORCH,
)
TORCH_PINNED_HOST = _gauge(
    "gpumem_torch_pinned_host_bytes",
    "Page-locked host memory of the process' caching host allocator. It is main memory, not device memory.",
    _REPORTER,
)
TORCH_SLACK_RATIO = _gauge(
    "gpumem_torch_slack_ratio",
    "Share of the reserved bytes that is not in tensors, 0 to 1: the cache, reclaimable or fragmented. High after a"
    " peak; it does not show fragmentation by itself. Absent while nothing is reserved.",
    _TORCH,
)
TORCH_FRAGMENTATION_RATIO = _gauge(
    "gpumem_torch_fragmentation_ratio",
    "Share of the reserved bytes that is not in tensors and that empty_cache cannot release, 0 to 1. Absent while"
    " nothing is reserved.",
    _TORCH,
)
TORCH_ALLOC_RETRIES = _counter(
    "gpumem_torch_alloc_retries_total",
    "Allocations that failed at first, so that the allocator flushed its cache and retried. Each retry stalls the"
    " program and shows that an out-of-memory error is near.",
    _TORCH,
)
TORCH_OOMS = _counter(
    "gpumem_torch_ooms_total",
    "Out-of-memory errors that the allocator raised in this process, including caught ones.",
    _TORCH,
)
TORCH_SEGMENTS_ALLOCATED = _counter(
    "gpumem_torch_segments_allocated_total",
    "Segments allocated from the driver so far (segment.all.allocated). A steady rate in a steady training loop means"
    " that the cache does not keep its segments.",
    _TORCH,
)
TORCH_SEGMENTS_FREED = _counter(
    "gpumem_torch_segments_freed_total",
    "Segments released to the driver so far (segment.all.freed). A release waits for the device.",
    _TORCH,
)
TORCH_CACHE_FLUSHES = _counter(
    "gpumem_torch_cache_flushes_total",
    "Times that the allocator waited for all streams to flush its cache, on request or after a failed allocation"
    " (num_sync_all_streams). Absent if PyTorch does not count them.",
    _TORCH,
)
TORCH_PEAK_RESETS = _counter(
    "gpumem_torch_peak_resets_total",
    "Detected resets of this process' peaks, by the program, a library or a reset_peak action. A reset is detected if"
    " a peak is lower than in the last sample; a peak that rose again in between hides it. Starts at 0 with the"
    " reporter.",
    _TORCH,
)
TORCH_STEP = _gauge(
    "gpumem_torch_step",
    "Training step of the process at its last sample. Absent if steps are not counted.",
    _TORCH,
)
TORCH_PHASE_PEAK = _gauge(
    "gpumem_torch_phase_peak_bytes",
    "Highest known peak of the allocated bytes within each phase that the program names (forward, backward, ...),"
    " since the last reset of the peaks; of earlier runs if the phase has not run since. Exact if the phase raised the"
    " allocator's own peak or requested a reset, otherwise a lower bound.",
    (*_TORCH, "phase"),
)
TORCH_COMPONENT = _gauge(
    "gpumem_torch_component_bytes",
    "Allocated bytes by component: parameters, gradients, optimizer_state, other. Of an inference engine: weights,"
    " kv_cache, cuda_graphs, runtime, other; they add up to gpumem_torch_allocated_bytes.",
    (*_TORCH, "component"),
)
TORCH_COMPONENT_UNMAPPED = _gauge(
    "gpumem_torch_component_unmapped_bytes",
    "The part of gpumem_torch_unmapped_bytes that is known by component, of an engine that sleeps: weights, kv_cache"
    " and others. They are not memory of the device. Absent while the engine is awake.",
    (*_TORCH, "component"),
)
TORCH_NCCL = _gauge(
    "gpumem_torch_nccl_bytes",
    "Device memory of NCCL's communicators, a part of gpumem_torch_non_torch_bytes. Without the bytes of suspended"
    " communicators that NCCL has released. Absent before torch 2.15 and NCCL 2.29.7, and without communicators.",
    _TORCH,
)
TORCH_NON_TORCH = _gauge(
    "gpumem_torch_non_torch_bytes",
    "Memory of the process according to NVML minus the bytes that its allocator reserved: CUDA context, NCCL,"
    " libraries, other allocators. Absent while the report and the driver's reading do not belong together.",
    _TORCH,
)

# --- the reporters and the scrape

REPORTER_UP = _gauge(
    "gpumem_reporter_up",
    "1 while the process reports; 0 if its last report has expired and it is not known to have exited. Its torch"
    " series are then absent.",
    _REPORTER,
)
REPORTER_TIMESTAMP = _gauge(
    "gpumem_reporter_last_report_timestamp_seconds",
    "Time at which the exporter received the process' last report, in seconds since the epoch. The sample in the"
    " report may be older: see gpumem_reporter_sample_timestamp_seconds.",
    _REPORTER,
)
SAMPLE_TIMESTAMP = _gauge(
    "gpumem_reporter_sample_timestamp_seconds",
    "Time of the sample that the process' torch series show, in seconds since the epoch by the exporter's clock."
    " During training it is the end of the last step, so it may be a minute old if steps are long.",
    _REPORTER,
)
COLLECTOR_SUCCESS = _gauge(
    "gpumem_scrape_collector_success",
    "1 if this part of the page was created in this scrape, 0 if it failed. Its series are then absent; other parts"
    " are not affected.",
    ("collector",),
)
COLLECTOR_DURATION = _gauge(
    "gpumem_scrape_collector_duration_seconds",
    "Time to create this part of the page in this scrape.",
    ("collector",),
)

# --- the exporter's own counters and histograms; the metrics above come from a snapshot

REPORTS = _counter(
    "gpumem_reports_total",
    "Reports that processes sent to the exporter, by outcome.",
    ("outcome",),
)
PROCESSES_DROPPED = _counter(
    "gpumem_processes_dropped_total",
    "Reports rejected because there is no room (--report.max-processes, and the share of one user). Each is from a"
    " process that this page does not show.",
)
ACTIONS = _counter(
    "gpumem_actions_total",
    "Actions by outcome, counted once per target process, without dry runs.",
    ("action", "outcome"),
)
ACTION_FREED = _counter(
    "gpumem_action_freed_bytes_total",
    "Bytes that actions released to the driver, without dry runs.",
    ("action",),
)
HELD_REQUESTS = _gauge(
    "gpumem_held_requests",
    "Open requests that wait: reports for commands, actions for their end. About one per reporting process.",
)
HEALTH_CHECK_OK = _gauge(
    "gpumem_health_check_ok",
    "1 if this check of /health is ok, 0 if this part of the exporter is degraded or failing. tokens and certificate"
    " are absent without such files, socket without a unix socket.",
    ("check",),
)
ACTION_DURATION = _add(
    Metric(
        "gpumem_action_duration_seconds",
        "histogram",
        "Time from the request of an action to its last result, without dry runs.",
        ("action",),
    )
)

METRICS: tuple[Metric, ...] = tuple(_table)
SCRAPED, OWN = METRICS[: METRICS.index(REPORTS)], METRICS[METRICS.index(REPORTS) :]
"""The metrics of a snapshot, in the order of the page, and the exporter's own."""
