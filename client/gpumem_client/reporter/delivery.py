"""Posts reports to the exporter and reads its replies."""

from __future__ import annotations

import enum
import json
import logging
import threading
from collections.abc import Callable, Iterator

from gpumem_client.guest_safety import ErrorLog, log
from gpumem_client.reporter.reporter_settings import ReporterSettings
from gpumem_client.wire.errors import ExporterAnswerError, ExporterUnreachableError, ExporterUntrustedError, GpumemError
from gpumem_client.wire.http import Connection, shown_url
from gpumem_client.wire.protocol import PROFILES_PATH, REPORTS_PATH, Reply, Report, reply_from_wire, to_wire

# The exporter counts as unreachable if a reply takes this much longer than the agreed hold.
_ANSWER_MARGIN_SECONDS = 5.0
_FAREWELL_SECONDS = 0.25
_MAX_REPLY_BYTES = 256 << 10
# Statuses after which the next address is tried: an exporter may accept over loopback what its socket rejects.
_NOT_ALLOWED = (401, 403)
_UNACCEPTABLE = (413, 422)
_CREATED = 201
_UNREACHABLE = "no exporter"
_UNTRUSTED = "no reports are sent"


class Wakeup:
    """Ends the waits of the reporter's thread between two reports. Any thread may call any method."""

    def __init__(self) -> None:
        self._woken = threading.Event()
        self.stopping = False
        """Whether the thread should end."""
        self.interrupt: Callable[[], None] = lambda: None
        """Ends the wait for the exporter's reply."""

    @property
    def woken(self) -> bool:
        """Whether to send a report now."""
        return self._woken.is_set()

    def wake(self) -> None:
        """Send the next report now. Does not wait."""
        self._woken.set()
        self.interrupt()

    def stop(self) -> None:
        """End the thread as soon as possible. Does not wait."""
        self.stopping = True
        self.wake()

    def starts_round(self) -> bool:
        """Start a new round; False if the thread should end."""
        self._woken.clear()  # before the check: otherwise a stop could stay unnoticed for a round
        return not self.stopping

    def wait(self, seconds: float) -> None:
        """Wait this long, or until the thread is woken."""
        self._woken.wait(max(0.0, seconds))


class Outcome(enum.Enum):
    """The outcome of a report."""

    ACCEPTED = enum.auto()
    FAILED = enum.auto()
    """No exporter has answered, or its answer was no valid reply."""
    REFUSED = enum.auto()
    """The exporter does not accept this process' reports now."""
    REJECTED = enum.auto()
    """The exporter will never accept this report's content."""


class Delivery:
    """The connection to the first exporter that accepts reports. For the reporter's thread, except `interrupt`."""

    def __init__(self, settings: ReporterSettings, wakeup: Wakeup, errors: ErrorLog) -> None:
        self._settings = settings
        self._wakeup = wakeup
        self._errors = errors
        self._connection: Connection | None = None
        # The address of the exporter that accepted the last report.
        self._accepted_by = ""
        wakeup.interrupt = self.interrupt

    def deliver(self, report: Report, while_waiting: Callable[[], float] | None = None) -> tuple[Outcome, Reply | None]:
        """Post a report and return the reply, or None after an error, which is logged once.

        `while_waiting` is called during the wait for the reply (see `Connection.request`).
        """
        self._reconnect_as_new_user(report)
        try:
            reply = self._post(report, _ANSWER_MARGIN_SECONDS + report.hold_seconds, while_waiting)
        except (GpumemError, ValueError, OSError) as error:
            return self._failed(error), None
        if self._connection is not None and self._connection.url != self._accepted_by:
            self._accepted_by = self._connection.url
            log.debug("reports go to %s", shown_url(self._accepted_by))
        self._errors.clear(_UNREACHABLE)
        self._errors.clear(_UNTRUSTED)
        return Outcome.ACCEPTED, reply

    def _failed(self, error: Exception) -> Outcome:
        """Log an error of a report, and return the outcome."""
        if isinstance(error, ExporterAnswerError):
            self._errors.note(f"the exporter refused a report ({error.status})", error)
            return Outcome.REJECTED if error.status in _UNACCEPTABLE else Outcome.REFUSED
        # A missing exporter is normal and not logged by default. An untrusted exporter needs an operator.
        if isinstance(error, ExporterUntrustedError):
            self._errors.note(_UNTRUSTED, error)
        elif not isinstance(error, ExporterUnreachableError):
            self._errors.note("cannot report", error)
        elif not self._wakeup.woken:  # `wake` interrupts the request
            self._errors.note(_UNREACHABLE, error, level=logging.INFO)
        return Outcome.FAILED

    def interrupt(self) -> None:
        """End the wait for a reply. Any thread may call this."""
        connection = self._connection
        if connection is not None:
            connection.interrupt()

    def farewell(self, report: Report) -> None:
        """Post the final report."""
        if self._connection is None:
            return  # no exporter was reached
        # On a new connection: the stop has interrupted the old one.
        self._connection.close()
        self._connection = self._connect(self._connection.url, _FAREWELL_SECONDS)
        self._post_final(self._connection, report)

    def send_profile(self, document: bytes) -> str:
        """Post a profile on a connection of its own, which `interrupt` does not end. Returns the id of the profile.

        Raises:
            ExporterError: the exporter does not answer, is not trusted, or does not accept the profile.
            ValueError, KeyError: its answer is invalid.
            OSError: the token file cannot be read.
        """
        if not self._accepted_by:
            raise ExporterUnreachableError("no exporter has accepted a report")
        # A profile is useful only to the exporter that receives the reports.
        connection = self._connect(self._accepted_by, _ANSWER_MARGIN_SECONDS)
        try:
            headers = {**self._headers(), "Content-Encoding": "gzip"}
            answer = connection.request("POST", PROFILES_PATH, document, headers)
        finally:
            connection.close()
        if answer.status != _CREATED:
            raise ExporterAnswerError(answer.status, _detail(answer.body))
        return str(json.loads(answer.body)["id"])

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()

    def _reconnect_as_new_user(self, report: Report) -> None:
        """Connect again if this process has changed its user, as with `os.setuid`."""
        connection = self._connection
        if connection is None or not connection.of_another_user:
            return
        log.debug("this process has another user: it connects again")
        # The exporter takes the user of a connection as the owner of the process. Without an end of the former user's
        # process, it would count the memory of both until the former one expires.
        self._post_final(connection, Report(report.process, report.sequence, final=True))
        connection.close()
        self._connection = None

    def _post_final(self, connection: Connection, report: Report) -> None:
        request = "POST", REPORTS_PATH, _body(report)
        try:
            connection.request(*request, self._headers(), timeout_seconds=_FAREWELL_SECONDS)
        except (GpumemError, OSError) as error:
            self._errors.note("a final report was not delivered", error, level=logging.INFO)

    def _headers(self) -> dict[str, str]:
        return {"Content-Type": "application/json", **self._settings.authorization()}

    def _post(self, report: Report, timeout_seconds: float, while_waiting: Callable[[], float] | None = None) -> Reply:
        headers, body = self._headers(), _body(report)
        refusal: GpumemError = ExporterUnreachableError("the reporter stops")
        for connection in self._candidates():
            try:
                answer = connection.request(
                    "POST",
                    REPORTS_PATH,
                    body,
                    headers,
                    timeout_seconds=timeout_seconds,
                    while_waiting=while_waiting,
                )
                if answer.status == 200:
                    return reply_from_wire(json.loads(answer.body))
                refusal = ExporterAnswerError(answer.status, _detail(answer.body))
                if answer.status not in _NOT_ALLOWED:
                    break
            except ExporterUnreachableError as error:
                if not isinstance(refusal, ExporterUntrustedError):  # the more useful of two errors
                    refusal = error
            connection.close()
            # A wake or a stop has interrupted the request: this exporter may work well, and the next report is due now.
            # A final report goes to the address of this connection.
            if connection.interrupted:
                break
            self._connection = None
        try:
            raise refusal
        finally:
            del refusal  # would be a reference cycle with this frame after every failed report

    def _candidates(self) -> Iterator[Connection]:
        """Yield the working connection, otherwise a new one to each address in turn."""
        if self._connection is not None and not self._connection.interrupted:
            yield self._connection
            return
        for url in self._settings.urls:
            if not self._wakeup.stopping:
                self._connection = self._connect(url, _ANSWER_MARGIN_SECONDS)
                yield self._connection

    def _connect(self, url: str, timeout_seconds: float) -> Connection:
        return Connection(
            url,
            timeout_seconds=timeout_seconds,
            trust=self._settings.trust,
            trusted_only=True,
            max_answer_bytes=_MAX_REPLY_BYTES,
        )


def _body(report: Report) -> bytes:
    # Bytes of the environment that are not UTF-8, as in a name of a job, are surrogates here. JSON may not have them.
    return json.dumps(to_wire(report), separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")


def _detail(body: bytes) -> str:
    """Return the detail of an RFC 9457 problem, or the start of any other body."""
    try:
        return str(json.loads(body)["detail"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode("utf-8", "replace")
