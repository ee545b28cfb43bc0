"""`/api/v1/nvml/release` and `/attach`: driver maintenance while the exporter runs.

The request guard has authorized the caller.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Annotated, Any, Literal
from uuid import uuid4

from fastapi import APIRouter, Body, Request, Response
from pydantic import ConfigDict, Field
from typing_extensions import TypedDict

from gpumem_exporter.actions.action import Action
from gpumem_exporter.actions.action_options import ActionRequest, Target
from gpumem_exporter.actions.action_routes import MAX_WAIT_SECONDS, KnownFields
from gpumem_exporter.actions.audit import Audit
from gpumem_exporter.actions.dispatcher import Dispatcher
from gpumem_exporter.core.caller import Caller
from gpumem_exporter.edge.connections import Exchange
from gpumem_exporter.edge.fair_queue import HeldRequests
from gpumem_exporter.edge.problems import problems
from gpumem_exporter.edge.replies import iso_time, json_reply, json_response
from gpumem_exporter.edge.request_guard import NVML_PATH
from gpumem_exporter.node.driver_library import open_driver_files
from gpumem_exporter.node.poller import Poller, PollerStatus

_RECHECK_SECONDS = 0.02

_log = logging.getLogger(__name__)

NvmlState = Literal["attached", "absent", "attaching", "releasing", "released"]


class NvmlBody(KnownFields):
    """A request to release or attach NVML."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    reason: Annotated[str, Field(max_length=1000)] = Field("", description="for the audit log")
    wait_seconds: float = Field(10.0, ge=0, le=MAX_WAIT_SECONDS, description="how long the reply may take")


class NvmlDocument(TypedDict):
    """The state of NVML. `absent`: the exporter tries to attach and finds no driver."""

    state: NvmlState
    error: str
    requested_by: str | None
    requested: str | None
    reason: str | None
    held: Annotated[
        list[str] | None, Field(description="the driver's files that the exporter has open; null if unknown")
    ]


_ROUTE: dict[str, Any] = {
    "responses": {
        200: json_reply(NvmlDocument, "the request is complete"),
        202: json_reply(NvmlDocument, "the driver does not answer yet; the request stays in force"),
        **problems(401, 403, 415, 422),
    },
}
_Request = Annotated[NvmlBody, Body(default_factory=NvmlBody)]


def nvml_router(
    *, poller: Poller, dispatcher: Dispatcher, audit: Audit, held_requests: HeldRequests, clock: Callable[[], float]
) -> APIRouter:
    """Return the routes that release and attach NVML. Requests are listed among the actions and stored as events."""
    router = APIRouter(tags=["nvml"])

    @router.post(NVML_PATH + "/release", **_ROUTE)
    async def release(request: Request, body: _Request) -> Response:
        """Release NVML: shut it down and unload its library until it is attached again."""
        return await apply(request, body, "nvml_release")

    @router.post(NVML_PATH + "/attach", **_ROUTE)
    async def attach(request: Request, body: _Request) -> Response:
        """Attach released NVML again, or retry at once if there is no driver."""
        return await apply(request, body, "nvml_attach")

    async def apply(request: Request, body: NvmlBody, action: str) -> Response:
        caller: Caller = Exchange.of(request).caller
        if (poller.status(clock()).release is None) == (action == "nvml_release"):
            fields = {"action": action, "requested_by": str(caller), "reason": body.reason}
            _log.info("driver maintenance requested", extra={"fields": fields})
            asked = ActionRequest(action, Target(), mode="now", reason=body.reason)
            noted = Action(uuid4().hex, asked, "done", str(caller), dispatcher.wall_clock(), caller=caller.key)
            dispatcher.actions.finish(noted)
            audit.store_end(noted)
        if action == "nvml_release":
            poller.release(str(caller), body.reason)
        else:
            poller.attach()
        end_seconds = time.monotonic() + body.wait_seconds
        # The poller is a thread and wakes no request; it may hang.
        while not poller.status(clock()).request_applied and time.monotonic() < end_seconds:
            if await held_requests.hold(NVML_PATH, _RECHECK_SECONDS, request.receive) != "late":
                break
        try:
            held = list(await asyncio.to_thread(open_driver_files))
        except OSError:
            held = None
        status = poller.status(clock())
        release, state = status.release, _state(status)
        document: NvmlDocument = {
            "state": state,
            "error": status.error,
            "requested_by": release.requested_by if release else None,
            "requested": iso_time(release.requested_unix_seconds) if release else None,
            "reason": release.reason if release else None,
            "held": held,
        }
        return json_response(document, 202 if state in ("releasing", "attaching") else 200)

    return router


def _state(poller: PollerStatus) -> NvmlState:
    if poller.release is not None:
        return "released" if poller.request_applied else "releasing"
    if not poller.request_applied or poller.polls == 0:
        return "attaching"
    return "absent" if poller.error else "attached"
