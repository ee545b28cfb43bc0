"""The types of the replies of `GET /api/v1/devices` and `GET /api/v1/processes`. Unknown values are null."""

from __future__ import annotations

from typing_extensions import TypedDict

__all__ = ["DeviceDocument", "DevicesDocument", "ProcessDeviceDocument", "ProcessDocument", "ProcessesDocument"]


class DriverState(TypedDict):
    """The state of the driver."""

    up: bool
    error: str
    driver_version: str


class MemoryDocument(TypedDict):
    """A device's memory as the driver reports it."""

    total_bytes: int
    used_bytes: int
    free_bytes: int
    reserved_bytes: int | None
    of_host: bool


class DeviceDocument(TypedDict):
    """A device. `ledger` has the bytes of each known category."""

    gpu: str
    uuid: str
    name: str
    pci_bus_id: str
    mig_profile: str
    parent_uuid: str
    up: bool
    error: str
    memory: MemoryDocument | None
    utilization_ratio: float | None
    ledger: dict[str, int] | None


class DevicesDocument(TypedDict):
    """The reply of `GET /api/v1/devices`."""

    source: str
    taken_unix_seconds: float | None
    nvml: DriverState
    devices: list[DeviceDocument]


class ProcessDeviceDocument(TypedDict):
    """A process on a device: the driver's values, and the allocator's in PyTorch's words."""

    gpu: str | None
    uuid: str
    used_bytes: int | None
    non_torch_bytes: int | None
    fragmented_bytes: int | None
    plan_error_ratio: float | None
    allocated_bytes: int | None
    reserved_bytes: int | None
    active_bytes: int | None
    inactive_split_bytes: int | None
    requested_bytes: int | None
    allocated_peak_bytes: int | None
    reserved_peak_bytes: int | None
    private_pools_bytes: int | None
    reclaimable_bytes: int | None
    alloc_retries: int | None
    ooms: int | None
    segments_allocated: int | None
    segments_freed: int | None
    cache_flushes: int | None
    peak_resets: int | None
    planned_reserved_peak_bytes: int | None
    phase_peak_bytes: dict[str, int]
    component_bytes: dict[str, int]


class ProcessDocument(TypedDict):
    """A process. `pid` is the label of its series; `own_pid` is its pid in its own PID namespace.

    `attested` is false if only the report token vouches for the reporter: the kernel does not know its user.
    """

    pid: int | str
    own_pid: int | None
    host_pid: int | None
    pid_namespace: int | None
    attested: bool | None
    reporting: bool
    state: str
    workload: str | None
    rank: str | None
    world_size: int | None
    command: str | None
    user: str | None
    container_id: str | None
    k8s_pod_uid: str | None
    k8s_namespace: str | None
    k8s_pod: str | None
    k8s_container: str | None
    slurm_job_id: str | None
    ray_job_id: str | None
    torch_version: str | None
    allocator_settings: str | None
    client_version: str | None
    step: int | None
    step_seconds: float | None
    pinned_host_bytes: int | None
    sample_age_seconds: float | None
    last_report_unix_seconds: float | None
    actions: list[str]
    devices: list[ProcessDeviceDocument]


class ProcessesDocument(TypedDict):
    """The reply of `GET /api/v1/processes`."""

    source: str
    processes: list[ProcessDocument]
