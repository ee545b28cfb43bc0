"""`GET /api/v1/devices` and `/api/v1/processes`: what the exporter knows now."""

from __future__ import annotations

import json
from typing import Any

from fastapi import APIRouter, Response

from gpumem_exporter.server.api.documents import devices_document, processes_document
from gpumem_exporter.server.runtime import Runtime

__all__ = ["state_router"]


def state_router(runtime: Runtime) -> APIRouter:
    """The routes that show what is known."""
    router = APIRouter(tags=["state"])

    @router.get("/api/v1/devices", response_class=Response, responses=_JSON)
    async def devices() -> Response:
        """Every device, with its memory as the driver says it and its ledger; what is unknown is null."""
        return json_response(devices_document(runtime.snapshot(), runtime.source))

    @router.get("/api/v1/processes", response_class=Response, responses=_JSON)
    async def processes() -> Response:
        """Every process that reports or that the driver lists, with its figures for each device."""
        return json_response(processes_document(runtime.snapshot(), runtime.source))

    return router


_JSON: dict[int | str, dict[str, Any]] = {200: {"content": {"application/json": {"schema": {"type": "object"}}}}}


def json_response(document: dict[str, Any], status: int = 200) -> Response:
    """A JSON answer that no cache keeps."""
    return Response(
        json.dumps(document, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace"),
        status_code=status,
        headers={"Cache-Control": "no-store"},
        media_type="application/json",
    )
