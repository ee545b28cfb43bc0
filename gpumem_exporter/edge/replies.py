"""JSON replies, and the content negotiation of `Accept-Encoding` (RFC 9110, section 12)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from typing import Any

from fastapi import Response

DESCRIBED_MODELS: dict[str, type] = {}
"""The models of replies and bodies that the description of the API has, by name."""


class Renderer:
    """Builds large replies in a thread of its own, so that the event loop answers other clients meanwhile.

    Used on the event loop only. One reply is built at a time, which bounds their memory.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "gpumem-replies")
        self._turn = asyncio.Lock()
        self._waiting: dict[Hashable, asyncio.Future[bytes]] = {}

    async def render(self, build: Callable[[], bytes]) -> bytes:
        """Return what `build` returns in the thread."""
        return await self.render_shared(object(), build)

    async def render_shared(self, key: Hashable, build: Callable[[], bytes]) -> bytes:
        """Return what `build` returns in the thread, for all calls with an equal key that arrive before its start."""
        shared = self._waiting.get(key)
        if shared is None:
            shared = self._waiting[key] = asyncio.ensure_future(self._render_waiting(key, build))
        # The client of one call may disconnect while other calls wait for the reply.
        return await asyncio.shield(shared)

    async def _render_waiting(self, key: Hashable, build: Callable[[], bytes]) -> bytes:
        async with self._turn:
            # A later call never gets this result: a client reads what it has written before.
            del self._waiting[key]
            return await asyncio.get_running_loop().run_in_executor(self._thread, build)


def encoded(document: Mapping[str, object], *, separators: tuple[str, str] = (", ", ": ")) -> bytes:
    """Return a document as JSON; the items of its lists are encoded one by one."""
    # Python lets the event loop run between two items, but not within one call of the encoder.
    comma, colon = separators
    encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=separators).encode

    def text(value: object) -> str:
        return f"[{comma.join(map(encode, value))}]" if isinstance(value, (list, tuple)) else encode(value)

    fields = comma.join(f"{encode(name)}{colon}{text(value)}" for name, value in document.items())
    return f"{{{fields}}}".encode("utf-8", "replace")


def json_response(document: Mapping[str, object] | bytes, status: int = 200) -> Response:
    """Return a JSON reply that caches do not store."""
    body = document if isinstance(document, bytes) else encoded(document)
    return Response(body, status, headers={"Cache-Control": "no-store"}, media_type="application/json")


def iso_time(unix_seconds: float) -> str:
    """Return a time as ISO 8601 in UTC with milliseconds: `2026-01-31T12:00:00.000Z`."""
    time = datetime.fromtimestamp(unix_seconds, tz=timezone.utc)
    return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def json_reply(model: type, description: str = "Successful Response") -> dict[str, Any]:
    """Return the OpenAPI description of a JSON reply; `openapi` adds the schema of the model."""
    # FastAPI's `response_model` would build a validator of each model when the exporter starts.
    return {"description": description, "content": _described(model)}


def json_body(model: type) -> dict[str, Any]:
    """Return the OpenAPI description of a route's body, which the route itself validates."""
    return {"requestBody": {"required": True, "content": _described(model)}}


def _described(model: type) -> dict[str, Any]:
    DESCRIBED_MODELS[model.__name__] = model
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}


def accepts_gzip(accept_encoding: str) -> bool:
    """Return whether the client lists gzip, and not with the quality 0."""
    for element in accept_encoding.lower().split(","):
        coding, _, quality = "".join(element.split()).partition(";q=")
        if coding == "gzip":
            return quality.strip("0.") != "" or not quality
    return False
