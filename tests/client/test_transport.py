from __future__ import annotations

import base64
import contextlib
import http.client
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpumem_client.guest_safety import ErrorLog
from gpumem_client.reporter.delivery import Delivery, Outcome, Wakeup
from gpumem_client.reporter.identity import current_process
from gpumem_client.reporter.reporter_settings import ReporterSettings
from gpumem_client.wire.errors import ConfigurationError, ExporterUnreachableError
from gpumem_client.wire.http import Connection, shown_url
from gpumem_client.wire.protocol import Report
from tests.support.servers.recording_exporter import RecordingExporter
from tests.support.servers.scripted_peer import Talk, scripted_peer
from tests.support.waiting import patient, wait_for

NO_CONTENT = b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n"


def head(login: str, **headers: str) -> tuple[str, list[str]]:
    """Send a request with this login in the URL. Returns the server's address and the received header lines."""
    lines: list[str] = []

    def answer(connection: socket.socket, _: int) -> None:
        with connection.makefile("rb") as received:
            lines.extend(line.decode().strip() for line in iter(received.readline, b"\r\n"))
        connection.sendall(NO_CONTENT)

    with scripted_peer(answer, ("127.0.0.1", 0)) as peer:
        address = peer.url.removeprefix("http://")
        with contextlib.closing(Connection(f"http://{login}{address}", timeout_seconds=patient(30))) as connection:
            assert connection.request("GET", "/", headers=headers).status == 204
    return address, lines


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://node", ("node", 80)),
        ("https://node", ("node", 443)),
        ("https://[::1]:9844", ("::1", 9844)),
        ("https://ada:secret@node:9844", ("node", 9844)),
    ],
)
def test_a_url_contains_host_and_port(url: str, address: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    resolved: list[tuple[str, int]] = []

    def resolve(host: bytes, port: int, *_: object) -> None:
        resolved.append((host.decode(), port))
        raise socket.gaierror("no such host")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with pytest.raises(ExporterUnreachableError):
        Connection(url, timeout_seconds=1).request("GET", "/")
    assert resolved == [address]


@pytest.mark.parametrize(
    "url",
    [
        "",
        "127.0.0.1",
        "ftp://host",
        "http://",
        "http://node:port",
        "https://node/path",
        "unix://a@/s",
        "unix://relative",
    ],
)
def test_an_invalid_url_is_rejected_with_the_accepted_forms(url: str) -> None:
    with pytest.raises(ConfigurationError, match=r"http://host:port.*https://host:port.*unix:///"):
        Connection(url, timeout_seconds=1)


def test_a_password_in_a_url_is_sent_but_appears_in_no_error_and_no_host_header() -> None:
    address, sent = head("ada:s%3Aecr%40t@")
    assert f"Host: {address}" in sent
    assert f"Authorization: Basic {base64.b64encode(b'ada:s:ecr@t').decode()}" in sent
    with pytest.raises(ConfigurationError) as error:
        Connection("https://ada:secret@node:1/path", timeout_seconds=1)
    assert "secret" not in str(error.value)


def test_a_token_takes_precedence_over_a_password() -> None:
    _, sent = head("ada:secret@", Authorization="Bearer token")
    assert [line for line in sent if line.startswith("Authorization")] == ["Authorization: Bearer token"]


def test_a_token_of_two_lines_is_not_sent_and_not_shown() -> None:
    with connected(answering(OK)) as connection, pytest.raises(ExporterUnreachableError, match="line break") as error:
        connection.request("GET", "/", headers={"Authorization": "Bearer sec\nret"})
    assert "sec" not in str(error.value)


def test_what_the_program_makes_of_http_client_sees_no_request(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `debuglevel`, which prints the headers, and the wrappers of tracing libraries."""
    monkeypatch.setattr(http.client.HTTPConnection, "debuglevel", 1)
    monkeypatch.setattr(http.client.HTTPConnection, "putrequest", None)
    _, lines = head("", Authorization="Bearer secret")
    assert "Authorization: Bearer secret" in lines
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://ada:secret@node:1", "https://node:1"),
        ("http://ada:sec/ret@node:1/x", "http://node:1/x"),
        ("unix:///run/a@b.sock", "unix:///run/a@b.sock"),
    ],
)
def test_a_url_is_shown_without_its_password(url: str, shown: str) -> None:
    assert shown_url(url) == shown


def test_the_caller_can_work_while_it_waits_for_a_response() -> None:
    calls: list[int] = []
    answered = threading.Event()

    def work() -> float:
        calls.append(len(calls))
        if len(calls) == 4:
            answered.set()
        return 0.0

    def answer(connection: socket.socket, _: int) -> None:
        connection.recv(1 << 16)
        answered.wait(patient(30))
        connection.sendall(NO_CONTENT)

    with (
        scripted_peer(answer, ("127.0.0.1", 0)) as peer,
        contextlib.closing(Connection(peer.url, timeout_seconds=patient(30))) as connection,
    ):
        assert connection.request("GET", "/", while_waiting=work).status == 204
    assert len(calls) >= 4


def test_a_caller_that_works_while_it_waits_still_times_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with (
            contextlib.closing(Connection(url, timeout_seconds=0.05)) as connection,
            pytest.raises(ExporterUnreachableError, match="timed out"),
        ):
            connection.request("GET", "/", while_waiting=lambda: 0.02)


OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 2\r\n\r\nhi"


def read_request(connection: socket.socket) -> bytes:
    data = b""
    while b"\r\n\r\n" not in data:
        received = connection.recv(65536)
        if not received:
            raise ConnectionError("the client closed the connection")
        data += received
    return data


def answering(answer: bytes, *, closes: bool = False) -> Talk:
    """Return a server that answers each request of a connection; with `closes`, only the first one."""

    def talk(connection: socket.socket, number: int) -> None:
        while True:
            read_request(connection)
            connection.sendall(answer)
            if closes:
                connection.shutdown(socket.SHUT_RDWR)
                return

    return talk


@contextlib.contextmanager
def connected(talk: Talk, address: str | tuple[str, int] = ("127.0.0.1", 0), **options: Any) -> Iterator[Connection]:
    """Connect to a server that does what the test wants."""
    with scripted_peer(talk, address) as server:
        connection = Connection(server.url, **{"timeout_seconds": patient(30), **options})
        with contextlib.closing(connection):
            yield connection


@pytest.mark.parametrize("unix", [False, True])
def test_one_connection_serves_many_requests(tmp_path: Path, unix: bool) -> None:
    numbers = []

    def talk(connection: socket.socket, number: int) -> None:
        numbers.append(number)
        answering(OK)(connection, number)

    address = str(tmp_path / "exporter.sock") if unix else ("127.0.0.1", 0)
    with connected(talk, address) as connection:
        for _ in range(3):
            answer = connection.request("GET", "/")
            assert (answer.status, answer.headers["content-type"], answer.body) == (200, "text/plain", b"hi")
    assert numbers == [1]


def test_a_closed_persistent_connection_is_opened_again() -> None:
    with connected(answering(OK, closes=True)) as connection:
        assert [connection.request("GET", "/").body for _ in range(3)] == [b"hi"] * 3


@pytest.mark.parametrize(
    "garbage",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"",
    ],
)
def test_an_invalid_response_is_an_error(garbage: bytes) -> None:
    talk = answering(garbage, closes=True)
    with connected(talk) as connection, pytest.raises(ExporterUnreachableError, match="http://127"):
        connection.request("GET", "/")


@pytest.mark.parametrize("starts", [False, True])
def test_a_response_that_never_ends_times_out(starts: bool) -> None:
    def drip(connection: socket.socket, number: int) -> None:
        read_request(connection)
        if not starts:
            connection.recv(1)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
        while True:
            connection.sendall(b"x")
            threading.Event().wait(0.02)

    with connected(drip) as connection, pytest.raises(ExporterUnreachableError, match="timed out"):
        connection.request("GET", "/", timeout_seconds=0.1)


@pytest.mark.parametrize("head", [b"Content-Length: 300000", b"Transfer-Encoding: chunked", b"Connection: close"])
def test_a_response_longer_than_the_limit_is_an_error(head: bytes) -> None:
    chunk = b"186a0\r\n" + b"x" * 100_000 + b"\r\n" if b"chunked" in head else b"x" * 100_000
    talk = answering(b"HTTP/1.1 200 OK\r\n" + head + b"\r\n\r\n" + 3 * chunk)
    with (
        connected(talk, max_answer_bytes=200_000) as connection,
        pytest.raises(ExporterUnreachableError, match="longer than 200000"),
    ):
        connection.request("GET", "/")


@pytest.mark.parametrize("part", [b"HTTP/1.1 100 Continue\r\n\r\n", b"X: y\r\n", b"1\r\nx\r\n"])
def test_what_surrounds_a_body_is_limited_too(part: bytes) -> None:
    start = b"" if part.startswith(b"HTTP") else b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    start += b"0\r\n" if part.startswith(b"X") else b""
    with (
        connected(answering(start + part * (400_000 // len(part))), max_answer_bytes=200_000) as connection,
        pytest.raises(ExporterUnreachableError, match="longer than 200000"),
    ):
        connection.request("GET", "/", timeout_seconds=patient(1))


class Reporting:
    """A reporter's delivery to the first of two exporters, which hold each reply until the end of the test."""

    def __init__(self, first: RecordingExporter, second: RecordingExporter) -> None:
        self.first, self.second = first, second
        settings = replace(ReporterSettings.resolve(environ={}), urls=(first.url, second.url))
        self.process = current_process(settings)
        self.wakeup = Wakeup()
        self.delivery = Delivery(settings, self.wakeup, ErrorLog())

    def report(self, number: int, **values: Any) -> Report:
        return Report(self.process, number, **values)

    def wake_during(self, number: int) -> Outcome:
        """Wake the reporter while the exporter holds the reply to its report."""
        self.wakeup.starts_round()
        waking = threading.Thread(target=self._wake_at, args=(number,))
        waking.start()
        outcome, _ = self.delivery.deliver(self.report(number, hold_seconds=60.0))
        waking.join()
        return outcome

    def numbers(self) -> list[int]:
        return [report["sequence"] for report in self.first.reports]

    def _wake_at(self, number: int) -> None:
        wait_for(lambda: number in self.numbers(), "the report")
        self.wakeup.wake()


@pytest.fixture
def reporting(tmp_path: Path) -> Iterator[Reporting]:
    with (
        RecordingExporter(tmp_path / "first.sock", hold_seconds=60.0) as first,
        RecordingExporter(tmp_path / "second.sock") as second,
    ):
        found = Reporting(first, second)
        yield found
        found.delivery.close()


def test_a_wake_during_the_first_request_of_a_connection_does_not_change_the_exporter(reporting: Reporting) -> None:
    assert [reporting.wake_during(number) for number in (1, 2)] == [Outcome.FAILED] * 2
    assert reporting.delivery.deliver(reporting.report(3))[0] is Outcome.ACCEPTED
    assert (reporting.numbers(), reporting.second.reports) == ([1, 2, 3], [])


@pytest.mark.parametrize("accepted", [0, 1])
def test_after_a_wake_the_final_report_goes_to_the_same_exporter(reporting: Reporting, accepted: int) -> None:
    for number in range(accepted):
        assert reporting.delivery.deliver(reporting.report(number))[0] is Outcome.ACCEPTED
    assert reporting.wake_during(2) is Outcome.FAILED
    reporting.wakeup.stop()
    assert reporting.delivery.deliver(reporting.report(3))[0] is Outcome.FAILED
    reporting.delivery.farewell(reporting.report(4, final=True))
    assert (reporting.numbers(), reporting.second.reports) == ([*range(accepted), 2, 4], [])
