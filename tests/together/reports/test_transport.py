"""The HTTP client against real sockets that answer correctly, incorrectly or not at all."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpumem_client.wire.errors import ExporterUnreachableError
from gpumem_client.wire.http import Connection
from tests.support.scripted_peer import Talk, scripted_peer
from tests.support.waiting import patient

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
        b"HTTP/1.1 999999\r\n\r\n",
        b"\x00" * 100,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 20_000 + b"\r\n",
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


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2;x=y\r\nde\r\n0\r\n\r\n"


@pytest.mark.parametrize(
    ("method", "answer", "body"),
    [
        ("HEAD", b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n", b""),
        ("GET", b"HTTP/1.1 204 No Content\r\n\r\n", b""),
        ("GET", CHUNKED, b"abcde"),
    ],
)
def test_the_end_of_a_response_is_found_without_its_length(method: str, answer: bytes, body: bytes) -> None:
    with connected(answering(answer)) as connection:
        assert [connection.request(method, "/").body for _ in range(2)] == [body] * 2
