"""`GET /api/v1/live`: the whole node at one time, for the page, `info`, `top` and `fleet`."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple

from fastapi import APIRouter, Query, Request, Response
from typing_extensions import TypedDict

from gpumem_exporter.core.caller import Caller, Rights
from gpumem_exporter.core.samples import Snapshot
from gpumem_exporter.edge.problems import problems
from gpumem_exporter.edge.replies import Renderer, encoded, json_reply
from gpumem_exporter.edge.request_guard import LIVE_PATH, Callers
from gpumem_exporter.page.health import HealthDocument
from gpumem_exporter.page.live import NodeView

# The age up to which pages share a rendering. A page polls once a second.
_SHARED_SECONDS = 0.5
# The time of the driver's reading in a document: a reading with the same values changes nothing.
_TAKEN = re.compile(rb'"taken_unix_seconds":[^,]*,')


class LiveDocument(TypedDict):
    """The node, its devices, its jobs and what needs attention, from one snapshot; and the words for them."""

    time: dict[str, float]
    page: str
    node: dict[str, Any]
    devices: list[dict[str, Any]]
    jobs: list[dict[str, Any]]
    findings: list[dict[str, Any]]
    words: dict[str, dict[str, str]]


_Details = Annotated[
    str, Query(max_length=512, description="`all`, or the id of a job: its processes have all of their values")
]


class Rendering(NamedTuple):
    """The document as JSON, without its time, so that an unchanged document has an equal digest."""

    seconds: float
    """On the exporter's monotonic clock."""
    time: bytes
    document: bytes
    digest: str


class LiveNode:
    """Renders the document; for pages, once for all that poll at about the same time.

    `facts` are values of `node` in the document that never change.
    """

    def __init__(
        self,
        view: NodeView,
        renderer: Renderer,
        *,
        snapshot: Callable[[], Snapshot],
        health: Callable[[Snapshot], HealthDocument],
        facts: Mapping[str, Any],
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        self._view, self._renderer = view, renderer
        self._snapshot, self._health = snapshot, health
        self._facts = facts
        self._clock, self._wall_clock = clock, wall_clock
        # The last rendering for pages whose viewers see every name, and for pages whose viewers see none.
        self._recent: dict[Rights, Rendering] = {}

    async def of(self, viewer: Caller | None, details: str) -> Rendering:
        """Return the document as `viewer` may see it; None sees every name. Used on the event loop only."""
        rights = Rights.ALL if viewer is None else viewer.rights
        # A command gets all details, and the state after all that its user has done.
        is_shared = rights is not Rights.OWN and not details
        known = self._recent.get(rights) if is_shared else None
        if known is not None and self._clock() - known.seconds < _SHARED_SECONDS:
            return known
        now, now_unix = self._clock(), self._wall_clock()
        key = ("live", details, viewer if rights is Rights.OWN else rights)
        document = await self._renderer.render_shared(key, lambda: self._render(viewer, details, now_unix))
        # A counter of changes in the store would be cheaper, but would miss data that expires and checks that fail.
        digest = hashlib.blake2b(_TAKEN.sub(b"", document, count=1), digest_size=8).hexdigest()
        times = json.dumps({"clock_seconds": round(now, 3), "unix_seconds": round(now_unix, 3)}).encode()
        rendering = Rendering(now, times, document, digest)
        if is_shared:
            self._recent[rights] = rendering
        return rendering

    def _render(self, viewer: Caller | None, details: str, now_unix: float) -> bytes:
        snapshot = self._snapshot()
        health = self._health(snapshot)
        reading = snapshot.node
        node = {
            **self._facts,
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
        document = self._view.document(snapshot, node, now_unix, viewer=viewer, details=details)
        return encoded(document, separators=(",", ":"))


def live_router(
    live_node: LiveNode, *, page_digest: Callable[[], str], hide_identities_from: Callers | None
) -> APIRouter:
    """Return the route that shows the whole node.

    `page_digest` returns the digest of the page's files: a page with another digest loads itself again.
    `hide_identities_from` identifies the viewers from whom the identities of others' processes are hidden.
    """
    router = APIRouter(tags=["state"])

    @router.get(
        LIVE_PATH,
        responses={
            200: json_reply(LiveDocument),
            304: {"description": "unchanged since the reply whose `ETag` the request has in `If-None-Match`"},
            **problems(403, 422),
        },
    )
    async def live(request: Request, details: _Details = "") -> Response:
        """The whole node at one time: devices with their ledgers, jobs, findings. Unknown values are null.

        The page, `info`, `top` and `fleet` show this document and nothing else, so they agree.
        """
        viewer = await hide_identities_from.of(request.scope) if hide_identities_from is not None else None
        rendering = await live_node.of(viewer, "" if details == "none" else details)
        headers = {"Cache-Control": "no-store", "ETag": f'W/"{rendering.digest}"'}
        if request.headers.get("if-none-match") == headers["ETag"]:
            return Response(status_code=304, headers=headers)
        page = page_digest().encode()
        body = b'{"time":%b,"page":"%b",%b' % (rendering.time, page, rendering.document[1:])
        return Response(body, headers=headers, media_type="application/json")

    return router


def failed_checks(health: HealthDocument) -> list[dict[str, Any]]:
    """Return the checks of /health that are not ok, for findings."""
    return [{"part": name, **check} for name, check in health["checks"].items() if check["status"] != "ok"]
