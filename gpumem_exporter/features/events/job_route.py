"""`GET /api/v1/jobs/{id}`: the memory of the processes of a job, also after its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request, Response
from fastapi import Query as QueryParameters
from pydantic import Field
from typing_extensions import TypedDict

from gpumem_client.wire.errors import StorageError
from gpumem_client.wire.protocol import MAX_LABEL_LENGTH
from gpumem_exporter.actions.action_routes import KnownFields
from gpumem_exporter.core.caller import Caller, Rights
from gpumem_exporter.core.event import Event, Query
from gpumem_exporter.core.recorders import Journal
from gpumem_exporter.core.spelling import did_you_mean
from gpumem_exporter.edge.connections import Exchange
from gpumem_exporter.edge.problems import ProblemCode, ProblemError, problems
from gpumem_exporter.edge.replies import Renderer, encoded, json_reply, json_response
from gpumem_exporter.edge.request_guard import JOBS_PATH
from gpumem_exporter.features.events.event_recorder import Recorder
from gpumem_exporter.features.events.event_routes import unreadable

_PAGE = 1000
# A page has at most 1000 processes and 1 MiB of events.
_MAX_PAGES = 8


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
    uid: Annotated[int | None, Field(description="its user; null if only a token vouches for the process")]
    job: Annotated[str | None, Field(description="the id of its job in `/api/v1/live`")]
    workload: str | None
    rank: str | None
    first_report_unix_seconds: float
    end_unix_seconds: float | None
    devices: list[JobDeviceDocument]


class JobProfileDocument(TypedDict):
    """The memory profile of an out-of-memory error: `GET /api/v1/profiles/{id}`."""

    id: str
    unix_seconds: float
    pid: int | str
    rank: str


class JobDocument(TypedDict):
    """The processes of a job that reported to this exporter: first the caller's, in the order of their ends.

    `more`: it has more than fit into a reply. The missing ones are the latest of the users with the most processes.
    `profiles`: of its out-of-memory errors, newest first; only of processes that the caller may act on.
    """

    job_id: str
    processes: list[JobProcessDocument]
    more: bool
    profiles: list[JobProfileDocument]


class JobParameters(KnownFields):
    """The parameters of a query for a job."""

    uid: int | None = Field(None, ge=0, lt=2**32, description="only processes of this user")


def jobs_router(
    log: Journal,
    recorder: Recorder,
    renderer: Renderer,
    *,
    profiles_of: Callable[[Caller, str], Sequence[Mapping[str, Any]]],
    hide_identities: bool,
) -> APIRouter:
    """Return the route of jobs. `profiles_of` returns the profiles of a job that a caller sees, newest first.

    With `hide_identities`, a caller that may not act on every process gets its own processes only.
    """
    router = APIRouter(tags=["events"])
    reading = asyncio.Lock()
    """One reply is built at a time: each may have thousands of processes."""

    @router.get(JOBS_PATH + "/{job_id}", responses={200: json_reply(JobDocument), **problems(401, 403, 404, 422, 503)})
    async def job(
        request: Request,
        job_id: Annotated[str, Path(max_length=MAX_LABEL_LENGTH)],
        parameters: Annotated[JobParameters, QueryParameters()],
    ) -> Response:
        """Peaks and means of the processes of a job, from their first report on.

        The job's name is its id of Slurm or Ray, or, unless that is a number, its workload or its id in `/api/v1/live`.
        The values of ended processes come from their `process_ended` events; the values of running processes count from
        the exporter's start. The callers that may read events may read jobs. A process that is in a cgroup of
        slurmstepd has the job of that cgroup, whatever it reports; `uid` leaves out what other users claim.
        """
        caller: Caller = Exchange.of(request).caller
        owner = caller.share if hide_identities and caller.rights is not Rights.ALL else None
        query = Query(
            after=0,
            types=("process_ended",),
            job_id=job_id,
            uid=parameters.uid,
            owner=owner,
            first_owner=caller.share,
            limit=_PAGE,
        )
        async with reading:
            try:
                processes, more = await _ended_processes(log, query)
            except StorageError as error:
                raise unreadable(error) from None
            processes += [
                (event.owner, {**_job_process(event), "end_unix_seconds": None})
                for event in recorder.running(job_id)
                if owner in (None, event.owner) and parameters.uid in (None, event.detail["uid"])
            ]
            if not processes:
                known = recorder.workloads() if owner is None else ()
                advice = did_you_mean(job_id, known, "`gpumem-exporter info` shows the jobs that run")
                detail = f"no process of job {job_id!r} has reported to this exporter; {advice}"
                raise ProblemError(ProblemCode.UNKNOWN_JOB, detail)
            processes.sort(key=lambda each: each[0] != caller.share)
            document = {"job_id": job_id, "processes": [process for _, process in processes], "more": more}
            return json_response(
                await renderer.render(lambda: encoded({**document, "profiles": list(profiles_of(caller, job_id))}))
            )

    return router


async def _ended_processes(log: Journal, query: Query) -> tuple[list[tuple[str, dict[str, Any]]], bool]:
    """Return the ended processes of a job with their owners, and whether there are more."""
    processes: list[tuple[str, dict[str, Any]]] = []
    for _ in range(_MAX_PAGES):
        page = await log.page(query)
        processes += [(event.owner, _job_process(event)) for event in page.events]
        if not page.more:
            return processes, False
        query = replace(query, skip=len(processes))
    return processes, True


def _job_process(event: Event) -> dict[str, Any]:
    names = tuple(JobDeviceDocument.__annotations__)
    return {
        "pid": event.pid,
        "uid": event.detail.get("uid"),
        "job": event.job or None,
        "workload": event.workload,
        "rank": event.rank,
        "first_report_unix_seconds": event.detail.get("first_report_unix_seconds"),
        "end_unix_seconds": event.time_unix_seconds,
        "devices": [{name: row.get(name) for name in names} for row in event.detail.get("devices", ())],
    }
