"""`/health`, and Prometheus' own `/-/healthy` and `/-/ready`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse

from gpumem_exporter.server.api.health_document import health_document
from gpumem_exporter.server.api.state import json_response
from gpumem_exporter.server.runtime import Runtime

__all__ = ["health_router"]

_HEALTH: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "ok, or degraded: no driver, a lost device, events that cannot be kept",
        "content": {"application/json": {"schema": {"type": "object"}}},
    },
    503: {
        "description": "failing: the exporter cannot do its work",
        "content": {"application/json": {"schema": {"type": "object"}}},
    },
}


def health_router(runtime: Runtime) -> APIRouter:
    """The routes that say how the exporter is."""
    router = APIRouter(tags=["health"])

    @router.get("/health", response_class=Response, responses=_HEALTH)
    async def health() -> Response:
        """How the exporter and the driver are, with one check for each part."""
        now = runtime.clock()
        document = health_document(
            runtime.store.snapshot(now),
            runtime.poller.status(now),
            runtime.events.log.status(),
            source=runtime.source,
            version=runtime.version,
        )
        return json_response(document, 503 if document["status"] == "failing" else 200)

    @router.get("/-/healthy", response_class=PlainTextResponse)
    async def healthy() -> PlainTextResponse:
        """The exporter runs."""
        return PlainTextResponse("gpumem-exporter is healthy.\n")

    @router.get(
        "/-/ready", response_class=PlainTextResponse, responses={503: {"description": "the first poll is not done"}}
    )
    async def ready() -> PlainTextResponse:
        """The first poll is done, whether or not it found a driver."""
        if runtime.poller.status(runtime.clock()).polls == 0:
            return PlainTextResponse("gpumem-exporter is not ready: the first poll is not done.\n", 503)
        return PlainTextResponse("gpumem-exporter is ready.\n")

    return router
