"""`GET /api/v1/devices` and `GET /api/v1/processes`: the current state of the node."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import APIRouter, Response

from gpumem_exporter.core.samples import Snapshot
from gpumem_exporter.server.api.documents import devices_document, processes_document
from gpumem_exporter.server.api.state_schema import DevicesDocument, ProcessesDocument
from gpumem_exporter.server.http.replies import json_response

__all__ = ["state_router"]


def state_router(*, snapshot: Callable[[], Snapshot], source: str) -> APIRouter:
    """Return the routes that show devices and processes.

    Args:
        snapshot: returns the current state of the node.
        source: `nvml` or `demo`.
    """
    router = APIRouter(tags=["state"])

    @router.get("/api/v1/devices", response_model=DevicesDocument)
    async def devices() -> Response:
        """Every device, with its memory as the driver reports it and its ledger. Unknown values are null."""
        return json_response(devices_document(snapshot(), source))

    @router.get("/api/v1/processes", response_model=ProcessesDocument)
    async def processes() -> Response:
        """Every process that reports or that the driver lists, with its values for each device."""
        return json_response(processes_document(snapshot(), source))

    return router
