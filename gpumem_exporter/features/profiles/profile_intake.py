"""`POST /api/v1/profiles`: takes the memory profiles that reporters send.

The request guard has admitted the sender as it admits the sender of a report. A profile is kept only if the exporter
knows why it was taken: for a command that the process has, or for an out-of-memory error that the process reported.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace
from functools import partial
from uuid import uuid4

from fastapi import Request, Response

from gpumem_client.profile.profile_types import Profile
from gpumem_client.wire.protocol import ProcessIdentity
from gpumem_exporter.actions.kinds import PROFILES_PER_MINUTE
from gpumem_exporter.actions.rate_limits import RateLimits
from gpumem_exporter.core.naming import json_pid
from gpumem_exporter.core.samples import ProcessKey, ReportingProcess
from gpumem_exporter.edge.connections import Exchange
from gpumem_exporter.edge.fair_queue import Turns
from gpumem_exporter.edge.problems import ProblemCode, ProblemError
from gpumem_exporter.edge.replies import json_response
from gpumem_exporter.errors import ForeignProcessError, ProfileInvalidError, TooManyActionsError
from gpumem_exporter.features.feature import Node
from gpumem_exporter.features.profiles.profile_document import ACTION, OUT_OF_MEMORY, read_profile
from gpumem_exporter.features.profiles.profile_store import Profiles
from gpumem_exporter.features.profiles.stored_profile import OF_IDENTITY, KeptDevice, ProfileFacts
from gpumem_exporter.node.job_ids import job_of_process

MAX_OF_OWNER = 60
"""The maximum number of profiles of all processes of a user or container that are kept in a minute."""
_MAX_AGE_SECONDS = 86400.0
# The time in which a report names the out-of-memory error of a profile.
_CONFIRM_SECONDS = 60.0

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class ProfileIntake:
    """Takes profiles. Used on the event loop only."""

    profiles: Profiles
    node: Node
    """Other features fill its recorders of errors and of processes, also after this one has been built."""

    def __post_init__(self) -> None:
        self.scraped: dict[str, tuple[ProfileFacts, bytes] | None] = {}
        """The profiles of requests for a new one, by action: for the request alone, and not kept. None has not arrived
        yet."""
        # By owner of the connection: reading a profile takes time, whether it is valid or not.
        limits = partial(RateLimits, clock=self.node.clock, what="profiles")
        self._requests = limits(per_caller=self.node.settings.action_caller_limit, per_process=1)
        self._kept = limits(per_caller=MAX_OF_OWNER, per_process=PROFILES_PER_MINUTE)
        # Of reading, and of the disk, which may hang.
        self._reading, self._writing = Turns(1), Turns(1)
        # The profiles of out-of-memory errors that no report has named yet, by id: process, number, and until when.
        self._unconfirmed: dict[str, tuple[ReportingProcess, int, float]] = {}
        self._deletion: asyncio.Future[None] | None = None

    async def receive(self, request: Request) -> Response:
        """Take a memory profile of a process, as JSON compressed with gzip. Used by the client.

        The process must report, and must have taken the profile for a command of this exporter or for an
        out-of-memory error that it has reported. A profile that is sent again keeps its id.
        """
        exchange = Exchange.of(request)
        owner = exchange.owner
        body = await request.body()
        try:
            self._requests.take(owner, ())
            identity, profile = await self._reading.run(owner, partial(read_profile, body))
            reported = await self.node.senders.identify(identity, exchange.peer)
            key = ProcessKey(identity.pid_namespace, identity.pid, reported.owner_uid, reported.place)
            process = self._reporting(key, identity)
            profile_id = await self._take(process, profile, body, owner)
        except ProfileInvalidError as error:
            raise ProblemError(ProblemCode.INVALID_PROFILE, f"the profile is invalid: {error}") from None
        except ForeignProcessError as error:
            raise ProblemError(ProblemCode.FOREIGN_PROCESS, str(error)) from None
        except TooManyActionsError as error:
            raise ProblemError.too_many(str(error), error.retry_seconds) from None
        return json_response({"id": profile_id}, 201)

    def _reporting(self, key: ProcessKey, identity: ProcessIdentity) -> ReportingProcess:
        """Return the process that sends a profile. Raises ProblemError (409) if its reporter does not report."""
        # No report is sent during a search, so that the process may be silent by now.
        process = self.node.store.find(key) or self.node.processes.late_process(identity, key.owner_uid)
        known = process.report.process if process is not None and process.key == key else None
        same = (identity.start_time_ticks, identity.session)
        if process is None or known is None or (known.start_time_ticks, known.session) != same:
            detail = f"pid {identity.pid} does not report to this exporter; send a report first"
            raise ProblemError(ProblemCode.NOT_REPORTING, detail, {"Retry-After": "1"})
        return process

    async def _take(self, process: ReportingProcess, profile: Profile, body: bytes, owner: str) -> str:
        """Keep a profile, or give it to the request that waits for it; return its id.

        Raises ProblemError (409) if the exporter does not know why it was taken, and TooManyActionsError.
        """
        if profile.cause == OUT_OF_MEMORY:
            return await self._take_of_error(process, profile, body, owner)
        part = self.node.dispatcher.running_profile(process, profile.id)
        if part is None:
            detail = f"the process has no command {profile.id[:64]!r} to take a profile"
            raise ProblemError(ProblemCode.UNEXPECTED_PROFILE, detail)
        running = part.running
        if not part.profile:
            if running.action.unlisted:
                facts = self._facts(process, profile, len(body))
                if running.action.id in self.scraped:  # otherwise the client has disconnected
                    self.scraped[running.action.id] = facts, body
                part.profile = facts.id
            else:
                part.profile = await self._keep(process, replace(profile, cause=ACTION), body, owner)
        return part.profile

    async def _take_of_error(self, process: ReportingProcess, profile: Profile, body: bytes, owner: str) -> str:
        number = profile.oom_number or 0  # it has one: it was checked
        earlier = self.profiles.of_error(process.key.share, process.report.process.session, number)
        if earlier is not None:
            return earlier.id
        profile_id = await self._keep(process, profile, body, owner)
        # The process may end right after the error, so its profile is on the way before the report of the error.
        if not await self.node.errors.knows_error(process, number):
            self._unconfirmed[profile_id] = process, number, self.node.clock() + _CONFIRM_SECONDS
        return profile_id

    def expire(self) -> None:
        """Delete the profiles of errors that no report has named in time; called once a second."""
        has_error, now = self.node.errors.has_error, self.node.clock()
        waiting = {each: of_error for each, of_error in self._unconfirmed.items() if not has_error(*of_error[:2])}
        late = [profile_id for profile_id, (_, _, until_seconds) in waiting.items() if now >= until_seconds]
        # One deletion of all: many would be more than may wait for a turn, and the disk may hang.
        if late and (self._deletion is None or self._deletion.done()):
            _log.warning("profiles of unknown out-of-memory errors are deleted: %s", ", ".join(late))
            waiting = {each: of_error for each, of_error in waiting.items() if each not in late}
            self._deletion = asyncio.ensure_future(self._writing.run("", partial(self.profiles.forget, *late)))
        self._unconfirmed = waiting

    async def _keep(self, process: ReportingProcess, profile: Profile, body: bytes, owner: str) -> str:
        self._kept.take(process.key.share, [(process.key, f"pid {process.name}")])
        facts = self._facts(process, profile, len(body))
        await self._writing.run(owner, partial(self.profiles.put, facts, body))
        fields = {"id": facts.id, "cause": facts.cause, "pid": facts.pid, "workload": facts.workload}
        _log.info("memory profile", extra={"fields": {**fields, "bytes": facts.size_bytes}})
        return facts.id

    def _facts(self, process: ReportingProcess, profile: Profile, size_bytes: int) -> ProfileFacts:
        identity = process.report.process
        snapshot = self.node.snapshot()
        gpus = snapshot.gpus
        known = {*gpus, *(sample.uuid for sample in process.report.devices)}
        # Without a list of the driver, or with a device that was lost before its uuid was read, any may be the node's.
        listed = snapshot.node is not None and snapshot.node.up and "" not in gpus
        for index, device in enumerate(profile.devices):
            if listed and device.uuid not in known:
                raise ProfileInvalidError(f"devices.{index}: this node has no device {device.uuid[:64]!r}")
        return ProfileFacts(
            **{name: getattr(identity, name) for name in OF_IDENTITY},
            id=uuid4().hex,
            time_unix_seconds=self.node.wall_clock() - min(profile.age_seconds, _MAX_AGE_SECONDS),
            cause=profile.cause,
            pid=json_pid(process.name),
            job=job_of_process(process),
            devices=tuple(
                KeptDevice(each.uuid, gpus.get(each.uuid, ""), each.allocated_bytes, each.peak_bytes)
                for each in profile.devices
            ),
            recorded_seconds=profile.recorded_seconds,
            step=profile.step,
            oom_number=profile.oom_number if profile.cause == OUT_OF_MEMORY else None,
            reported_pid=identity.pid,
            sent_id=profile.id,
            owner_uid=process.owner_uid,
            place=process.key.place,
            size_bytes=size_bytes,
        )
