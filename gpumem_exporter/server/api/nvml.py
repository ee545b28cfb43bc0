"""`/api/v1/nvml/release` and `/attach`: for a driver's maintenance below a running exporter.

The guard has decided who may.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from fastapi import APIRouter, Request, Response

from gpumem_exporter.actions.caller import Caller
from gpumem_exporter.nvml.open_driver_files import open_driver_files
from gpumem_exporter.server.api.nvml_schema import NvmlBody, driver_state, nvml_document, read_nvml_request
from gpumem_exporter.server.api.state import json_response
from gpumem_exporter.server.runtime import Runtime
from gpumem_exporter.server.security.request_guard import NVML_PATH

__all__ = ["nvml_router"]

_LOOK_AGAIN_SECONDS = 0.02

_log = logging.getLogger(__name__)

_OBJECT = {"application/json": {"schema": {"type": "object"}}}
_PROBLEM = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"description": "done; `held` is what of the driver this process has open", "content": _OBJECT},
    202: {"description": "the driver has not let it happen yet; it will happen when it does", "content": _OBJECT},
    401: {"description": "no token, or a wrong one", "content": _PROBLEM},
    403: {"description": "not from here", "content": _PROBLEM},
    422: {"description": "the request is not right", "content": _PROBLEM},
}
_BODY: dict[str, Any] = {
    "requestBody": {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/NvmlBody"}}}}
}


def nvml_router(runtime: Runtime) -> APIRouter:
    """The routes that let the driver go and take it up again."""
    router = APIRouter(tags=["nvml"])
    poller = runtime.poller

    @router.post(NVML_PATH + "/release", response_class=Response, responses=_RESPONSES, openapi_extra=_BODY)
    async def release(request: Request) -> Response:
        """Let the driver go: shut NVML down and unload its library, until it is asked for again."""
        body = read_nvml_request(await request.body())
        if poller.status(runtime.clock()).release is None:
            _record(runtime, "nvml_release", request.state.caller, body)
        poller.release(str(request.state.caller), body.reason)
        return await _answer(request, body)

    @router.post(NVML_PATH + "/attach", response_class=Response, responses=_RESPONSES, openapi_extra=_BODY)
    async def attach(request: Request) -> Response:
        """Take a released driver up again, or look for a missing one at once."""
        body = read_nvml_request(await request.body())
        if poller.status(runtime.clock()).release is not None:
            _record(runtime, "nvml_attach", request.state.caller, body)
        poller.attach()
        return await _answer(request, body)

    async def _answer(request: Request, body: NvmlBody) -> Response:
        await runtime.holds.until(_settled(runtime, body.wait_seconds), request.receive)
        status = poller.status(runtime.clock())
        document = nvml_document(status, await asyncio.to_thread(_held))
        return json_response(document, 202 if driver_state(status) in ("releasing", "attaching") else 200)

    return router


async def _settled(runtime: Runtime, wait_seconds: float) -> None:
    """Until the poller has done what was asked of it, or the time is over."""
    loop = asyncio.get_running_loop()
    end = loop.time() + wait_seconds
    while True:  # the poller is a thread, and may hang
        if runtime.poller.status(runtime.clock()).request_applied or loop.time() >= end:
            return
        await asyncio.sleep(_LOOK_AGAIN_SECONDS)


def _held() -> tuple[str, ...] | None:
    try:
        return open_driver_files()
    except OSError:
        return None


def _record(runtime: Runtime, action: str, caller: Caller, body: NvmlBody) -> None:
    """Write it down where actions are written down."""
    _log.info(
        "driver released on request" if action == "nvml_release" else "driver attached on request",
        extra={"fields": {"action": action, "requested_by": str(caller), "reason": body.reason}},
    )
    runtime.events.action_finished(runtime.dispatcher.note(action, requested_by=caller, reason=body.reason))
