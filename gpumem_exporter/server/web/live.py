"""`GET /api/v1/live`: the whole node at one time, for the live page, `info` and `top`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

from fastapi import APIRouter, Query, Request, Response
from typing_extensions import TypedDict

from gpumem_client.wire.protocol import DeviceSample
from gpumem_exporter.actions.caller import Caller, Rights
from gpumem_exporter.core.ledger import fragmented_bytes
from gpumem_exporter.core.samples import Snapshot
from gpumem_exporter.server.api.health import HealthDocument
from gpumem_exporter.server.http.problems import problems
from gpumem_exporter.server.http.replies import Renderer, encoded, json_reply
from gpumem_exporter.server.security.request_guard import Callers
from gpumem_exporter.server.web.history import History
from gpumem_exporter.server.web.page import Page
from gpumem_exporter.view.documents import SeenProcess, devices_document, processes_document, seen_processes

COLUMNS = (
    *("pid", "state", "workload", "rank", "command", "user", "k8s_namespace", "k8s_pod"),
    *("last_report_unix_seconds", "clears"),
    *("gpu", "uuid", "used_bytes", "non_torch_bytes"),
    *("allocated_bytes", "reserved_bytes", "reclaimable_bytes", "idle_cache_bytes", "fragmented_bytes"),
    *("unmapped_bytes", "nccl_bytes"),
)
"""A row is a process on a device. A process without a known device has one row, with null for the device.
`clears`: the process reports, and its reporter can run `empty_cache`."""

_SHARED_SECONDS = 0.5
"""The age up to which pages share a rendering. A page polls once a second."""


class LiveDocument(TypedDict):
    """The time, the state of the node from one snapshot, and the last ten minutes of each device."""

    moment: dict[str, float]
    state: dict[str, Any]
    history: dict[str, Any]


_Processes = Annotated[
    Literal["rows", "documents"],
    Query(description="rows: for the page, in the order of `columns`; documents: as in /api/v1/processes"),
]
_Since = Annotated[
    float | None, Query(description="send only the history after this time, in seconds of `moment.clock_seconds`")
]


@dataclass(frozen=True, slots=True)
class LiveState:
    """The state of the node. Unknown values are null."""

    snapshot: Callable[[], Snapshot]
    health: Callable[[Snapshot], HealthDocument]
    page: Page
    host: str
    """The name of the exporter's host."""
    allowed_actions: tuple[str, ...]

    def document(self, viewer: Caller | None, *, whole_processes: bool) -> dict[str, Any]:
        """Return the state as `viewer` may see it, see `processes_document`; without `whole_processes` as rows."""
        snapshot = self.snapshot()
        health = self.health(snapshot)
        devices = devices_document(snapshot, health["source"])
        return {
            "host": self.host,
            **devices,
            "nvml": {**devices["nvml"], "error": health["nvml"]["error"]},
            "version": health["version"],
            "page": self.page.digest,
            "status": health["status"],
            "failed_checks": [
                {"part": name, **check} for name, check in health["checks"].items() if check["status"] != "ok"
            ],
            "allowed_actions": self.allowed_actions,
            **(processes_document(snapshot, health["source"], viewer) if whole_processes else _table(snapshot, viewer)),
        }


class Rendering(NamedTuple):
    """The state as JSON."""

    seconds: float
    """On the exporter's monotonic clock."""
    moment: bytes
    """The time as JSON. It is not part of the state, so an unchanged state has an equal digest."""
    state: bytes
    digest: str


class LiveRenderings:
    """Renders the state, for pages once for all that poll at about the same time. Used on the event loop only."""

    def __init__(
        self, state: LiveState, renderer: Renderer, *, clock: Callable[[], float], wall_clock: Callable[[], float]
    ) -> None:
        self._state = state
        self._renderer = renderer
        self._clock = clock
        self._wall_clock = wall_clock
        self._recent: dict[Rights, Rendering] = {}
        """The last rendering for pages whose viewers see every name, and for pages whose viewers see none."""

    async def of(self, viewer: Caller | None, *, whole_processes: bool) -> Rendering:
        """Return the state; see `LiveState.document`. A command gets the state after all that its user has done."""
        rights = Rights.ALL if viewer is None else viewer.rights
        is_shared = rights is not Rights.OWN and not whole_processes
        known = self._recent.get(rights) if is_shared else None
        if known is not None and self._clock() - known.seconds < _SHARED_SECONDS:
            return known
        now = self._clock()
        times = {"clock_seconds": round(now, 3), "unix_seconds": round(self._wall_clock(), 3)}
        key = ("live", whole_processes, viewer if rights is Rights.OWN else rights)
        state = await self._renderer.render_shared(
            key, lambda: encoded(self._state.document(viewer, whole_processes=whole_processes), separators=(",", ":"))
        )
        # A counter of changes in the store would be cheaper, but would miss data that expires and checks that fail.
        digest = hashlib.blake2b(state, digest_size=8).hexdigest()
        rendering = Rendering(now, json.dumps(times).encode(), state, digest)
        if is_shared:
            self._recent[rights] = rendering
        return rendering


def rows_router(*, renderings: LiveRenderings, history: History, hide_identities_from: Callers | None) -> APIRouter:
    """Return the route that shows the whole node.

    `hide_identities_from` identifies the viewers from whom the identities of others' processes are hidden.
    """
    router = APIRouter(tags=["state"])

    @router.get(
        "/api/v1/live-rows",
        include_in_schema=False,
        responses={
            200: json_reply(LiveDocument),
            304: {"description": "unchanged since the reply whose `ETag` the request has in `If-None-Match`"},
            **problems(403, 422),
        },
    )
    async def live(request: Request, processes: _Processes = "rows", since: _Since = None) -> Response:
        """The whole node at one time: devices with their ledgers, processes, the last ten minutes.

        It has the same content as the documents of devices, processes and health, which are of different times. Its
        format changes with the page and the commands; other programs should read those documents.
        """
        viewer = await hide_identities_from.of(request.scope) if hide_identities_from is not None else None
        rendering = await renderings.of(viewer, whole_processes=processes == "documents")
        headers = {"Cache-Control": "no-store", "ETag": f'W/"{rendering.digest}-{history.newest_seconds}"'}
        if request.headers.get("if-none-match") == headers["ETag"]:
            return Response(status_code=304, headers=headers)
        past = json.dumps(history.document(since), separators=(",", ":")).encode()
        body = b'{"moment":%b,"state":%b,"history":%b}' % (rendering.moment, rendering.state, past)
        return Response(body, headers=headers, media_type="application/json")

    return router


def _table(snapshot: Snapshot, viewer: Caller | None) -> dict[str, Any]:
    gpus = snapshot.gpus
    rows = [row for process in seen_processes(snapshot, viewer) for row in _rows(process, gpus)]
    return {"columns": COLUMNS, "processes": rows}


def _rows(process: SeenProcess, gpus: Mapping[str, str]) -> Iterator[list[Any]]:
    # Built by hand: a node has hundreds of rows, each second, and reports wait meanwhile.
    samples: dict[str, DeviceSample] = {}
    clears = False
    workload = rank = None
    if process.reporter is not None:
        report = process.reporter.report
        workload, rank = report.process.workload, report.process.rank
        samples = {sample.uuid: sample for sample in report.devices}
        clears = process.reporter.clears
    elif process.silent is not None:
        workload, rank = process.silent.workload, process.silent.rank
    of_process = [
        *(process.pid, process.state, workload, rank, process.command),
        *(process.identity("user"), process.identity("k8s_namespace"), process.identity("k8s_pod")),
        *(process.last_report_unix_seconds, clears),
    ]
    uuids = [*samples, *(uuid for uuid in process.shares if uuid not in samples)]
    if not uuids:
        yield [*of_process, *(None,) * (len(COLUMNS) - len(of_process))]
    for uuid in uuids:
        share, sample = process.shares.get(uuid), samples.get(uuid)
        row = [*of_process, gpus.get(uuid), uuid]
        row += (share.used_bytes, share.non_torch_bytes) if share else (None, None)
        if sample is None:
            row += (None,) * 7
        else:
            row += (sample.allocated_bytes, sample.reserved_bytes, sample.reclaimable_bytes)
            row += (sample.idle_cache_bytes, fragmented_bytes(sample), sample.unmapped_bytes, sample.nccl_bytes)
        yield row
