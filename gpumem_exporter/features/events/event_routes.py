"""`GET /api/v1/events`: what happened on the node. `GET /api/v1/jobs/{id}`: the memory of the processes of a job."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Request, Response
from fastapi import Query as QueryParameters
from pydantic import AwareDatetime, BeforeValidator, Field
from typing_extensions import TypedDict

from gpumem_client.wire.errors import StorageError
from gpumem_client.wire.protocol import MAX_LABEL_LENGTH
from gpumem_exporter.actions.action_routes import KnownFields, words
from gpumem_exporter.core.caller import Caller, Rights
from gpumem_exporter.core.event import AUDIT_TYPES, EVENT_TYPES, Event, Page, Query
from gpumem_exporter.core.readings import IDENTITY_FIELDS
from gpumem_exporter.core.recorders import Journal
from gpumem_exporter.core.spelling import did_you_mean
from gpumem_exporter.edge.connections import Exchange
from gpumem_exporter.edge.problems import ProblemCode, ProblemError, problems
from gpumem_exporter.edge.replies import Renderer, encoded, json_reply, json_response
from gpumem_exporter.edge.request_guard import EVENTS_PATH, JOBS_PATH
from gpumem_exporter.features.events.event_entries import EventDocument, event_document, fold
from gpumem_exporter.features.events.event_recorder import Recorder
from gpumem_exporter.page.oom import explanation

MAX_LISTED = 1000
_BEFORE_SECONDS = 600.0
# The maximum number of entries before an event.
_MAX_BEFORE = 8
# The number of events of the device, and of the job, that are folded to the entries before an event.
_BEFORE_PAGE = 100
# A page of a job has at most 1000 processes and 1 MiB of events.
_MAX_PAGES = 8
# The values that `--web.hide-identities` hides. The end of a process also has its user as a number, and its
# Slurm job, whose user Slurm names.
_IDENTITIES = (*IDENTITY_FIELDS, "uid", "slurm_job_id")
_Name = Annotated[str | None, Field(min_length=1, max_length=2 * MAX_LABEL_LENGTH)]


class EventParameters(KnownFields):
    """The parameters of a query for events."""

    after: int | None = Field(None, ge=0, le=2**63 - 1, description="only events with a greater id")
    # In a query, the unescaped `+` of a time zone is a space.
    since: Annotated[
        AwareDatetime | None,
        BeforeValidator(lambda value: value.replace(" ", "+") if isinstance(value, str) else value),
    ] = Field(None, description="only events at or after this time: Unix seconds, or RFC 3339")
    type: Annotated[tuple[Literal[EVENT_TYPES], ...], BeforeValidator(words)] = Field(  # type: ignore[valid-type]
        (), description="only events of these types, separated by commas"
    )
    job: _Name = Field(
        None,
        description="only events about this job: its workload, or its id in `/api/v1/live`; an action is about each "
        "target",
    )
    device: _Name = Field(None, description="only events about the device of this uuid")
    pid: _Name = Field(
        None, description="only events about this process, as its `pid` label names it; an action is about each target"
    )
    limit: int = Field(100, ge=1, le=MAX_LISTED, description="the maximum number of events; a page may have fewer")
    fold: bool = Field(
        False,
        description="return starts and ends of short jobs, and errors of a job on a device, as one event, whose "
        "`folded` has their numbers",
    )

    def query(self) -> Query:
        """Return the query for the event log."""
        since = None if self.since is None else self.since.timestamp()
        # The last 100 entries may stand for many more events.
        limit = MAX_LISTED if self.fold and self.after is None and since is None else self.limit
        about = self.model_dump(include={"after", "pid", "job", "device"})
        return Query(since_unix_seconds=since, types=self.type or EVENT_TYPES, limit=limit, **about)


class EventsDocument(TypedDict):
    """A page of events. `next_after` is the `after` of the next request; `more`: there are more events now."""

    events: list[EventDocument]
    next_after: int
    more: bool


class PartDocument(TypedDict):
    """A part of a device's memory at an error: of the process, of another job, of the driver, or free."""

    key: Annotated[str, Field(description="a category of the ledger, `job`, `rest` or `free`")]
    label: str
    bytes: int
    job: Annotated[str | None, Field(description="the id of the other job in `/api/v1/live`")]
    idle: Annotated[int | None, Field(description="the job's idle cache, which is part of `bytes`")]


class ExplanationDocument(TypedDict):
    """Why memory was not enough, what to do, and the device's memory at that moment, without unknown parts."""

    cause: Literal["passed", "fragmented", "idle_cache", "growth", "limit", "others", "too_large", "unknown"]
    verdict: str
    advice: str
    parts: list[PartDocument]


class OneEventDocument(TypedDict):
    """An event; of an out-of-memory error, also its explanation. `before`: what happened on its device and in its job.

    Entries of `before` are folded, at most ten minutes older than the event, the newest first.
    """

    event: EventDocument
    explanation: ExplanationDocument | None
    before: list[EventDocument]


class JobParameters(KnownFields):
    """The parameters of a query for a job."""

    uid: int | None = Field(None, ge=0, lt=2**32, description="only processes of this user")


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
    """The processes of a job that reported to this exporter: the ended ones, first the caller's, then the running ones.

    `more`: it has more than fit into a reply. The missing ones are the latest of the users with the most processes.
    `profiles`: of its out-of-memory errors, newest first; only of processes that the caller may act on.
    """

    job_id: str
    processes: list[JobProcessDocument]
    more: bool
    profiles: list[JobProfileDocument]


def events_router(
    log: Journal,
    recorder: Recorder,
    renderer: Renderer,
    *,
    profile_of: Callable[[Caller, Event], str | None],
    profiles_of: Callable[[Caller, str], Sequence[Mapping[str, Any]]],
    hide_identities: bool,
) -> APIRouter:
    """Return the routes of events and of jobs.

    `profile_of` returns the id of the memory profile of an out-of-memory error, if the caller sees it, and
    `profiles_of` the profiles of a job, newest first. With `hide_identities`, users, commands, pods and others'
    processes of a job are hidden from callers that may not act on every process.
    """
    router = APIRouter(tags=["events"])
    reading_job = asyncio.Lock()
    """One reply about a job is built at a time: each may have thousands of processes."""

    async def read(query: Query) -> Page:
        try:
            return await log.page(query)
        except StorageError as error:
            detail = f"the events cannot be read: {error}; repeat the request later, and see /health"
            raise ProblemError(ProblemCode.NO_EVENTS, detail, {"Retry-After": "1"}) from None

    def visible(request: Request, events: Sequence[Event]) -> tuple[Event, ...]:
        caller: Caller = Exchange.of(request).caller
        # A profile arrives after the event, and may make room for others before the event.
        return tuple(
            replace(each, detail={**each.detail, "profile": profile_of(caller, each)}) if each.type == "oom" else each
            for each in events_for_caller(events, caller, hide_identities=hide_identities)
        )

    @router.get(EVENTS_PATH, responses={200: json_reply(EventsDocument), **problems(401, 403, 422, 503)})
    async def events(request: Request, parameters: Annotated[EventParameters, QueryParameters()]) -> Response:
        """The events in the order in which the exporter recorded them.

        Without `after` and `since`, the reply has the last `limit` events. With one of them, it has the first `limit`
        events that match; `after=<next_after>` continues from there. With `fold`, the last `limit` events may stand for
        up to 1000. A caller that may only act on its own processes gets no events about the actions of others.

        With `--storage.path`, events are on disk and survive a restart. The reply to a report with an out-of-memory
        error waits up to one second until the event is on disk. If the disk fails, the event stays in memory and
        `/health` reports the error.
        """

        def document() -> bytes:
            entries = fold(seen) if parameters.fold else [[each] for each in seen]
            shown = [event_document(entry) for entry in entries[-parameters.limit :]]
            return encoded({"events": shown, "next_after": page.next_after, "more": page.more})

        page = await read(parameters.query())
        seen = visible(request, page.events)
        return json_response(await renderer.render(document))

    @router.get(
        EVENTS_PATH + "/{number}", responses={200: json_reply(OneEventDocument), **problems(401, 403, 404, 422, 503)}
    )
    async def event(request: Request, number: Annotated[int, Path(ge=1, le=2**63 - 1)]) -> Response:
        """One event, with what came before. An out-of-memory error has its cause and the memory at that moment."""
        page = await read(Query(after=number - 1, limit=1))
        found = visible(request, page.events)
        if not found or found[0].id != number:
            why = f"it expired, or it is about another user's action; GET {EVENTS_PATH} lists the events"
            raise ProblemError(ProblemCode.UNKNOWN_EVENT, f"there is no event {number}: {why}")
        (about,) = found
        earlier = Query(before=number, limit=_BEFORE_PAGE)
        queries = (replace(earlier, device=about.uuid or ""), replace(earlier, job=about.job or about.workload or ""))
        before = {each.id: each for query in queries for each in visible(request, (await read(query)).events)}
        return json_response(await renderer.render(lambda: encoded(one_event_document(about, before.values()))))

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
            limit=MAX_LISTED,
        )
        async with reading_job:
            processes: list[dict[str, Any]] = []
            for _ in range(_MAX_PAGES):
                page = await read(replace(query, skip=len(processes)))
                processes += map(_job_process, page.events)
                if not page.more:
                    break
            processes += [
                {**_job_process(event), "end_unix_seconds": None}
                for event in recorder.running(job_id)
                if owner in (None, event.owner) and parameters.uid in (None, event.detail.get("uid"))
            ]
            if not processes:
                known = recorder.workloads() if owner is None else ()
                advice = did_you_mean(job_id, known, "`gpumem-exporter info` shows the jobs that run")
                detail = f"no process of job {job_id!r} has reported to this exporter; {advice}"
                raise ProblemError(ProblemCode.UNKNOWN_JOB, detail)
            document = {"job_id": job_id, "processes": processes, "more": page.more}
            return json_response(
                await renderer.render(lambda: encoded({**document, "profiles": list(profiles_of(caller, job_id))}))
            )

    return router


def one_event_document(event: Event, earlier: Iterable[Event]) -> OneEventDocument:
    """Return an event as JSON, with its explanation and what came before; `earlier` has the events to choose from."""
    time = event.time_unix_seconds
    near = [each for each in earlier if time - _BEFORE_SECONDS <= each.time_unix_seconds < time]
    entries = fold(sorted(near, key=lambda each: each.time_unix_seconds))
    explained: Any = explanation(event.detail) if event.type == "oom" else None
    before = [event_document(entry) for entry in reversed(entries[-_MAX_BEFORE:])]
    return {"event": event_document([event]), "explanation": explained, "before": before}


def events_for_caller(events: Sequence[Event], caller: Caller, *, hide_identities: bool) -> Sequence[Event]:
    """Return what a caller may see of events: only a caller that may act on every process sees all of it."""
    if caller.rights is Rights.ALL:
        return events
    visible = [event for event in events if event.type not in AUDIT_TYPES or event.detail.get("caller") == caller.key]
    if hide_identities:
        return [replace(event, detail=_without_identities(event.detail)) for event in visible]
    return visible


def _without_identities(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values without users, commands and pods, also of the jobs beside an out-of-memory error."""
    shown = {name: None if name in _IDENTITIES else value for name, value in values.items()}
    device = shown.get("device")
    # Without `jobs`, the other jobs of the device are not known. An empty list would say that there were none.
    if isinstance(device, dict) and device.get("jobs") is not None:
        shown["device"] = {**device, "jobs": [_without_identities(job) for job in device["jobs"]]}
    return shown


def _job_process(event: Event) -> dict[str, Any]:
    names = tuple(JobDeviceDocument.__annotations__)
    return {
        **{name: getattr(event, name) for name in ("pid", "workload", "rank")},
        "job": event.job or None,
        **{name: event.detail.get(name) for name in ("uid", "first_report_unix_seconds")},
        "end_unix_seconds": event.time_unix_seconds,
        "devices": [{name: row.get(name) for name in names} for row in event.detail.get("devices", ())],
    }
