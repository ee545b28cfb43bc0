from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from gpumem_exporter.edge.connections import Limits
from tests.support.builders.builders import UUIDS, report, sample
from tests.support.servers.running_exporter import RunningExporter, read_answer, running_exporter
from tests.support.waiting import eventually, patient

LIMITS = Limits(max_connections=16, request_seconds=0.4, unread_seconds=0.4)
POST = b"POST /api/v1/reports HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
GET = b"GET /-/healthy HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def exporter() -> Iterator[RunningExporter]:
    with running_exporter(limits=LIMITS) as running:
        yield running


def connect(exporter: RunningExporter) -> socket.socket:
    return socket.create_connection(("127.0.0.1", exporter.port), timeout=patient(30))


def read_to_the_end(sock: socket.socket) -> bytes:
    received = b""
    try:
        while piece := sock.recv(65536):
            received += piece
    except ConnectionResetError:
        pass
    return received


def test_a_connection_without_a_request_is_closed(exporter: RunningExporter) -> None:
    started = time.monotonic()
    with connect(exporter) as sock:
        assert read_to_the_end(sock) == b""
    assert time.monotonic() - started > 0.3


@pytest.mark.parametrize(
    "head",
    [
        b"GET /metrics?",
        b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nX-Long: ",
        POST + b"Content-Length: 1000000\r\n\r\n{",
    ],
)
def test_a_slow_request_is_cut_off(exporter: RunningExporter, head: bytes) -> None:
    with connect(exporter) as sock:
        sock.sendall(head)
        sock.settimeout(0.05)
        started = time.monotonic()
        while time.monotonic() - started < patient(30):
            try:
                sock.sendall(b"x")
                assert sock.recv(65536) == b""
            except TimeoutError:
                continue
            except (ConnectionResetError, BrokenPipeError):
                pass
            return
    pytest.fail("the connection is still open")


def test_a_request_that_waits_for_a_command_has_no_timeout(exporter: RunningExporter) -> None:
    started = time.monotonic()
    answer = exporter.report(report(1, devices=(sample(),), hold_seconds=300.0))
    assert answer.status == 200
    assert time.monotonic() - started >= 1.0 > LIMITS.request_seconds


def test_headers_within_the_limit_are_accepted(exporter: RunningExporter) -> None:
    with connect(exporter) as sock:
        sock.sendall(GET[:-2] + b"X-Long: " + b"x" * 60_000 + b"\r\n\r\n")
        assert read_answer(sock)[0] == 200


@pytest.mark.parametrize(
    "line", [b"X-Long: " + b"x" * 10_000_000, b"".join(b"X-%d: y\r\n" % i for i in range(1_000_000))]
)
def test_endless_headers_are_cut_off(exporter: RunningExporter, line: bytes) -> None:
    with connect(exporter) as sock:
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            sock.sendall(GET[:-2] + line)
        assert read_to_the_end(sock) == b""


@pytest.mark.parametrize(
    "garbage",
    [
        *(b"\x16\x03\x01\x02\x00\x01\x00", b"hello\r\n\r\n", b"\x00" * 100),
        *(
            POST + b"Content-Length: %b\r\n\r\n" % length
            for length in (b"x", b"-1", b"9" * 30, b"1\r\nContent-Length: 2")
        ),
    ],
)
def test_bytes_that_are_not_http_are_answered_with_400(exporter: RunningExporter, garbage: bytes) -> None:
    with connect(exporter) as sock:
        sock.sendall(garbage)
        answer = read_to_the_end(sock)
    assert answer.startswith(b"HTTP/1.1 400 ")


def test_pipelined_requests_beyond_the_limit_close_the_connection(exporter: RunningExporter) -> None:
    with connect(exporter) as sock:
        sock.sendall(GET * 2 + GET[:-2] + b"Connection: close\r\n\r\n")
        assert read_to_the_end(sock).count(b"HTTP/1.1 200") == 3
    with connect(exporter) as sock:
        sock.sendall(GET * 2000)
        assert read_to_the_end(sock).count(b"HTTP/1.1 200") <= 1 + LIMITS.pipelined_requests


def test_a_client_that_does_not_read_its_reply_is_disconnected() -> None:
    limits = Limits(max_connections=16, unread_seconds=0.4)
    with running_exporter(limits=limits, report_interval=3600, report_expiry=7200) as exporter:
        phases = {f"phase {number} {'x' * 100}": 1 for number in range(16)}
        devices = tuple(replace(sample(uuid), phase_peak_bytes=phases) for uuid in UUIDS[:2])
        for pid in range(1, 81):
            exporter.report(report(pid, devices=devices))
        assert len(exporter.get("/metrics").body) > 500_000
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.settimeout(patient(30))
            sock.connect(("127.0.0.1", exporter.port))
            sock.sendall(GET.replace(b"/-/healthy", b"/metrics") * 8)
            eventually(lambda: len(exporter.server.connections), lambda count: count == 1)
            eventually(lambda: len(exporter.server.connections), lambda count: count == 0)
            assert exporter.get("/-/healthy").status == 200
