"""`GET /api/v1/live`: what the live page shows, as one document or as a stream of server-sent events."""

from __future__ import annotations

import json
from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.types import Receive, Scope, Send

from gpumem_exporter.server.api.health_document import health_document
from gpumem_exporter.server.http.held_requests import RELEASED
from gpumem_exporter.server.http.problems import ProblemError
from gpumem_exporter.server.runtime import Runtime
from gpumem_exporter.server.web.live_document import live_document
from gpumem_exporter.server.web.page import Page
from gpumem_exporter.server.web.streams import Follower, Streams, TooManyStreamsError

__all__ = ["LIVE_PATH", "live_router"]

LIVE_PATH = "/api/v1/live"

EVENT_STREAM = "text/event-stream"
RETRY_AFTER = {"Retry-After": "5"}
_HEADERS = {"Cache-Control": "no-store", "Vary": "Accept"}


def live_router(runtime: Runtime, page: Page) -> APIRouter:
    """The route of what the live page shows."""
    streams = Streams(lambda: _state(runtime, page), clock=runtime.clock, wall_clock=runtime.wall_clock)
    router = APIRouter(tags=["state"])

    @router.get(LIVE_PATH, response_class=Response, responses=_ANSWERS)
    async def live(request: Request) -> Response:
        """The node for the live page: devices with their ledgers, processes, the last ten minutes.

        It says no more than the documents of devices, processes and health. Its form is the page's, and changes with
        it: programs read those.
        """
        runtime.own_names.require_own_page(dict(request.scope["headers"]))
        if EVENT_STREAM in request.headers.get("accept", ""):
            return _Stream(runtime, streams)
        latest = streams.latest()
        body = b'{"moment":%b,"state":%b,"history":%b}' % (latest.moment, latest.state, _history(runtime))
        return Response(body, headers=_HEADERS, media_type="application/json")

    return router


class _Stream(Response):
    """An answer that goes on until the client goes away or the exporter stops."""

    def __init__(self, runtime: Runtime, streams: Streams) -> None:
        super().__init__(headers={**_HEADERS, "X-Accel-Buffering": "no"}, media_type=EVENT_STREAM)
        del self.headers["content-length"]
        self._runtime = runtime
        self._streams = streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events: none is made before the client has read enough of the one before it."""
        try:
            with self._streams.follow() as follower:
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                ended = await self._runtime.holds.until(self._tell(follower, send), receive)
        except TooManyStreamsError as error:
            await ProblemError(503, str(error), RETRY_AFTER).response()(scope, receive, send)
            return
        if ended is RELEASED:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _tell(self, follower: Follower, send: Send) -> None:
        first = b"retry: 1000\nevent: history\ndata: %b\n\n" % _history(self._runtime)
        await send({"type": "http.response.body", "body": first, "more_body": True})
        while True:
            latest, changed = await follower.next()
            event = b"event: beat\ndata: %b\n\n" % latest.moment
            if changed:
                event = b'event: state\ndata: {"moment":%b,"state":%b}\n\n' % (latest.moment, latest.state)
            await send({"type": "http.response.body", "body": event, "more_body": True})


def _state(runtime: Runtime, page: Page) -> dict[str, Any]:
    now = runtime.clock()
    snapshot = runtime.store.snapshot(now)
    health = health_document(
        snapshot,
        runtime.poller.status(now),
        runtime.events.log.status(),
        source=runtime.source,
        version=runtime.version,
    )
    return live_document(
        snapshot,
        source=runtime.source,
        version=runtime.version,
        health=health,
        page=page.digest,
        allowed_actions=runtime.settings.action_allow,
        newest=runtime.history.newest(),
    )


def _history(runtime: Runtime) -> bytes:
    return json.dumps(runtime.history.document(), separators=(",", ":")).encode()


def _problem(text: str) -> dict[str, Any]:
    return {
        "description": text,
        "content": {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}},
    }


_DOCUMENT: dict[str, Any] = {
    "type": "object",
    "required": ["moment", "state", "history"],
    "properties": {
        "moment": {"type": "object", "description": "when: on the exporter's monotonic clock, and of the Unix epoch"},
        "state": {"type": "object", "description": "the node as it is now; a process' values are those of `columns`"},
        "history": {"type": "object", "description": "the last ten minutes of each device, in MiB; null is a hole"},
    },
}
_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "the document or, with `Accept: text/event-stream`, events: one `history`, then a `state` for "
        "each change, and a `beat` for each second without one",
        "content": {"application/json": {"schema": _DOCUMENT}, EVENT_STREAM: {"schema": {"type": "string"}}},
    },
    403: _problem("another site's web page asks"),
    503: _problem("too many streams are open"),
}
