"""uvicorn with limits that it lacks, peer credentials, and TLS on the TCP sockets only.

This module is the only one that relies on names which uvicorn does not document. It supports the versions of
`SUPPORTED_UVICORN`; a unit test fails if the range differs from pyproject.toml's or a name is missing. To allow a newer
uvicorn, run that test and the tests of limits and TLS with it.

uvicorn waits forever for a request that never ends, accepts headers of any size and any number of connections, keeps a
client that does not read its reply, and resets a connection whose client has not read its last reply. `LimitedProtocol`
sets a limit for each. It also passes on the process at the other end as `peer` in the request's state.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gpumem_exporter.server.http.acceptor import Acceptor, Tls
from gpumem_exporter.server.http.budgets import PIECE_BYTES, PacedReplies, RequestBodies, UnreadReplies
from gpumem_exporter.server.http.connections import Connection, Connections
from gpumem_exporter.server.http.problems import problem_response
from gpumem_exporter.server.http.reply_transport import ReplyTransport
from gpumem_exporter.server.http.turns import BodyTurns, ReadTurns, Turns

__all__ = ["SUPPORTED_UVICORN", "Clients", "LimitedProtocol", "LimitedServer", "Limits"]

SUPPORTED_UVICORN = ">=0.32,<0.55"

_BUFFER_BYTES = 32 << 10
"""The unread bytes of a connection from which on it counts, and gets no more until they are read."""
_TLS_BYTES = PIECE_BYTES + (64 << 10)
"""The unread bytes that a connection with TLS may have in addition: encrypted, and not visible here."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of clients."""

    max_connections: int
    """Half of them may be of one user or machine. See `Connections`."""
    pipelined_requests: int = 8
    """The number of requests that may wait for an earlier one; with more, the connection is closed."""
    bodies_bytes: int = 16 << 20
    """The size of all bodies of unanswered requests together. See `RequestBodies`."""
    unread_bytes: int = 24 << 20
    """The size of all replies that clients have not read. See `UnreadReplies`."""
    head_bytes: int = 64 << 10
    """The size of request line and headers."""
    request_seconds: float = 10.0
    """The time until a whole request has arrived, headers and body."""
    handshake_seconds: float = 3.0
    """The time for a TLS handshake, from accept."""
    unread_seconds: float = 30.0
    """The time until a client reads its reply."""
    handshakes: int = 64
    """The number of TLS handshakes at the same time; a quarter of them may be of one user or machine."""
    bodies: int = 16
    """The number of long bodies that are received at the same time; a quarter of them may be of one user or machine."""
    reads: int = 4
    """The number of documents of the API that are read at the same time, at most one by one user or machine."""


@dataclass(frozen=True, slots=True)
class Clients:
    """What all clients together have: connections, arriving bodies, unread replies."""

    connections: Connections
    bodies: RequestBodies
    unread: UnreadReplies

    @classmethod
    def within(cls, limits: Limits) -> Clients:
        """Return the state of no clients yet."""
        return cls(
            Connections(limits.max_connections), RequestBodies(limits.bodies_bytes), UnreadReplies(limits.unread_bytes)
        )


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
        self._limits = limits
        self._clients = Clients.within(limits)
        self._admits = admits
        self._tls = tls
        self._on_started = on_started
        self._on_stopping = on_stopping
        bodies = Turns(limits.bodies, running_of_owner=max(1, limits.bodies // 4))
        app = PacedReplies(BodyTurns(ReadTurns(app, Turns(limits.reads)), bodies), self._clients.unread)
        protocol: Any = LimitedProtocol
        super().__init__(uvicorn.Config(app, http=protocol, ws="none", lifespan="on", log_config=None, **options))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application and accept connections."""
        await super().startup([])
        tls = None
        if self._tls is not None:
            handshakes = Turns(self._limits.handshakes, running_of_owner=max(1, self._limits.handshakes // 4))
            tls = Tls(self._tls, self._limits.handshake_seconds, handshakes)
        for sock in sockets or ():
            of_socket = None if sock.family == socket.AF_UNIX else tls
            acceptor: Any = Acceptor(sock, self._clients.connections, self._protocol, of_socket)
            self.servers.append(acceptor)
        if self.started:
            self._on_started()

    def _protocol(self, connection: Connection) -> LimitedProtocol:
        return LimitedProtocol(
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
            connection=connection,
            clients=self._clients,
            limits=self._limits,
            admits=self._admits,
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop: first end the requests that wait."""
        self._on_stopping()
        await super().shutdown(sockets)


class LimitedProtocol(HttpToolsProtocol):
    """One connection. Used on the event loop only.

    Args:
        *arguments: uvicorn's arguments.
        connection: the accepted connection.
        clients: the state of all connections.
        limits: the limits of its client.
        admits: returns whether a client with this verified certificate is admitted.
        **keywords: uvicorn's keyword arguments.
    """

    transport: ReplyTransport

    def __init__(
        self,
        *arguments: Any,
        connection: Connection,
        clients: Clients,
        limits: Limits,
        admits: Callable[[Mapping[str, Any]], bool] | None = None,
        **keywords: Any,
    ) -> None:
        super().__init__(*arguments, **keywords)
        self._connection = connection
        self._connections = clients.connections
        self._bodies = clients.bodies
        self._unread = clients.unread
        self._limits = limits
        self._admits = admits
        self._tls_bytes = 0
        self._request_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None
        self._in_head = True
        self._head_received = 0
        self._head_length = 0

    # The connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer of the first request, and close connections that are not admitted."""
        transport.set_write_buffer_limits(high=_BUFFER_BYTES)
        super().connection_made(ReplyTransport(transport, self.loop, self._unfinished))
        self._connection.close = self.transport.abort
        if transport.get_extra_info("sslcontext") is not None:
            self._tls_bytes = _TLS_BYTES
            transport.set_read_buffer_limits(high=_BUFFER_BYTES)  # type: ignore[attr-defined]
        self._start_request_timer()
        certificate = transport.get_extra_info("peercert")
        if certificate and self._admits is not None and not self._admits(certificate):
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers and free what the connection had."""
        self._connections.remove(self._connection)
        self._bodies.free(self._connection)
        self._unread.forget(self._connection)
        self._stop_request_timer()
        self._stop_unread_timer()
        self.transport.stop()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Close the connection after the current reply, because the server stops."""
        if self.transport.is_closing():
            self.transport.close_now()
        else:
            super().shutdown()

    def data_received(self, data: bytes) -> None:
        """Pass the bytes to the parser, within the limit of a request's head."""
        if self.transport.reads_away(len(data)):
            return
        if self._in_head:
            self._head_received += len(data)
        super().data_received(data)
        # The parser buffers an unfinished header, so the received bytes count as well.
        if self._in_head and self._head_received > self._limits.head_bytes and not self.transport.is_closing():
            self._reject(431, self._head_too_long())

    def pause_writing(self) -> None:
        """Start the timer of a client that reads slowly, and count what it has not read."""
        super().pause_writing()
        if self._unread_timer is None:
            self._unread_timer = self.loop.call_later(self._limits.unread_seconds, self.transport.abort)
        self._unread.buffer(self._connection, self.transport.get_write_buffer_size() + self._tls_bytes)

    def resume_writing(self) -> None:
        """Stop the timer: the client has read."""
        self._stop_unread_timer()
        self._unread.buffer(self._connection, 0)
        super().resume_writing()

    # The parser's callbacks, in the order of a request

    def on_message_begin(self) -> None:
        """Start a request."""
        super().on_message_begin()
        self.scope["state"]["peer"] = self._connection.peer
        self.scope["state"]["connection"] = self._connection
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
        if self._connection.refused:
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
            self._bodies.add(self._connection, len(body), self._reject_bodies)
        if not self.transport.is_closing():
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Stop the timer: the whole request has arrived."""
        self._in_head = True
        self._stop_request_timer()
        if not self.cycle.response_complete:
            self._connections.work(self._connection)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Mark the connection as idle."""
        if not self.pipeline:
            self._bodies.free(self._connection)
            self._connections.wait(self._connection)
        super().on_response_complete()

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

    def _unfinished(self) -> bool:
        """Return whether the client may still send what has been answered already."""
        return not self._in_head or self._head_received > 0 or bool(self.pipeline)

    def _reject_bodies(self) -> None:
        """Free the received bodies at once: other connections may receive more before this one's task runs."""
        for cycle in (self.cycle, *(waiting for waiting, _ in self.pipeline)):
            cycle.body = bytearray()
        self._bodies.free(self._connection)
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
        self._connections.wait(self._connection)
        self.transport.close()


def _refusal(status: int, detail: str, headers: dict[str, str]) -> ASGIApp:
    response = problem_response(status, detail, headers={"Connection": "close", **headers})

    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        await response(scope, receive, send)

    return refuse
