"""`POST /api/v1/reports`: the path of a report through the exporter, and the reply with commands."""

# Plain ASGI: each process calls this route once a second, and reading a body through FastAPI takes three times as long
# as the work on it.

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial

from starlette.types import Receive, Scope, Send

from gpumem_client.wire.protocol import (
    MAX_COMPONENTS,
    MAX_LABEL_LENGTH,
    MAX_PHASES,
    Command,
    Reply,
    Report,
    to_wire,
)
from gpumem_exporter.actions.dispatcher import Dispatcher
from gpumem_exporter.core.recorders import ErrorRecorder, Journal, ProcessRecorder
from gpumem_exporter.core.samples import ProcessKey, ReportingProcess
from gpumem_exporter.core.store import Store
from gpumem_exporter.edge.connections import Exchange
from gpumem_exporter.edge.fair_queue import HeldRequests, Turns
from gpumem_exporter.edge.problems import FieldError, ProblemCode, ProblemError
from gpumem_exporter.errors import (
    ForeignProcessError,
    ReporterSupersededError,
    TooManyProcessesError,
    UnknownDeviceError,
)
from gpumem_exporter.metrics.instruments import Instruments
from gpumem_exporter.reports.process_liveness import Presence
from gpumem_exporter.reports.report_schema import ReportReader, shortened
from gpumem_exporter.reports.report_sender import ReportSenders

INLINE_BYTES = 32 << 10
"""The longest body that the event loop reads itself, in less than 1 ms: three reports of 64 devices."""

_LIMITS = (
    f"the limits are {MAX_LABEL_LENGTH} characters for a label, {MAX_PHASES} phases and {MAX_COMPONENTS} components "
    "of a device, and 500 characters for a result; the rest is left out, and so are values of an engine "
    "that contradict others"
)
_NAMED_SECONDS = 3600.0
# The maximum number of processes of one user that are named for each outcome in an hour. A user can invent others.
_MAX_NAMED = 16

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class ReportsRoute:
    """Takes reports: the only place that connects the parts that a report changes. Used on the event loop only."""

    store: Store
    senders: ReportSenders
    complete: Callable[[Report, ProcessKey], Report]
    """Adds to the report of an engine what only the engine's server knows."""
    presence: Presence
    processes: ProcessRecorder
    errors: ErrorRecorder
    journal: Journal
    dispatcher: Dispatcher
    held_requests: HeldRequests
    instruments: Instruments
    _: KW_ONLY
    clock: Callable[[], float]
    wall_clock: Callable[[], float]
    report_interval_seconds: float
    _reader: ReportReader = field(default_factory=ReportReader)
    _turns: Turns = field(default_factory=lambda: Turns(2))
    _named: dict[tuple[str, str], dict[ProcessKey, float]] = field(default_factory=dict)
    """When the log has named each process, by outcome and `ProcessKey.share`."""

    def __post_init__(self) -> None:
        """Encode the reply to most reports."""
        self._nothing_to_do = self._encoded((), ())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Reply to a report, unless the client has closed the connection. The guard has admitted the sender."""
        if scope["method"] != "POST":
            detail = f"reports are sent with POST, not with {scope['method']}"
            problem = ProblemError(ProblemCode.WRONG_METHOD, detail, {"Allow": "POST"})
            await problem.response()(scope, receive, send)
            return
        body = (await receive())["body"]
        try:
            reply = await self._take(body, scope, receive)
        except ProblemError as refusal:
            _log.debug("report refused", extra={"fields": {"status": refusal.status, "detail": refusal.detail}})
            await refusal.response()(scope, receive, send)
            return
        if reply is not None:
            headers = [(b"content-length", b"%d" % len(reply)), (b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": reply})

    async def _take(self, body: bytes, scope: Scope, receive: Receive) -> bytes | None:
        """Run all steps in their order. Return the reply; None if the client closed the connection while it was held.

        Raises ProblemError if the report is invalid, is not its sender's, or cannot be stored.
        """
        try:
            long = len(body) > INLINE_BYTES
            report = await self._read_in_turn(body, scope) if long else self._reader.read(body)
            short = within_limits = shortened(report)
            reported = await self.senders.identify(report.process, Exchange.of(scope).peer)
            if reported.slurm_job_id not in (None, short.process.slurm_job_id):
                short = replace(short, process=replace(short.process, slurm_job_id=reported.slurm_job_id))
            key = ProcessKey(report.process.pid_namespace, report.process.pid, reported.owner_uid, reported.place)
            before = self.store.find(key)
            if before is None:
                late = self.processes.late_process(report.process, reported.owner_uid)
                if late is not None:
                    # A process that exited before this was read is not in /proc, so it would count as another process.
                    exited = reported.host_pid is None and late.host_pid is not None
                    # A report on an interrupted connection may be read after the final one, which ended the process.
                    if exited or report.sequence <= late.report.sequence:
                        return await self._take_late(replace(late, report=short))
            process = self.store.put_report(
                short if short.engine is None else self.complete(short, key),
                host_pid=reported.host_pid,
                owner_uid=reported.owner_uid,
                place=reported.place,
                now_seconds=self.clock(),
                now_unix_seconds=self.wall_clock(),
            )
            displaced = self.store.take_displaced()
        except (ProblemError, ForeignProcessError, ReporterSupersededError, UnknownDeviceError) as error:
            raise self._refusal(error) from None
        except TooManyProcessesError as error:
            self.instruments.count_dropped()
            self.instruments.count_report("dropped")
            self._name("dropped", key, report, str(error))
            retry_after = str(max(1, round(self.store.report_expiry_seconds)))
            raise ProblemError(ProblemCode.NO_ROOM, str(error), {"Retry-After": retry_after}) from None
        for lost in displaced:
            self.presence.forget((lost, "another process took its place: see --report.max-processes"))
        if within_limits is not report:
            self._name("shortened", key, short, _LIMITS)
        if process is before:  # the same or a later report has arrived before; only the results may be new
            process = replace(process, report=short)
        elif before is None or before.report.process.session != short.process.session:
            self._start_session(before, process, short)
        elif before.host_pid != process.host_pid:
            self.presence.started(process)
        self.instruments.count_report("accepted" if within_limits is report else "shortened")

        self.processes.take_report(process)
        committed = self.errors.take_report(process) if process.report.ooms else None
        self.dispatcher.take_results(process)
        if process.report.final:
            self.presence.forget((process.key, "its reporter stopped"))
        # The reporter drops its errors after the reply.
        if committed is not None:
            await self.journal.wait_until_kept(committed)
        if process.report.final:
            return self._nothing_to_do

        commands, cancelled = self.dispatcher.commands(process), self.dispatcher.cancelled(process)
        hold_seconds = min(process.report.hold_seconds, self.report_interval_seconds)
        if not commands and not cancelled and hold_seconds > 0:
            # A process has one connection: an earlier request that is still held has no client any more.
            self.held_requests.wake(process.key)
            if await self.held_requests.hold(process.key, hold_seconds, receive) == "gone":
                self.presence.connection_lost(process)
                return None
            commands, cancelled = self.dispatcher.commands(process), self.dispatcher.cancelled(process)
        return self._encoded(commands, cancelled) if commands or cancelled else self._nothing_to_do

    async def _take_late(self, process: ReportingProcess) -> bytes:
        """Take a report of a process that has ended."""
        self.instruments.count_report("accepted")
        committed = self.errors.take_report(process)
        if committed is not None:
            await self.journal.wait_until_kept(committed)
        return self._nothing_to_do

    async def _read_in_turn(self, body: bytes, scope: Scope) -> Report:
        """Read a long report in a thread and in a turn of its sender."""
        exchange = Exchange.of(scope)
        try:
            return await self._turns.run(exchange.owner, partial(self._reader.read, body))
        finally:
            await exchange.turn.aclose()

    def _start_session(self, before: ReportingProcess | None, process: ReportingProcess, sent: Report) -> None:
        """Take the first report of a reporter; `sent` may have devices that the driver does not have."""
        if before is not None:
            self.presence.replaced(before, process)
        self.presence.started(process)
        identity = sent.process
        fields = {"pid": identity.pid, "uid": process.owner_uid, "workload": identity.workload}
        _log.debug("a process reports", extra={"fields": fields})
        known = {sample.uuid for sample in process.report.devices}
        unknown = [sample.uuid for sample in sent.devices if sample.uuid not in known]
        if unknown:  # no page shows their memory
            why = f"the driver does not have the devices {', '.join(unknown)}"
            self._name("without_unknown_devices", process.key, sent, why)

    def _refusal(self, error: Exception) -> ProblemError:
        """Count a refused report and return the reply to it."""
        if isinstance(error, ProblemError):
            outcome, problem = "busy" if error.status == 503 else "invalid", error
        elif isinstance(error, ForeignProcessError):
            outcome, problem = "foreign_process", ProblemError(ProblemCode.FOREIGN_PROCESS, str(error))
        elif isinstance(error, ReporterSupersededError):
            outcome, problem = "superseded", ProblemError(ProblemCode.SUPERSEDED, str(error))
        else:
            outcome, problem = "unknown_device", ProblemError.invalid([FieldError("devices.0.uuid", str(error))])
        self.instruments.count_report(outcome)
        return problem

    def _name(self, outcome: str, process: ProcessKey, report: Report, why: str) -> None:
        """Log a report that is not stored as sent, unless its process was named for that in the last hour."""
        now = self.clock()
        named = self._named.setdefault((outcome, process.share), {})
        for earlier in [key for key, seconds in named.items() if now - seconds >= _NAMED_SECONDS]:
            del named[earlier]
        if process in named or len(named) >= _MAX_NAMED:
            return
        named[process] = now
        fields = {"outcome": outcome, "pid": process.pid, "uid": process.owner_uid, "why": why}
        _log.warning("report not stored as sent", extra={"fields": {**fields, "workload": report.process.workload}})

    def _encoded(self, commands: tuple[Command, ...], cancelled: tuple[str, ...]) -> bytes:
        return json.dumps(to_wire(Reply(commands, cancelled, self.report_interval_seconds))).encode()
