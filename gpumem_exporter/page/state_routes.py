"""`GET /api/v1/live`, `/api/v1/devices` and `/api/v1/processes`: the current state of the node."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple, get_type_hints

from fastapi import APIRouter, Query, Request, Response
from typing_extensions import TypedDict

from gpumem_client.wire.protocol import DeviceSample
from gpumem_exporter.core.caller import Caller, Rights
from gpumem_exporter.core.readings import IDENTITY_FIELDS, DeviceMemory, DeviceReading
from gpumem_exporter.core.samples import Snapshot
from gpumem_exporter.edge.problems import problems
from gpumem_exporter.edge.replies import Renderer, encoded, json_reply, json_response
from gpumem_exporter.edge.request_guard import LIVE_PATH, Callers
from gpumem_exporter.page.documents import JOB_NUMBERS, devices_document, processes_document
from gpumem_exporter.page.health import Health, failed_checks
from gpumem_exporter.page.live import NodeView

# The age up to which pages share a rendering. A page polls once a second.
_SHARED_SECONDS = 0.5
# The time of the driver's reading in a document: a reading with the same values changes nothing.
_TAKEN = re.compile(rb'"taken_unix_seconds":[^,]*,')


def _document(name: str, fields: dict[str, Any]) -> Any:
    """Return a type that has the fields of a dataclass and others, which pydantic would mark as optional."""
    create: Any = TypedDict
    return create(name, fields)


class LiveDocument(TypedDict):
    """The node, its devices, its jobs and what needs attention, from one snapshot; and the words for them."""

    time: dict[str, float]
    page: str
    node: dict[str, Any]
    devices: list[dict[str, Any]]
    jobs: list[dict[str, Any]]
    findings: list[dict[str, Any]]
    words: dict[str, dict[str, str]]


class DriverState(TypedDict):
    """The state of the driver."""

    up: bool
    error: str
    driver_version: str


_UNSHOWN = ("memory", "processes", "minor", "active_pids")
_Device = _document(
    "DeviceDocument",
    {
        **{name: hint for name, hint in get_type_hints(DeviceReading).items() if name not in _UNSHOWN},
        "up": bool,
        "memory": _document("MemoryDocument", get_type_hints(DeviceMemory)) | None,
        "ledger": dict[str, int] | None,
        **dict.fromkeys(("idle_cache_bytes", "allocatable_bytes"), int | None),
    },
)


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


_ProcessDevice = _document(
    "ProcessDeviceDocument",
    {
        **get_type_hints(DeviceSample),
        "gpu": str | None,
        **dict.fromkeys(("used_bytes", "non_torch_bytes", "fragmented_bytes"), int | None),
        "plan_error_ratio": float | None,
    },
)
_TEXTS = ("workload", "rank", "torch_version", "allocator_settings", "client_version", "nvml_interceptor")
_NUMBERS = ("own_pid", "host_pid", "pid_namespace", "uid", "world_size", "step", "pinned_host_bytes")
_SECONDS = ("step_seconds", "sample_age_seconds", "last_report_unix_seconds", "started_unix_seconds")
_Process = _document(
    "ProcessDocument",
    {
        "pid": int | str,
        **dict.fromkeys((*_TEXTS, *IDENTITY_FIELDS, *JOB_NUMBERS), str | None),
        **dict.fromkeys(_NUMBERS, int | None),
        **dict.fromkeys(_SECONDS, float | None),
        "state": str,
        "attested": bool | None,
        **dict.fromkeys(("reporting", "clears"), bool),
        **dict.fromkeys(("actions", "denied_actions"), list[str]),
        "orphan": _Orphan | None,
        "devices": list[_ProcessDevice],  # type: ignore[valid-type]
    },
)
_Process.__doc__ = """A process. `pid` is the label of its series; `own_pid` is its pid in its own PID namespace.

`attested` is false if only the report token vouches for the reporter: the kernel does not know its user.
`denied_actions` are the actions that the owner of the process does not allow.
"""


class ProcessesDocument(TypedDict):
    """The reply of `GET /api/v1/processes`."""

    source: str
    processes: list[_Process]  # type: ignore[valid-type]


class Rendering(NamedTuple):
    """The live document as JSON, without its time, so that an unchanged document has an equal digest."""

    seconds: float
    """On the exporter's monotonic clock."""
    time: bytes
    document: bytes
    digest: str


@dataclass(eq=False)
class StateRoutes:
    """The routes, and the rendering of the live document: once for all pages that poll at about the same time."""

    view: NodeView
    renderer: Renderer
    snapshot: Callable[[], Snapshot]
    health: Health
    facts: Mapping[str, Any]
    """Values of `node` in the live document that never change."""
    page_digest: Callable[[], str]
    """Returns the digest of the page's files: a page with another digest loads itself again."""
    hide_identities_from: Callers | None
    """Identifies the viewers from whom the identities of others' processes are hidden."""
    clock: Callable[[], float]
    wall_clock: Callable[[], float]
    _recent: dict[Rights, Rendering] = field(default_factory=dict, init=False)
    """The last rendering for pages whose viewers see every name, and for pages whose viewers see none."""

    def router(self) -> APIRouter:
        """Return the routes."""
        router = APIRouter(tags=["state"])
        router.get("/api/v1/devices", responses={200: json_reply(DevicesDocument)})(self.devices)
        router.get("/api/v1/processes", responses={200: json_reply(ProcessesDocument)})(self.processes)
        unchanged = "unchanged since the reply whose `ETag` the request has in `If-None-Match`"
        live = {200: json_reply(LiveDocument), 304: {"description": unchanged}, **problems(403, 422)}
        router.get(LIVE_PATH, responses=live)(self.live)
        return router

    async def devices(self) -> Response:
        """Every device, with its memory as the driver reports it and its ledger. Unknown values are null."""
        body = await self.renderer.render_shared(
            "devices", lambda: encoded(devices_document(self.snapshot(), self.health.source))
        )
        return json_response(body)

    async def processes(self, request: Request) -> Response:
        """Every process that reports or that the driver lists, with its values for each device.

        With `--web.hide-identities`, the user, the command and the pod of others' processes are null for a caller that
        may not act on them.
        """
        viewer = await self._viewer(request)
        body = await self.renderer.render_shared(
            ("processes", viewer), lambda: encoded(processes_document(self.snapshot(), self.health.source, viewer))
        )
        return json_response(body)

    async def live(
        self,
        request: Request,
        details: Annotated[
            str, Query(max_length=512, description="`all`, or the id of a job: its processes have all of their values")
        ] = "",
    ) -> Response:
        """The whole node at one time: devices with their ledgers, jobs, findings. Unknown values are null.

        The page, `info`, `top` and `fleet` show this document and nothing else, so they agree.
        """
        rendering = await self.rendering(await self._viewer(request), "" if details == "none" else details)
        headers = {"Cache-Control": "no-store", "ETag": f'W/"{rendering.digest}"'}
        if request.headers.get("if-none-match") == headers["ETag"]:
            return Response(status_code=304, headers=headers)
        page = self.page_digest().encode()
        body = b'{"time":%b,"page":"%b",%b' % (rendering.time, page, rendering.document[1:])
        return Response(body, headers=headers, media_type="application/json")

    async def _viewer(self, request: Request) -> Caller | None:
        return await self.hide_identities_from.of(request.scope) if self.hide_identities_from is not None else None

    async def rendering(self, viewer: Caller | None, details: str) -> Rendering:
        """Return the live document as `viewer` may see it; None sees every name. Used on the event loop only."""
        rights = Rights.ALL if viewer is None else viewer.rights
        # A command gets all details, and the state after all that its user has done.
        is_shared = rights is not Rights.OWN and not details
        known = self._recent.get(rights) if is_shared else None
        if known is not None and self.clock() - known.seconds < _SHARED_SECONDS:
            return known
        now, now_unix = self.clock(), self.wall_clock()
        key = ("live", details, viewer if rights is Rights.OWN else rights)
        document = await self.renderer.render_shared(key, lambda: self._render(viewer, details, now_unix))
        # A counter of changes in the store would be cheaper, but would miss data that expires and checks that fail.
        digest = hashlib.blake2b(_TAKEN.sub(b"", document, count=1), digest_size=8).hexdigest()
        times = json.dumps({"clock_seconds": round(now, 3), "unix_seconds": round(now_unix, 3)}).encode()
        rendering = Rendering(now, times, document, digest)
        if is_shared:
            self._recent[rights] = rendering
        return rendering

    def _render(self, viewer: Caller | None, details: str, now_unix: float) -> bytes:
        snapshot = self.snapshot()
        health, reading = self.health.document(snapshot), snapshot.node
        node = {
            **self.facts,
            "version": health["version"],
            "mode": "demo" if health["source"] == "demo" else health["mode"],
            "source": health["source"],
            "driver": {
                "up": health["nvml"]["up"],
                "error": health["nvml"]["error"],
                "version": reading.driver_version if reading is not None else "",
            },
            "status": health["status"],
            "failed_checks": failed_checks(health),
        }
        document = self.view.document(snapshot, node, now_unix, viewer=viewer, details=details)
        return encoded(document, separators=(",", ":"))
