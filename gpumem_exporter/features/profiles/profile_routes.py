"""`GET /api/v1/profiles`: the memory profiles of processes, for the callers that may act on these processes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request, Response
from pydantic import Field
from typing_extensions import TypedDict

from gpumem_client.profile.profile_types import CAUSES
from gpumem_client.wire.protocol import MAX_LABEL_LENGTH, PROFILES_PATH
from gpumem_exporter.actions.action_options import ActionRequest, Target, invalid_fields
from gpumem_exporter.actions.action_routes import KnownFields, refusals_as_problems
from gpumem_exporter.core.caller import Caller, Rights
from gpumem_exporter.core.event import Event, session_of_oom
from gpumem_exporter.core.samples import ProcessKey
from gpumem_exporter.core.store import Store
from gpumem_exporter.edge.connections import Exchange
from gpumem_exporter.edge.fair_queue import Turns
from gpumem_exporter.edge.problems import FieldError, ProblemCode, ProblemError, problems
from gpumem_exporter.edge.replies import encoded, iso_time, json_reply, json_response
from gpumem_exporter.edge.request_guard import PROCESSES_PATH
from gpumem_exporter.errors import NoPeakError
from gpumem_exporter.features.feature import Node
from gpumem_exporter.features.profiles.profile_document import OUT_OF_MEMORY
from gpumem_exporter.features.profiles.profile_intake import ProfileIntake
from gpumem_exporter.features.profiles.profile_lines import Format, Moment, ShownProfile
from gpumem_exporter.features.profiles.profile_store import Profiles
from gpumem_exporter.features.profiles.stored_profile import ProfileFacts, StoredProfile

MAX_LISTED = 1000
SCRAPE_SECONDS = 10.0
"""The time in which a process must start the profile of a request for a new one."""
# The ids of containers, which no later container has. The numbers of namespaces are used again.
_LASTING = re.compile(r"[0-9a-f]{64}(\.[0-9a-f]{64})*")
# For a profile as a page: its texts come from a job, and a page in a sandbox has no rights at the exporter.
_SANDBOX = "sandbox allow-scripts allow-downloads"


def _unknown(profile_id: str) -> ProblemError:
    why = f"it is unknown, or has made room for others; GET {PROFILES_PATH} lists the profiles"
    return ProblemError(ProblemCode.UNKNOWN_PROFILE, f"no profile {profile_id!r}: {why}")


class ListParameters(KnownFields):
    """The parameters of a list of profiles."""

    limit: int = Field(100, ge=1, le=MAX_LISTED, description="the maximum number of profiles")
    pid: str | None = Field(None, max_length=MAX_LABEL_LENGTH, description="only profiles of this process")
    workload: str | None = Field(None, max_length=MAX_LABEL_LENGTH, description="only profiles of this workload")
    job: str | None = Field(
        None,
        min_length=1,
        max_length=2 * MAX_LABEL_LENGTH,
        description="only profiles of this job: its id of Slurm or Ray, its workload, or its id in `/api/v1/live`",
    )

    def admit(self, facts: ProfileFacts) -> bool:
        """Return whether the list has a profile."""
        return (
            self.pid in (None, str(facts.pid))
            and self.workload in (None, facts.workload)
            and self.job in (None, facts.workload, facts.job, facts.slurm_job_id, facts.ray_job_id)
        )


class FormatParameters(KnownFields):
    """The parameters of a profile."""

    format: Format = Field("json", description="the format of the reply; html is a page with both moments")
    moment: Moment = Field(
        "live", description="live: what was allocated at the end; peak: at the highest moment of the recording"
    )


class ScrapeParameters(FormatParameters):
    """The parameters of a new profile."""

    format: Format = Field("pprof", description="the format of the reply")


class ProfileDeviceDocument(TypedDict):
    """The sums of a profile on one device."""

    uuid: str
    gpu: Annotated[str, Field(description="NVML index; empty if it is unknown")]
    allocated_bytes: int
    peak_bytes: Annotated[int | None, Field(description="at the highest moment; null without a recording")]


class ProfileDocument(TypedDict):
    """A profile without its rows."""

    id: str
    time: Annotated[str, Field(description="when it was taken, in RFC 3339")]
    unix_seconds: float
    cause: Annotated[str, Field(json_schema_extra={"enum": list(CAUSES)})]
    pid: int | str
    workload: str
    rank: str
    command: str
    job: Annotated[str, Field(description="the id of the process' job in `/api/v1/live`")]
    devices: list[ProfileDeviceDocument]
    recorded_seconds: Annotated[float, Field(description="the length of the recording; 0 without one")]
    step: int | None
    size_bytes: Annotated[int, Field(description="the space that it takes, compressed")]


class ProfilesDocument(TypedDict):
    """The profiles of processes that the caller may act on, newest first."""

    profiles: list[ProfileDocument]


class AcceptedDocument(TypedDict):
    """The reply to a reporter."""

    id: Annotated[str, Field(description="the id under which the profile is kept")]


def profile_document(facts: ProfileFacts) -> dict[str, object]:
    """Return what is known about a profile as a `ProfileDocument`."""
    values = {**vars(facts), "time": iso_time(facts.time_unix_seconds), "unix_seconds": facts.time_unix_seconds}
    values["devices"] = [each._asdict() for each in facts.devices]
    return {name: values[name] for name in ProfileDocument.__annotations__}


@dataclass(frozen=True, slots=True)
class ProfileAccess:
    """Decides which profiles a caller sees: profiles of the processes that it may act on, because stacks name code."""

    profiles: Profiles
    store: Store

    def visible(self, caller: Caller, facts: ProfileFacts) -> bool:
        """Return whether a caller sees a profile."""
        if not caller.may_act_for(facts.owner_uid, facts.place):
            return False
        if caller.rights is Rights.ALL or caller.place.here or _LASTING.fullmatch(facts.place.container):
            return True
        key = ProcessKey(facts.pid_namespace, facts.reported_pid, facts.owner_uid, facts.place)
        process = self.store.find(key)
        return process is not None and process.report.process.session == facts.session

    def newest_first(self, caller: Caller) -> Iterator[ProfileFacts]:
        """Yield what a caller sees."""
        yield from (facts for facts in self.profiles.newest_first() if self.visible(caller, facts))

    def find(self, caller: Caller, profile_id: str) -> ProfileFacts:
        """Return what is known about a profile. Raises ProblemError (404) also if the caller does not see it."""
        facts = self.profiles.facts(profile_id)
        if facts is None or not self.visible(caller, facts):
            raise _unknown(profile_id)
        return facts

    def of_error(self, caller: Caller, event: Event) -> str | None:
        """Return the id of the profile of an out-of-memory error; None if there is none that the caller sees."""
        number = event.detail.get("number")
        if event.type != "oom" or not isinstance(number, int):
            return None
        facts = self.profiles.of_error(event.owner, session_of_oom(event), number)
        return facts.id if facts is not None and self.visible(caller, facts) else None

    def of_job(self, caller: Caller, job_id: str) -> list[dict[str, Any]]:
        """Return the profiles of a job's out-of-memory errors that a caller sees, as documents, newest first."""
        return [
            {"id": each.id, "unix_seconds": each.time_unix_seconds, "pid": each.pid, "rank": each.rank}
            for each in self.newest_first(caller)
            if each.cause == OUT_OF_MEMORY and job_id in (each.slurm_job_id, each.ray_job_id)
        ]


_ANY_FORMAT = {
    "description": "the profile in the format of the request",
    "content": {media_type: {} for media_type in ("application/json", "application/octet-stream", "text/html")},
}
_Id = Annotated[str, Path(max_length=MAX_LABEL_LENGTH, description="the id of a profile")]


@dataclass(eq=False)
class ProfileRoutes:
    """The routes of profiles."""

    access: ProfileAccess
    intake: ProfileIntake
    node: Node

    def __post_init__(self) -> None:
        # Of reading files and building replies: of the largest profile, it takes a second.
        self._turns = Turns(1)
        # Of waiting for a new profile: each keeps a body.
        self._scrapes = Turns(16, running_of_owner=4)

    def router(self) -> APIRouter:
        """Return the routes."""
        router = APIRouter(tags=["profiles"])
        accepted = {201: json_reply(AcceptedDocument, "kept"), **problems(401, 403, 409, 413, 415, 422, 429, 503)}
        router.post(PROFILES_PATH, status_code=201, responses=accepted)(self.intake.receive)
        router.get(PROFILES_PATH, responses={200: json_reply(ProfilesDocument), **problems(401, 403, 422)})(self.recent)
        one = {200: _ANY_FORMAT, **problems(401, 403, 404, 422, 503)}
        router.get(PROFILES_PATH + "/{profile_id}", responses=one)(self.one)
        router.get(PROFILES_PATH + "/{profile_id}/diff/{later_id}", responses=one)(self.diff)
        new = {200: _ANY_FORMAT, **problems(401, 403, 404, 409, 422, 429, 503)}
        router.get(PROCESSES_PATH + "/{pid}/profile", responses=new)(self.take)
        return router

    async def recent(self, request: Request, parameters: Annotated[ListParameters, Query()]) -> Response:
        """The profiles of processes that the caller may act on, newest first, without their rows."""
        found = (each for each in self.access.newest_first(Exchange.of(request).caller) if parameters.admit(each))
        shown = map(profile_document, islice(found, parameters.limit))
        return json_response(await self.node.renderer.render(lambda: encoded({"profiles": list(shown)})))

    async def one(
        self, request: Request, profile_id: _Id, parameters: Annotated[FormatParameters, Query()]
    ) -> Response:
        """One profile. A profile of a process that the caller may not act on is unknown to it."""
        facts = self.access.find(Exchange.of(request).caller, profile_id)
        return await self._reply(
            request, parameters, lambda: self._read(facts.id).shown(parameters.format, parameters.moment)
        )

    async def diff(
        self, request: Request, profile_id: _Id, later_id: _Id, parameters: Annotated[FormatParameters, Query()]
    ) -> Response:
        """What grew and what shrank from one profile to another, by stack and by owner."""
        from gpumem_exporter.features.profiles.profile_diff import difference

        ids = [self.access.find(Exchange.of(request).caller, each).id for each in (profile_id, later_id)]
        # One after the other: a large profile takes more memory than its lines.
        both = (self._read(each).at(parameters.moment) for each in ids)
        return await self._reply(request, parameters, lambda: [difference(*both)])

    async def take(
        self,
        request: Request,
        pid: Annotated[str, Path(max_length=MAX_LABEL_LENGTH, description="the `pid` label of the process")],
        parameters: Annotated[ScrapeParameters, Query()],
    ) -> Response:
        """A new profile of a process, without a recording, for scrapers. It is not kept, and it is no event."""
        wanted = ActionRequest("profile", Target(pid=pid), deadline_seconds=SCRAPE_SECONDS)
        if invalid := invalid_fields(wanted):
            raise ProblemError.invalid([FieldError("pid", each.message) for each in invalid])
        await Exchange.of(request).turn.aclose()
        async with self._scrapes.of(Exchange.of(request).owner):
            with refusals_as_problems():
                action = self.node.dispatcher.submit(wanted, requested_by=Exchange.of(request).caller, unlisted=True)
            self.intake.scraped[action.id] = None
            try:
                if not action.finished:
                    await self.node.held_requests.hold(action.id, 2 * SCRAPE_SECONDS, request.receive)
                    action = self.node.dispatcher.get(action.id) or action
            finally:
                taken = self.intake.scraped.pop(action.id)
            if taken is not None:
                return await self._reply(
                    request, parameters, lambda: StoredProfile.of(*taken).shown(parameters.format, parameters.moment)
                )
        reason = next((result.reason for result in action.results), "") or "the process has sent no profile"
        if any(result.outcome in ("refused", "unsupported") for result in action.results):
            raise ProblemError(ProblemCode.REFUSED, reason)
        raise ProblemError(ProblemCode.NO_PROFILE, reason, {"Retry-After": "1"})

    def _read(self, profile_id: str) -> StoredProfile:
        profile = self.access.profiles.read(profile_id)
        if profile is None:
            raise _unknown(profile_id)
        return profile

    async def _reply(
        self, request: Request, parameters: FormatParameters, read: Callable[[], list[ShownProfile]]
    ) -> Response:
        # Loaded with the first profile that is read: most exporters start and end without one.
        from gpumem_exporter.features.profiles.profile_formats import policy, render

        def build() -> tuple[bytes, str]:
            return render(read(), parameters.format)

        try:
            body, media_type = await self._turns.run(Exchange.of(request).owner, build)
        except NoPeakError as error:
            raise ProblemError.invalid([FieldError("moment", str(error))]) from None
        headers = {"Cache-Control": "no-store"}
        if parameters.format == "html":
            headers["Content-Security-Policy"] = f"{_SANDBOX}; {policy()}"
        return Response(body, headers=headers, media_type=media_type)
