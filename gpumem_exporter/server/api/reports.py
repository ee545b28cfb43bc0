"""`POST /api/v1/reports`: a reporter's sample comes in, its commands go out.

Plain ASGI: this route is hit once a second by every process, and FastAPI's way of reading a body costs three times as
much as what is done with it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import replace

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gpumem_exporter.core.samples import ProcessKey, ReportingProcess
from gpumem_exporter.errors import ReporterSupersededError, TooManyProcessesError, UnknownDeviceError
from gpumem_exporter.server.api.event_writes import wait_until_kept
from gpumem_exporter.server.api.report_schema import ReportReader
from gpumem_exporter.server.http.held_requests import GONE, Ended
from gpumem_exporter.server.http.problems import FieldError, ProblemError, problem_response
from gpumem_exporter.server.runtime import Runtime
from gpumem_exporter.server.security.access_rules import Peer
from gpumem_exporter.wire.protocol import Command, Reply, Report, to_wire

__all__ = ["ReportsRoute"]

_log = logging.getLogger(__name__)


class ReportsRoute:
    """Takes reports. The guard has let the sender in and read the body.

    Args:
        runtime: the exporter's parts.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._reader = ReportReader()
        self._nothing_to_do = self._reply_body((), ())
        self._retry_after = str(max(1, round(runtime.settings.report_expiry)))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one report; may hold the answer until there is a command."""
        response: Response | None
        if scope["method"] != "POST":
            response = problem_response(405, "reports are sent with POST", headers={"Allow": "POST"})
        else:
            try:
                response = await self._answer(scope, receive)
            except ProblemError as problem:
                response = problem.response()
        if response is not None:
            await response(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive) -> Response | None:
        """The answer; None when nobody is there to read it."""
        runtime = self._runtime
        body = (await receive())["body"]
        try:
            report = self._reader.read(body)
        except ProblemError:
            runtime.instruments.count_report("invalid")
            raise
        process = await self._take(report, Peer.of(scope))
        runtime.instruments.count_report("accepted")
        kept = runtime.events.take_report(process)
        runtime.dispatcher.take_results(process)
        if report.final:
            runtime.presence.forget(process.key, "its reporter stopped")
        if kept is not None:
            # The reporter forgets what was answered: an error that is not on the disk yet would be nowhere.
            await wait_until_kept(runtime.events.log, kept)
        if report.final:
            return self._reply((), ())
        commands = await self._commands(process, report, receive)
        if commands is GONE:
            runtime.presence.connection_lost(process)
            return None
        return self._reply(() if isinstance(commands, Ended) else commands, runtime.dispatcher.cancelled(process))

    async def _take(self, report: Report, peer: Peer) -> ReportingProcess:
        """Put the report where it belongs and return its process with this very report.

        Raises:
            ProblemError: the store does not take it.
        """
        runtime = self._runtime
        peer_pid = peer.credentials.pid if peer.credentials is not None and peer.credentials.pid > 0 else None
        host_pid = await runtime.presence.host_pid(report.process, peer_pid)
        now = runtime.clock()
        before = runtime.store.find(ProcessKey(report.process.pid_namespace, report.process.pid))
        try:
            process = runtime.store.put_report(
                report, host_pid=host_pid, now_seconds=now, now_unix_seconds=runtime.wall_clock()
            )
        except ReporterSupersededError as error:
            raise self._refused("superseded", 409, str(error)) from None
        except TooManyProcessesError as error:
            runtime.instruments.count_dropped()
            raise self._refused("dropped", 503, str(error), {"Retry-After": self._retry_after}) from None
        except UnknownDeviceError as error:
            raise self._refused("unknown_device", 422, str(error)) from None
        if process.report.sequence != report.sequence:
            return replace(process, report=report)  # overtaken: its sample is old news, its results may not be
        if before is None or before.report.process.session != report.process.session:
            if before is not None:
                runtime.presence.replaced(before, process)
            _tell_of_unknown_devices(report, process)
        runtime.exposition.refresh(process)
        return process

    async def _commands(
        self, process: ReportingProcess, report: Report, receive: Receive
    ) -> tuple[Command, ...] | Ended:
        runtime = self._runtime
        hold_seconds = min(report.hold_seconds, runtime.settings.report_interval)
        commands = await runtime.dispatcher.commands(process, 0)
        if commands or hold_seconds <= 0 or runtime.dispatcher.cancelled(process):
            return commands
        return await runtime.holds.until(runtime.dispatcher.commands(process, hold_seconds), receive)

    def _reply(self, commands: tuple[Command, ...], cancelled: tuple[str, ...]) -> Response:
        body = self._reply_body(commands, cancelled) if commands or cancelled else self._nothing_to_do
        return Response(body, media_type="application/json")

    def _reply_body(self, commands: tuple[Command, ...], cancelled: tuple[str, ...]) -> bytes:
        reply = Reply(commands, cancelled, self._runtime.settings.report_interval)
        return json.dumps(to_wire(reply)).encode()

    def _refused(
        self, outcome: str, status: int, detail: str, headers: Mapping[str, str] | None = None
    ) -> ProblemError:
        self._runtime.instruments.count_report(outcome)
        errors: tuple[FieldError, ...] = ()
        if outcome == "unknown_device":
            field, _, message = detail.partition(": ")
            errors = (FieldError(field, message),)
        return ProblemError(status, detail, headers or {}, errors)


def _tell_of_unknown_devices(report: Report, process: ReportingProcess) -> None:
    """Once for each reporter: whoever looks for its memory on them finds nothing."""
    taken = {sample.uuid for sample in process.report.devices}
    unknown = [sample.uuid for sample in report.devices if sample.uuid not in taken]
    if unknown:
        fields = {"pid": process.key.pid, "workload": report.process.workload, "uuids": ",".join(unknown)}
        _log.warning("a process reports devices that the driver does not have", extra={"fields": fields})
