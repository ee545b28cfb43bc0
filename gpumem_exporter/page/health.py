"""`/health`, and the `/-/healthy` and `/-/ready` of Prometheus' own exporters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse
from typing_extensions import TypedDict

from gpumem_client.wire.procfs import nvml_interceptor
from gpumem_client.wire.units import counted
from gpumem_exporter.core.readings import NodeReading
from gpumem_exporter.core.samples import Snapshot
from gpumem_exporter.edge.replies import json_reply, json_response
from gpumem_exporter.node.pid_namespaces import DriverPids
from gpumem_exporter.node.poller import Poller, PollerStatus

Status = Literal["ok", "degraded", "failing"]
Mode = Literal["node", "sidecar"]
_RANKS: tuple[Status, ...] = ("ok", "degraded", "failing")


class Check(TypedDict):
    """The state of one part of the exporter."""

    status: Status
    detail: str


class NvmlState(TypedDict):
    """Whether the driver answers; otherwise why not. `released`: `release-nvml` is in force."""

    up: bool
    error: str
    released: bool


class HealthDocument(TypedDict):
    """The reply of `GET /health`; `status` is the status of the worst check.

    `mode` is `sidecar` while the driver's pids cannot be matched, because the exporter is not in the host's PID
    namespace. Then other processes and non-torch memory are unknown.
    """

    status: Status
    version: str
    source: str
    mode: Mode
    nvml: NvmlState
    devices: int
    processes: int
    checks: dict[str, Check]


@dataclass(frozen=True, slots=True)
class Health:
    """Computes the health of the exporter from its parts."""

    poller: Poller
    source: str
    version: str
    driver_pids: DriverPids | None = None
    checks: Mapping[str, Callable[[], Check]] = field(default_factory=dict)
    """Of features and files, by name."""

    def document(self, snapshot: Snapshot) -> HealthDocument:
        """Return the state of the exporter. A restart may fix `failing`; `degraded` is a fault of the node."""
        node, poller = snapshot.node, self.poller.status(snapshot.taken_seconds)
        silent = f", {len(snapshot.silent)} silent" if snapshot.silent else ""
        checks = {
            "poller": _poller_check(poller),
            "nvml": _nvml_check(node, poller),
            "devices": _devices_check(node),
            "reports": check("ok", counted(len(snapshot.processes), "process reports", "processes report") + silent),
            **{name: state_of() for name, state_of in self.checks.items()},
        }
        up = bool(node and node.up)
        return {
            "status": max((each["status"] for each in checks.values()), key=_RANKS.index),
            "version": self.version,
            "source": self.source,
            "mode": "node" if self.driver_pids is None or self.driver_pids.matched else "sidecar",
            "nvml": {
                "up": up,
                "error": "" if up else checks["nvml"]["detail"],
                "released": not up and poller.release is not None,
            },
            "devices": len(node.devices) if node else 0,
            "processes": len(snapshot.processes),
            "checks": checks,
        }


def health_router(*, health: Health, snapshot: Callable[[], Snapshot]) -> APIRouter:
    """Return the routes that report the exporter's health."""
    router = APIRouter(tags=["health"])

    works = "`ok`, or `degraded`: no driver, a lost device, events not stored, a replaced socket, an invalid file"
    fails = "`failing`: the exporter cannot do its work"

    @router.get("/health", responses={200: json_reply(HealthDocument, works), 503: json_reply(HealthDocument, fails)})
    async def show() -> Response:
        """The health of the exporter and the driver, with one check for each part."""
        document = health.document(snapshot())
        return json_response(document, 503 if document["status"] == "failing" else 200)

    @router.get("/-/healthy", response_class=PlainTextResponse)
    async def healthy() -> PlainTextResponse:
        """The exporter runs."""
        return PlainTextResponse("gpumem-exporter is healthy.\n")

    @router.get(
        "/-/ready", response_class=PlainTextResponse, responses={503: {"description": "the first poll is not complete"}}
    )
    async def ready() -> PlainTextResponse:
        """The first poll is complete, whether or not it found a driver."""
        if health.poller.status(snapshot().taken_seconds).polls == 0:
            return PlainTextResponse("gpumem-exporter is not ready: the first poll is not complete.\n", 503)
        return PlainTextResponse("gpumem-exporter is ready.\n")

    return router


def failed_checks(health: HealthDocument) -> list[dict[str, Any]]:
    """Return the checks that are not ok, for findings."""
    return [{"part": name, **check} for name, check in health["checks"].items() if check["status"] != "ok"]


def _poller_check(poller: PollerStatus) -> Check:
    if not poller.alive:
        return check("failing", f"the poller has stopped{': ' + poller.error if poller.error else ''}")
    if poller.stuck:
        return check("failing", f"the driver has not answered a poll for {poller.busy_seconds or 0:.0f} s")
    return check("ok", f"{poller.polls} polls" if poller.polls else "the first poll is running")


def _nvml_check(node: NodeReading | None, poller: PollerStatus) -> Check:
    interceptor = nvml_interceptor()
    if interceptor:
        return check("degraded", f"{interceptor} answers for NVML here: it shows a container's share as the device")
    if node is None:
        return check("degraded", poller.error or "the driver has not answered recently")
    if not node.up:
        return check("degraded", node.error or "the driver does not answer")
    return check("ok", f"driver {node.driver_version}" if node.driver_version else "")


def _devices_check(node: NodeReading | None) -> Check:
    if node is None or not node.up:
        return check("ok", "unknown")
    lost = [f"{device.gpu or device.uuid}: {device.error}" for device in node.devices if not device.up]
    if lost:
        return check("degraded", f"{len(lost)} of {len(node.devices)} do not answer ({'; '.join(lost)})")
    if not node.devices:
        return check("degraded", "the driver lists no device")
    return check("ok", f"{len(node.devices)} answer")


def error_check(error: str, detail: str = "") -> Check:
    """Return the state of a part by its error, which is empty if there is none."""
    return check("degraded", error) if error else check("ok", detail)


def check(status: Status, detail: str) -> Check:
    """Return the state of a part."""
    return {"status": status, "detail": detail}
