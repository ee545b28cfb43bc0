"""`GET /api/v1/live`: the content of the live page, as one document or as a stream of server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from starlette.types import Receive, Scope, Send
from typing_extensions import TypedDict

from gpumem_exporter.actions.caller import Caller, Rights
from gpumem_exporter.core.samples import Snapshot
from gpumem_exporter.server.api.health import Health
from gpumem_exporter.server.api.rendering import Renderer, encoded
from gpumem_exporter.server.http.connections import owner_of
from gpumem_exporter.server.http.held_requests import Held, HeldRequests
from gpumem_exporter.server.http.problems import ProblemError, problems
from gpumem_exporter.server.http.replies import json_reply
from gpumem_exporter.server.security.callers import Callers
from gpumem_exporter.server.security.request_guard import LIVE_PATH
from gpumem_exporter.server.web.history import History
from gpumem_exporter.server.web.live_document import live_document
from gpumem_exporter.server.web.page import Page
from gpumem_exporter.server.web.streams import Following, Streams, TooManyStreamsError

__all__ = ["Audience", "LiveState", "live_router"]


EVENT_STREAM = "text/event-stream"
RETRY_AFTER = {"Retry-After": "5"}
_LONGEST_SECONDS = 86400.0
_HEADERS = {"Cache-Control": "no-store", "Vary": "Accept"}


class LiveDocument(TypedDict):
    """The time, the state of the node from one snapshot, and the last ten minutes of each device."""

    moment: dict[str, float]
    state: dict[str, Any]
    history: dict[str, Any]


_OK = json_reply(
    LiveDocument,
    "the document or, with `Accept: text/event-stream`, a stream of events: one `history`, then a `state` for each "
    "change and a `beat` for each second without a change",
)
_OK["content"][EVENT_STREAM] = {"schema": {"type": "string"}}
_Processes = Annotated[
    Literal["rows", "documents"],
    Query(description="rows: for the page, in the order of `columns`; documents: as in /api/v1/processes"),
]


@dataclass(frozen=True, slots=True)
class LiveState:
    """Renders the current state of the node for the live page."""

    snapshot: Callable[[], Snapshot]
    health: Health
    history: History
    page: Page
    host: str
    """The name of the exporter's host."""
    allowed_actions: tuple[str, ...]
    viewer: Caller | None = None
    """The viewer, who does not see the identities of others' processes; None shows all identities."""

    def render(self, *, whole_processes: bool = False) -> bytes:
        """Return the current state of the node as JSON. Called in the thread of replies."""
        snapshot = self.snapshot()
        document = live_document(
            snapshot,
            host=self.host,
            health=self.health.document(snapshot),
            page=self.page.digest,
            allowed_actions=self.allowed_actions,
            newest=self.history.newest(),
            viewer=self.viewer,
            whole_processes=whole_processes,
        )
        return encoded(document, separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class Audience:
    """The streams for each viewer. All viewers have the same one, unless identities are hidden.

    Args:
        everything: for a viewer that may act on every process.
        public: for the others.
        callers: identifies the viewers.
    """

    everything: Streams
    public: Streams
    callers: Callers

    async def streams(self, scope: Scope) -> Streams:
        """Return the streams that the sender of a request may see."""
        if self.public is self.everything or (await self.callers.of(scope)).rights is Rights.ALL:
            return self.everything
        return self.public


def live_router(
    *,
    audience: Audience,
    state: LiveState,
    renderer: Renderer,
    hide_identities_from: Callers | None,
    history: History,
    held_requests: HeldRequests,
) -> APIRouter:
    """Return the route that shows the whole node.

    Args:
        audience: the streams of the page.
        state: the state of the node, for commands.
        renderer: runs `state.render`.
        hide_identities_from: identifies the viewers from whom the identities of others' processes are hidden.
        history: the last ten minutes.
        held_requests: ends streams when the exporter stops.
    """
    router = APIRouter(tags=["state"])

    @router.get(LIVE_PATH, responses={200: _OK, **problems(403, 422, 503)})
    async def live(request: Request, processes: _Processes = "rows") -> Response:
        """The whole node at one time: devices with their ledgers, processes, the last ten minutes.

        It has the same content as the documents of devices, processes and health, which are of different times. Its
        format changes with the page and the commands; other programs should read those documents.
        """
        streams = await audience.streams(request.scope)
        if processes == "documents":
            viewer = await hide_identities_from.of(request.scope) if hide_identities_from is not None else None
            build = partial(replace(state, viewer=viewer).render, whole_processes=True)
            moment, node = streams.moment(), await renderer.render_shared(("live documents", viewer), build)
        elif EVENT_STREAM in request.headers.get("accept", ""):
            return _Stream(streams, history, held_requests)
        else:
            _, moment, node = await streams.latest()
        body = b'{"moment":%b,"state":%b,"history":%b}' % (moment, node, _rendered(history))
        return Response(body, headers=_HEADERS, media_type="application/json")

    return router


class _Stream(Response):
    """A reply that continues until the client disconnects or the exporter stops."""

    def __init__(self, streams: Streams, history: History, held_requests: HeldRequests) -> None:
        super().__init__(headers={**_HEADERS, "X-Accel-Buffering": "no"}, media_type=EVENT_STREAM)
        del self.headers["content-length"]
        self._streams = streams
        self._history = history
        self._held_requests = held_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events, each when the client has read enough of the previous one."""
        try:
            with self._streams.follow(owner_of(scope["state"]["peer"])) as following:
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                sending = asyncio.ensure_future(self._send_events(following, send))
                sending.add_done_callback(self._held_requests.wake)
                try:
                    ended = await self._held_requests.hold(sending, _LONGEST_SECONDS, receive)
                finally:
                    sending.cancel()
        except TooManyStreamsError as error:
            await ProblemError(503, str(error), RETRY_AFTER).response()(scope, receive, send)
            return
        if ended is Held.STOPPING:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_events(self, following: Following, send: Send) -> None:
        first = b"retry: 1000\nevent: history\ndata: %b\n\n" % _rendered(self._history)
        await send({"type": "http.response.body", "body": first, "more_body": True})
        while True:
            latest, changed = await following()
            event = b"event: beat\ndata: %b\n\n" % latest.moment
            if changed:
                event = b'event: state\ndata: {"moment":%b,"state":%b}\n\n' % (latest.moment, latest.state)
            await send({"type": "http.response.body", "body": event, "more_body": True})


def _rendered(history: History) -> bytes:
    return json.dumps(history.document(), separators=(",", ":")).encode()
