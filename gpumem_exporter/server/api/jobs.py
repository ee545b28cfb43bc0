"""`GET /api/v1/jobs/{id}`: the memory of a job's processes, also after they ended."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Path, Response
from typing_extensions import TypedDict

from gpumem_client.wire.errors import StorageError
from gpumem_client.wire.protocol import MAX_LABEL_LENGTH
from gpumem_exporter.events import Event, EventLog, Query, Recorder
from gpumem_exporter.server.http.problems import ProblemError, problems
from gpumem_exporter.server.http.replies import Renderer, encoded, json_reply, json_response
from gpumem_exporter.server.security.request_guard import JOBS_PATH

_PAGE = 1000
_MAX_PAGES = 8
"""A page has at most 1000 processes and 1 MiB of events."""


class JobDeviceDocument(TypedDict):
    """The memory of a process on one device. Unknown values are null."""

    gpu: str | None
    uuid: str
    used_peak_bytes: int | None
    used_mean_bytes: int | None
    reserved_highest_bytes: int | None
    idle_cache_mean_bytes: int | None


class JobProcessDocument(TypedDict):
    """A process of a job. `end_unix_seconds` is null while it reports."""

    pid: int | str
    workload: str | None
    rank: str | None
    first_report_unix_seconds: float
    end_unix_seconds: float | None
    devices: list[JobDeviceDocument]


class JobDocument(TypedDict):
    """The processes of a job that reported to this exporter, in the order of their ends.

    `more`: it has more than fit into a reply, and the latest ones are missing.
    """

    job_id: str
    processes: list[JobProcessDocument]
    more: bool


def jobs_router(recorder: Recorder, renderer: Renderer) -> APIRouter:
    """Return the route of jobs."""
    router = APIRouter(tags=["events"])
    reading = asyncio.Lock()
    """One reply is built at a time: each may have thousands of processes."""

    @router.get(JOBS_PATH + "/{job_id}", responses={200: json_reply(JobDocument), **problems(401, 403, 404, 422, 503)})
    async def job(job_id: Annotated[str, Path(max_length=MAX_LABEL_LENGTH)]) -> Response:
        """Peaks and means of the processes with this Slurm or Ray job id, from their first report on.

        The values of ended processes are those of their `process_ended` events, those of others are from the exporter's
        start on. The callers that may read events may read jobs.
        """
        async with reading:
            try:
                processes, more = await _ended(recorder.log, job_id)
            except StorageError as error:
                raise ProblemError(503, f"the events cannot be read: {error}", {"Retry-After": "1"}) from None
            processes += [{**_process(event), "end_unix_seconds": None} for event in recorder.running(job_id)]
            if not processes:
                raise ProblemError(404, f"no process of job {job_id!r} has reported to this exporter")
            document = {"job_id": job_id, "processes": processes, "more": more}
            return json_response(await renderer.render(lambda: encoded(document)))

    return router


async def _ended(log: EventLog, job_id: str) -> tuple[list[dict[str, Any]], bool]:
    """Return the ended processes of a job, oldest first, and whether there are more."""
    processes: list[dict[str, Any]] = []
    query = Query(after=0, types=("process_ended",), job_id=job_id, limit=_PAGE)
    for _ in range(_MAX_PAGES):
        page = await log.page(query)
        processes += map(_process, page.events)
        if not page.more:
            return processes, False
        query = replace(query, after=page.next_after)
    return processes, True


def _process(event: Event) -> dict[str, Any]:
    names = tuple(JobDeviceDocument.__annotations__)
    return {
        "pid": event.pid,
        "workload": event.workload,
        "rank": event.rank,
        "first_report_unix_seconds": event.detail.get("first_report_unix_seconds"),
        "end_unix_seconds": event.time_unix_seconds,
        "devices": [{name: row.get(name) for name in names} for row in event.detail.get("devices", ())],
    }
