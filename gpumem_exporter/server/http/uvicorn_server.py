"""uvicorn with limits that it lacks, peer credentials, and TLS on the TCP sockets only.

This module is the only one that relies on names which uvicorn does not document. It supports the versions of
`SUPPORTED_UVICORN`; a unit test fails if the range differs from pyproject.toml's or a name is missing. To allow a newer
uvicorn, run that test and the tests of limits and TLS with it.

uvicorn waits forever for a request that never ends, accepts headers of any size and any number of connections, and
keeps a client that does not read its reply. `LimitedProtocol` sets a limit for each. It also identifies the process at
the other end, and passes it on as `peer` in the request's state.
"""

from __future__ import annotations

import asyncio
import functools
import socket
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gpumem_exporter.server.http.problems import problem_response
from gpumem_exporter.server.security.peer import Peer

__all__ = ["SUPPORTED_UVICORN", "Bodies", "LimitedProtocol", "LimitedServer", "Limits"]

SUPPORTED_UVICORN = ">=0.32,<0.55"

TLS_SHUTDOWN_SECONDS = 1.0
"""The time for a client to confirm the end of a connection."""

_IDLE_SECONDS = 1.0
"""A connection that has been idle for this long can be closed to make room for a new one."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one client."""

    max_connections: int
    """Beyond this number, the longest idle connection is closed. If none is idle, the new one is answered with 503."""
    pipelined_requests: int = 8
    """The number of requests that may wait for an earlier one; with more, the connection is closed."""
    bodies_bytes: int = 32 << 20
    """The size of all bodies of unanswered requests together. Beyond it, the connection with most of them is closed."""
    head_bytes: int = 64 << 10
    """The size of request line and headers."""
    request_seconds: float = 10.0
    """The time until a whole request has arrived, headers and body."""
    unread_seconds: float = 30.0
    """The time until a client reads its reply."""


@dataclass(slots=True)
class Bodies:
    """The bodies of the unanswered requests of all connections."""

    total_bytes: int = 0


class LimitedServer(uvicorn.Server):
    """uvicorn with `LimitedProtocol`.

    Args:
        app: the ASGI application.
        limits: the limits of each client.
        tls: the TLS context of the TCP sockets; the unix socket never uses TLS.
        admits: returns whether a client with this verified certificate, as `getpeercert()` returns it, is admitted.
        on_started: called when requests are answered.
        on_stopping: called before the server waits for running requests.
        **options: the options of `uvicorn.Config`.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        limits: Limits,
        tls: ssl.SSLContext | None,
        admits: Callable[[Mapping[str, Any]], bool] | None = None,
        on_started: Callable[[], None],
        on_stopping: Callable[[], None],
        **options: Any,
    ) -> None:
        protocol: Any = functools.partial(LimitedProtocol, limits=limits, bodies=Bodies(), admits=admits)
        super().__init__(uvicorn.Config(app, http=protocol, ws="none", lifespan="on", log_config=None, **options))
        self._limits = limits
        self._tls = tls
        self._on_started = on_started
        self._on_stopping = on_stopping

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application and listen. uvicorn supports TLS for all sockets or for none."""
        if self._tls is None:
            await super().startup(sockets)
        else:
            await super().startup([])
            self.servers += await self._listen(sockets or [], self._tls)
        if self.started:
            self._on_started()

    async def _listen(self, sockets: Sequence[socket.socket], tls: ssl.SSLContext) -> list[asyncio.Server]:
        loop = asyncio.get_running_loop()
        protocol_class: Any = self.config.http_protocol_class
        protocol = functools.partial(
            protocol_class, config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        limits = {"ssl_handshake_timeout": self._limits.request_seconds, "ssl_shutdown_timeout": TLS_SHUTDOWN_SECONDS}
        servers = []
        for sock in sockets:
            options: dict[str, Any] = {} if sock.family == socket.AF_UNIX else {"ssl": tls, **limits}
            servers.append(await loop.create_server(protocol, sock=sock, backlog=self.config.backlog, **options))
        return servers

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop: first end the requests that wait."""
        self._on_stopping()
        await super().shutdown(sockets)


class LimitedProtocol(HttpToolsProtocol):
    """One connection. Used on the event loop only.

    Args:
        limits: the limits of its client.
        bodies: the bodies of all connections.
        admits: returns whether a client with this verified certificate is admitted.
        *arguments: uvicorn's arguments.
        **keywords: uvicorn's keyword arguments.
    """

    def __init__(
        self,
        *arguments: Any,
        limits: Limits,
        bodies: Bodies,
        admits: Callable[[Mapping[str, Any]], bool] | None = None,
        **keywords: Any,
    ) -> None:
        super().__init__(*arguments, **keywords)
        self._admits = admits
        self._limits = limits
        self._bodies = bodies
        self.body_bytes = 0
        self._peer = Peer()
        self._request_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None
        self._in_head = True
        self._head_received = 0
        self._head_length = 0
        self._over_limit = False
        self.idle_since: float | None = None

    # The connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Identify the peer, make room if there are too many connections, and close those that are not admitted."""
        super().connection_made(transport)
        self._peer = Peer.of_socket(transport.get_extra_info("socket"))
        self.idle_since = time.monotonic()
        self._over_limit = not self.make_room()
        self._start_request_timer()
        certificate = transport.get_extra_info("peercert")
        if certificate and self._admits is not None and not self._admits(certificate):
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers and free the bodies."""
        self._free_bodies()
        self._stop_request_timer()
        self._stop_unread_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Pass the bytes to the parser, within the limit of a request's head."""
        if self.transport.is_closing():
            return
        self.idle_since = None
        if self._in_head:
            self._head_received += len(data)
        super().data_received(data)
        # The parser buffers an unfinished header, so the received bytes count as well.
        if self._in_head and self._head_received > self._limits.head_bytes and not self.transport.is_closing():
            self._reject(431, self._head_too_long())

    def pause_writing(self) -> None:
        """Start the timer of a client that reads slowly."""
        super().pause_writing()
        if self._unread_timer is None:
            self._unread_timer = self.loop.call_later(self._limits.unread_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop the timer: the client has read."""
        self._stop_unread_timer()
        super().resume_writing()

    # The parser's callbacks, in the order of a request

    def on_message_begin(self) -> None:
        """Start a request."""
        super().on_message_begin()
        self.scope["state"]["peer"] = self._peer
        self._in_head = True
        self._head_length = 0
        self._start_request_timer()

    def on_url(self, url: bytes) -> None:
        """Count a part of the URL."""
        self._head_length += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header; drop it beyond the limit."""
        self._head_length += len(name) + len(value) + 4
        if self._head_length <= self._limits.head_bytes:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the application, or refuse the request.

        Raises:
            RuntimeError: too many requests wait; the parser then stops, and the connection is closed.
        """
        if len(self.pipeline) >= self._limits.pipelined_requests:
            raise RuntimeError("too many requests wait")
        self._in_head = False
        self._head_received = 0
        app = self.app
        if self._over_limit:
            self.app = _refusal(503, "too many connections are open", {"Retry-After": "1"})
        elif self._head_length > self._limits.head_bytes:
            self.app = _refusal(431, self._head_too_long(), {})
        try:
            super().on_headers_complete()
        finally:
            self.app = app

    def on_body(self, body: bytes) -> None:
        """Take a part of a body, and make room if the bodies of all connections are too long."""
        if self.transport.is_closing():
            return
        if not self.cycle.response_complete:
            self.body_bytes += len(body)
            self._bodies.total_bytes += len(body)
        super().on_body(body)
        if self._bodies.total_bytes > self._limits.bodies_bytes:
            connections = (each for each in self.connections if isinstance(each, LimitedProtocol))
            max(connections, key=lambda connection: connection.body_bytes).reject_bodies()

    def on_message_complete(self) -> None:
        """Stop the timer: the whole request has arrived."""
        self._in_head = True
        self._stop_request_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Mark the connection as idle."""
        if not self.pipeline:
            self._free_bodies()
        super().on_response_complete()
        self.idle_since = time.monotonic()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - uvicorn's signature
        """Answer bytes that are not HTTP."""
        self._reject(400, "this is not an HTTP request")

    # The limits

    def _head_too_long(self) -> str:
        return f"the headers are longer than {self._limits.head_bytes} bytes"

    def _start_request_timer(self) -> None:
        if self._request_timer is None:
            self._request_timer = self.loop.call_later(self._limits.request_seconds, self._request_timed_out)

    def _stop_request_timer(self) -> None:
        if self._request_timer is not None:
            self._request_timer.cancel()
            self._request_timer = None

    def _stop_unread_timer(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def _request_timed_out(self) -> None:
        self._request_timer = None
        if self.transport.is_closing():
            return
        answered = self.cycle is not None and self.cycle.response_complete and not self._in_head
        silent = self._in_head and self._head_received == 0
        if answered or silent:
            self.transport.close()
        else:
            self._reject(408, f"the request did not arrive within {self._limits.request_seconds:g} seconds")

    def _free_bodies(self) -> None:
        self._bodies.total_bytes -= self.body_bytes
        self.body_bytes = 0

    def reject_bodies(self) -> None:
        """Free the received bodies at once: other connections may receive more before this one's task runs."""
        for cycle in (self.cycle, *(waiting for waiting, _ in self.pipeline)):
            cycle.body = bytearray()
        self._free_bodies()
        self._reject(503, "too many bodies are being received", {"Retry-After": "1"})

    def _reject(self, status: int, detail: str, added: Mapping[str, str] | None = None) -> None:
        """Send a problem, unless a reply has started or is due to an earlier request, and close the connection."""
        busy = self.cycle is not None and not self.cycle.response_complete
        if not busy or not (self._in_head or self.cycle.response_started or self.pipeline):
            response = problem_response(status, detail, headers={"Connection": "close", **(added or {})})
            head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n".encode()
            headers = b"".join(name + b": " + value + b"\r\n" for name, value in response.raw_headers)
            self.transport.write(head + headers + b"\r\n" + bytes(response.body))
        if busy:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()

    def make_room(self) -> bool:
        """Close the connection that has been idle for the longest time, if there are too many.

        Returns:
            Whether this connection is within the limit now.
        """
        if len(self.connections) <= self._limits.max_connections:
            return True
        now = time.monotonic()
        idle = [
            (connection.idle_since, id(connection), connection)
            for connection in self.connections
            if isinstance(connection, LimitedProtocol)
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
