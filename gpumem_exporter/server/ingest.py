"""The path of a report through the exporter, step by step. The other routes read the state that a report changes."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.types import Receive

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
from gpumem_exporter.collectors.exposition import Exposition
from gpumem_exporter.collectors.instruments import Instruments
from gpumem_exporter.core.samples import ProcessKey, ReportingProcess
from gpumem_exporter.core.store import Store
from gpumem_exporter.errors import (
    ForeignProcessError,
    ReporterSupersededError,
    TooManyProcessesError,
    UnknownDeviceError,
)
from gpumem_exporter.events import Recorder
from gpumem_exporter.server.api.event_writes import wait_until_kept
from gpumem_exporter.server.api.report_schema import ReportReader, shortened
from gpumem_exporter.server.background.liveness import Presence
from gpumem_exporter.server.http.connections import Connection
from gpumem_exporter.server.http.held_requests import Held, HeldRequests
from gpumem_exporter.server.http.peer import Peer
from gpumem_exporter.server.http.problems import FieldError, ProblemError
from gpumem_exporter.server.http.turns import Turns
from gpumem_exporter.server.report_log import ReportLog
from gpumem_exporter.server.security.report_sender import ReportedProcess, ReportSenders

__all__ = ["Ingest"]

INLINE_BYTES = 32 << 10
"""The longest body that the event loop reads itself, in less than 1 ms: three reports of 64 devices."""

_LIMITS = (
    f"the limits are {MAX_LABEL_LENGTH} characters for a label, {MAX_PHASES} phases and {MAX_COMPONENTS} components "
    "of a device, and for a result 500 characters and 10 blocks; the rest is left out"
)

_log = logging.getLogger(__name__)


class Ingest:
    """Takes reports: the only place that connects the parts that a report changes. Used on the event loop only.

    Args:
        store: keeps the report.
        senders: identifies the process, and refuses senders that may not report for it.
        presence: removes the process when it ends.
        events: derives events.
        dispatcher: takes results and returns commands.
        held_requests: holds requests until there is a command.
        exposition: renders the lines of the process.
        instruments: counts reports by outcome.
        clock: monotonic seconds.
        wall_clock: seconds since the epoch.
        report_interval_seconds: the interval for reporters, and the longest time that a request is held.
    """

    def __init__(
        self,
        store: Store,
        senders: ReportSenders,
        presence: Presence,
        events: Recorder,
        dispatcher: Dispatcher,
        held_requests: HeldRequests,
        exposition: Exposition,
        instruments: Instruments,
        *,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        report_interval_seconds: float,
    ) -> None:
        self._reports = store
        self._senders = senders
        self._presence = presence
        self._events = events
        self._dispatcher = dispatcher
        self._held_requests = held_requests
        self._exposition = exposition
        self._instruments = instruments
        self._clock = clock
        self._wall_clock = wall_clock
        self._report_interval_seconds = report_interval_seconds
        self._reader = ReportReader()
        self._turns = Turns(2)
        self._nothing_to_do = self._encode((), ())
        """The reply to most reports."""
        self._log = ReportLog(clock)

    async def take(self, scope: Mapping[str, Any], body: bytes, receive: Receive) -> bytes | None:
        """Take a report and return the reply; None if the client closed the connection.

        The request guard has admitted the sender. The reply may be held until there is a command.

        Args:
            scope: the ASGI scope of the request.
            body: the report.
            receive: the ASGI channel of the request, whose body has been read.

        Raises:
            ProblemError: the report is invalid or cannot be stored.
        """
        report = await self._parse(body, scope)
        reported = await self._identify(report, scope["state"]["peer"])
        short = self._shorten(report, reported)
        process = self._store(short, reported)
        self._instruments.count_report("accepted" if short is report else "shortened")
        committed = self._derive_events(process)
        self._hand_over_results(process)
        await self._wait_for(committed)
        return await self._reply(process, receive)

    async def _parse(self, body: bytes, scope: Mapping[str, Any]) -> Report:
        """Read the report; a long one in a thread and in a turn of its sender.

        Raises:
            ProblemError: the report is invalid, or too many long ones wait.
        """
        try:
            if len(body) <= INLINE_BYTES:
                return self._reader.read(body)
            return await self._parse_in_turn(body, scope["state"])
        except ProblemError as error:
            self._instruments.count_report("busy" if error.status == 503 else "invalid")
            raise

    async def _parse_in_turn(self, body: bytes, state: Mapping[str, Any]) -> Report:
        connection: Connection | None = state.get("connection")
        try:
            return await self._turns.run(connection.owner if connection else "", partial(self._reader.read, body))
        finally:
            state.get("end_body_turn", lambda: None)()

    async def _identify(self, report: Report, peer: Peer) -> ReportedProcess:
        """Return the process that the peer reports, with its owner.

        Raises:
            ProblemError: the peer may not report for this process.
        """
        try:
            return await self._senders.identify(report.process, peer)
        except ForeignProcessError as error:
            self._instruments.count_report("foreign_process")
            raise ProblemError(403, str(error)) from None

    def _shorten(self, report: Report, reported: ReportedProcess) -> Report:
        """Leave out what exceeds the limits of labels, phases and components."""
        short = shortened(report)
        if short is not report:
            self._log.name("shortened", _key(report, reported), report.process.workload[:MAX_LABEL_LENGTH], _LIMITS)
        return short

    def _store(self, report: Report, reported: ReportedProcess) -> ReportingProcess:
        """Store the report and return its process with this report.

        Raises:
            ProblemError: the store rejects the report.
        """
        before = self._reports.find(_key(report, reported))
        process = self._put(report, reported)
        self._presence.reported(process)
        for displaced in self._reports.take_displaced():
            self._presence.forget(displaced, "another process took its place: see --report.max-processes")
        if process is before:  # the same or a later report has arrived before; only the results may be new
            return replace(process, report=report)
        if before is None or before.report.process.session != report.process.session:
            if before is not None:
                self._presence.replaced(before, process)
            identity = report.process
            fields = {"pid": identity.pid, "uid": reported.owner_uid, "workload": identity.workload}
            _log.debug("a process reports", extra={"fields": fields})
            self._log_unknown_devices(report, process)
        self._exposition.refresh(process)
        return process

    def _log_unknown_devices(self, report: Report, process: ReportingProcess) -> None:
        """Log the devices in the report that the driver does not have, because no page shows their memory."""
        known = {sample.uuid for sample in process.report.devices}
        unknown = [sample.uuid for sample in report.devices if sample.uuid not in known]
        if unknown:
            why = f"the driver does not have the devices {', '.join(unknown)}"
            self._log.name("without_unknown_devices", process.key, report.process.workload, why)

    def _put(self, report: Report, reported: ReportedProcess) -> ReportingProcess:
        try:
            return self._reports.put_report(
                report,
                host_pid=reported.host_pid,
                owner_uid=reported.owner_uid,
                place=reported.place,
                now_seconds=self._clock(),
                now_unix_seconds=self._wall_clock(),
            )
        except ReporterSupersededError as error:
            self._instruments.count_report("superseded")
            raise ProblemError(409, str(error)) from None
        except TooManyProcessesError as error:
            self._instruments.count_dropped()
            self._instruments.count_report("dropped")
            self._log.name("dropped", _key(report, reported), report.process.workload, str(error))
            retry_after = str(max(1, round(self._reports.report_expiry_seconds)))
            raise ProblemError(503, str(error), {"Retry-After": retry_after}) from None
        except UnknownDeviceError as error:
            self._instruments.count_report("unknown_device")
            raise ProblemError.invalid([FieldError("devices.0.uuid", str(error))]) from None

    def _derive_events(self, process: ReportingProcess) -> Future[bool] | None:
        """Record the events of the report; the future is true once its out-of-memory errors are committed."""
        return self._events.take_report(process)

    def _hand_over_results(self, process: ReportingProcess) -> None:
        """Hand the results of commands to the dispatcher. After its final report, the process is removed."""
        self._dispatcher.take_results(process)
        if process.report.final:
            self._presence.forget(process.key, "its reporter stopped")

    async def _wait_for(self, committed: Future[bool] | None) -> None:
        """Wait until the errors in the report are stored, because the reporter drops them after the reply."""
        if committed is not None:
            await wait_until_kept(self._events.log, committed)

    async def _reply(self, process: ReportingProcess, receive: Receive) -> bytes | None:
        """Return the reply with the commands for the process, as soon as there is one or the hold ends."""
        if process.report.final:
            return self._nothing_to_do
        commands, cancelled = self._dispatcher.commands(process), self._dispatcher.cancelled(process)
        hold_seconds = min(process.report.hold_seconds, self._report_interval_seconds)
        if not commands and not cancelled and hold_seconds > 0:
            self._held_requests.wake(process.key)  # a process has one connection: an earlier request has no client
            held = await self._held_requests.hold(process.key, hold_seconds, receive)
            if held is Held.GONE:
                self._presence.connection_lost(process)
                return None
            commands, cancelled = self._dispatcher.commands(process), self._dispatcher.cancelled(process)
        for command in commands:
            fields = {"id": command.id, "action": command.action, "pid": process.report.process.pid}
            _log.debug("command delivered", extra={"fields": fields})
        return self._encode(commands, cancelled) if commands or cancelled else self._nothing_to_do

    def _encode(self, commands: tuple[Command, ...], cancelled: tuple[str, ...]) -> bytes:
        return json.dumps(to_wire(Reply(commands, cancelled, self._report_interval_seconds))).encode()


def _key(report: Report, reported: ReportedProcess) -> ProcessKey:
    return ProcessKey(report.process.pid_namespace, report.process.pid, reported.owner_uid, reported.place)
