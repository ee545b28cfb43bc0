"""The HTTP protocol of each connection: uvicorn's on httptools, with the limits that uvicorn does not have.

uvicorn waits for ever for a request that never ends, takes headers of any size and any number of connections, and
leaves a client that does not read its answer alone. Here each of these has an end. The protocol also asks the kernel
who is at the other end of a unix socket, and puts the answer into the request's state as `peer_credentials`.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gpumem_exporter.server.http.problems import problem_response
from gpumem_exporter.server.security.access_rules import PeerCredentials

__all__ = ["GuardedProtocol", "Limits"]

_CREDENTIALS = struct.Struct("3i")
"""`struct ucred` of unix(7): pid, uid, gid."""

_IDLE_SECONDS = 1.0
"""A connection that has been idle for so long makes room for a new one when there is none left."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one client may ask of the server."""

    max_connections: int
    """Beyond it the longest idle one is closed for a new one; where none is idle, the new one is answered 503."""
    head_bytes: int = 64 << 10
    """Request line and headers."""
    request_seconds: float = 10.0
    """For a whole request, headers and body, to come in."""
    unread_seconds: float = 30.0
    """For a client to read what it was sent."""


class GuardedProtocol(HttpToolsProtocol):
    """One connection. For the event loop.

    Args:
        limits: what its client may ask.
        *arguments: uvicorn's.
        **keywords: uvicorn's.
    """

    def __init__(self, *arguments: Any, limits: Limits, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._limits = limits
        self._credentials: PeerCredentials | None = None
        self._request_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None
        self._in_head = True
        self._head_received = 0
        self._head_length = 0
        self._one_too_many = False
        self.idle_since: float | None = None

    # The connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin: who is it, and is there room."""
        super().connection_made(transport)
        self._credentials = _peer_credentials(transport)
        self.idle_since = time.monotonic()
        if len(self.connections) > self._limits.max_connections and not self._make_room():
            self._one_too_many = True
        self._start_request_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """End: leave no timer behind."""
        self._stop_request_timer()
        self._stop_unread_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes, within the limits of a request's head."""
        if self.transport.is_closing():
            return
        self.idle_since = None
        if self._in_head:
            self._head_received += len(data)
        super().data_received(data)
        if self._in_head and self._head_received > self._limits.head_bytes and not self.transport.is_closing():
            # The parser keeps an unfinished header to itself, so what came in is counted as well.
            self._break_off(431, f"the headers are longer than {self._limits.head_bytes} bytes")

    def pause_writing(self) -> None:
        """The client does not read as fast as it is written to."""
        super().pause_writing()
        if self._unread_timer is None:
            self._unread_timer = self.loop.call_later(self._limits.unread_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """It has read."""
        self._stop_unread_timer()
        super().resume_writing()

    # The request, as the parser tells it

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self.scope["state"]["peer_credentials"] = self._credentials
        self._in_head = True
        self._head_length = 0
        self._start_request_timer()

    def on_url(self, url: bytes) -> None:
        """Part of its URL."""
        self._head_length += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header."""
        self._head_length += len(name) + len(value) + 4
        if self._head_length <= self._limits.head_bytes:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Its head is complete: it is answered from here on."""
        self._in_head = False
        self._head_received = 0
        app = self.app
        if self._one_too_many:
            self.app = _refusal(503, "too many connections are open", {"Retry-After": "1"})
        elif self._head_length > self._limits.head_bytes:
            self.app = _refusal(431, f"the headers are longer than {self._limits.head_bytes} bytes", {})
        try:
            super().on_headers_complete()
        finally:
            self.app = app

    def on_message_complete(self) -> None:
        """Its body is complete."""
        self._in_head = True
        self._stop_request_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """It is answered."""
        super().on_response_complete()
        self.idle_since = time.monotonic()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - uvicorn's signature
        """It is not HTTP."""
        self._break_off(400, "this is not an HTTP request")

    # The limits

    def _start_request_timer(self) -> None:
        if self._request_timer is None:
            self._request_timer = self.loop.call_later(self._limits.request_seconds, self._request_late)

    def _stop_request_timer(self) -> None:
        if self._request_timer is not None:
            self._request_timer.cancel()
            self._request_timer = None

    def _stop_unread_timer(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def _request_late(self) -> None:
        self._request_timer = None
        if self.transport.is_closing():
            return
        answered = self.cycle is not None and self.cycle.response_complete and not self._in_head
        silent = self._in_head and self._head_received == 0
        if answered or silent:
            self.transport.close()
        else:
            self._break_off(408, f"the request did not come in within {self._limits.request_seconds:g} seconds")

    def _break_off(self, status: int, detail: str) -> None:
        """Say what is wrong, where nothing else is being said, and close the connection."""
        busy = self.cycle is not None and not self.cycle.response_complete
        if not busy or not (self._in_head or self.cycle.response_started):
            response = problem_response(status, detail, headers={"Connection": "close"})
            head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n".encode()
            headers = b"".join(name + b": " + value + b"\r\n" for name, value in response.raw_headers)
            self.transport.write(head + headers + b"\r\n" + bytes(response.body))
        if busy:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()

    def _make_room(self) -> bool:
        now = time.monotonic()
        idle = [
            (connection.idle_since, id(connection), connection)
            for connection in self.connections
            if isinstance(connection, GuardedProtocol)
            and connection is not self
            and connection.idle_since is not None
            and now - connection.idle_since >= _IDLE_SECONDS
        ]
        if not idle:
            return False
        *_, longest = min(idle)
        longest.transport.abort()
        return True


def _refusal(status: int, detail: str, headers: dict[str, str]) -> ASGIApp:
    response = problem_response(status, detail, headers={"Connection": "close", **headers})

    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        await response(scope, receive, send)

    return refuse


def _peer_credentials(transport: asyncio.Transport) -> PeerCredentials | None:
    """SO_PEERCRED of a unix connection: who was at the other end when it was made, in this process' namespaces."""
    sock: socket.socket | None = transport.get_extra_info("socket")
    if sock is None or sock.family != socket.AF_UNIX:
        return None
    return PeerCredentials(
        *_CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    )
