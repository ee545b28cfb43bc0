"""`GET /api/v1/devices` and `GET /api/v1/processes`: the current state of the node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_type_hints

from fastapi import APIRouter, Request, Response
from typing_extensions import TypedDict

from gpumem_client.wire.protocol import DeviceSample
from gpumem_exporter.core.samples import DeviceMemory, DeviceReading, Snapshot
from gpumem_exporter.edge.replies import Renderer, encoded, json_reply, json_response
from gpumem_exporter.edge.request_guard import Callers
from gpumem_exporter.page.documents import devices_document, processes_document


def _document(name: str, fields: dict[str, Any]) -> Any:
    """Return a type that has the fields of a dataclass and others, which pydantic would mark as optional."""
    create: Any = TypedDict
    return create(name, fields)


_UNSHOWN = ("memory", "processes", "minor", "active_pids")
_READING = {name: hint for name, hint in get_type_hints(DeviceReading).items() if name not in _UNSHOWN}
_Memory = _document("MemoryDocument", get_type_hints(DeviceMemory))
_Device = _document(
    "DeviceDocument",
    {
        **_READING,
        "up": bool,
        "memory": _Memory | None,
        "ledger": dict[str, int] | None,
        "idle_cache_bytes": int | None,
        "allocatable_bytes": int | None,
    },
)
_ProcessDevice = _document(
    "ProcessDeviceDocument",
    {
        **get_type_hints(DeviceSample),
        "gpu": str | None,
        "used_bytes": int | None,
        "non_torch_bytes": int | None,
        "fragmented_bytes": int | None,
        "plan_error_ratio": float | None,
    },
)


class DriverState(TypedDict):
    """The state of the driver."""

    up: bool
    error: str
    driver_version: str


class DevicesDocument(TypedDict):
    """The reply of `GET /api/v1/devices`."""

    source: str
    taken_unix_seconds: float | None
    nvml: DriverState
    devices: list[_Device]  # type: ignore[valid-type]


class _Orphan(TypedDict):
    """What a process that holds memory has lost."""

    reason: str
    launcher: str | None
    launcher_pid: int | None
    ended_unix_seconds: float | None


class ProcessDocument(TypedDict):
    """A process. `pid` is the label of its series; `own_pid` is its pid in its own PID namespace.

    `attested` is false if only the report token vouches for the reporter: the kernel does not know its user.
    `denied_actions` are the actions that the owner of the process does not allow.
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
    uid: int | None
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
    nvml_interceptor: str | None
    step: int | None
    step_seconds: float | None
    pinned_host_bytes: int | None
    sample_age_seconds: float | None
    last_report_unix_seconds: float | None
    started_unix_seconds: float | None
    orphan: _Orphan | None
    clears: bool
    actions: list[str]
    denied_actions: list[str]
    devices: list[_ProcessDevice]  # type: ignore[valid-type]


class ProcessesDocument(TypedDict):
    """The reply of `GET /api/v1/processes`."""

    source: str
    processes: list[ProcessDocument]


def state_router(
    *, snapshot: Callable[[], Snapshot], source: str, renderer: Renderer, hide_identities_from: Callers | None
) -> APIRouter:
    """Return the routes that show devices and processes; `source` is `nvml` or `demo`.

    `hide_identities_from` identifies the viewers from whom the identities of others' processes are hidden.
    """
    router = APIRouter(tags=["state"])

    @router.get("/api/v1/devices", responses={200: json_reply(DevicesDocument)})
    async def devices() -> Response:
        """Every device, with its memory as the driver reports it and its ledger. Unknown values are null."""
        body = await renderer.render_shared("devices", lambda: encoded(devices_document(snapshot(), source)))
        return json_response(body)

    @router.get("/api/v1/processes", responses={200: json_reply(ProcessesDocument)})
    async def processes(request: Request) -> Response:
        """Every process that reports or that the driver lists, with its values for each device.

        With `--web.hide-identities`, the user, the command and the pod of others' processes are null for a caller that
        may not act on them.
        """
        viewer = await hide_identities_from.of(request.scope) if hide_identities_from is not None else None
        body = await renderer.render_shared(
            ("processes", viewer), lambda: encoded(processes_document(snapshot(), source, viewer))
        )
        return json_response(body)

    return router
