"""The server: uvicorn with connections counted by owner, TLS on the TCP sockets only, and limits of each client.

This module uses names that uvicorn does not document: the class `HttpToolsProtocol`, its callback
`on_headers_complete` and its attributes `scope`, `headers` and `pipeline`, and the methods `main_loop` and `on_tick` of
the server. A contract test fails with a uvicorn that lacks one. Without them, every request fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gpumem_exporter.edge.connections import Connection, Connections, Exchange, Limits
from gpumem_exporter.edge.fair_queue import FairRequests, Turns
from gpumem_exporter.edge.peer import Peer
from gpumem_exporter.edge.problems import ProblemError

# The time between two searches for connections whose time is over, and between two values of the header Date.
_TICK_SECONDS = 1.0
# The time for a client to confirm the end of a TLS connection.
_SHUTDOWN_SECONDS = 1.0
# The most bytes that are read of a connection at a time. uvicorn reads until it has 64 KiB of a body.
_READ_BYTES = 32 << 10
# The unsent bytes of a connection from which on its replies wait.
_WRITE_BYTES = 32 << 10
# The kernel's buffer of a connection with TLS. uvloop keeps a buffer as large as the longest read, up to 256 KiB.
_TLS_RECEIVE_BYTES = 16 << 10

_log = logging.getLogger(__name__)


class LimitedServer(uvicorn.Server):
    """uvicorn with limits for everything that clients can make it keep.

    `tls` returns the context for a new TCP connection, None without TLS. The unix socket never uses TLS. Every reply
    has the `configured_headers`, in place of other headers with the same name, and the `headers`.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        limits: Limits,
        tls: Callable[[], ssl.SSLContext | None] = lambda: None,
        on_started: Callable[[], None],
        on_stopping: Callable[[], None] = lambda: None,
        headers: Mapping[str, str] = MappingProxyType({}),
        configured_headers: Mapping[str, str] = MappingProxyType({}),
        **options: Any,
    ) -> None:
        self.connections = Connections(limits)
        self.tls = tls
        self._on_started = on_started
        self._on_stopping = on_stopping
        self._should_exit = False
        self._wake: Callable[[], object] = lambda: None
        self.handshakes = Turns(limits.handshakes, running_of_owner=max(1, limits.handshakes // 4))
        # Of all connections: what was read is parsed at once.
        self.read_buffer = memoryview(bytearray(_READ_BYTES))
        options |= {"interface": "asgi3", "loop": "uvloop", "ws": "none", "lifespan": "on", "log_config": None}
        options |= dict.fromkeys(("access_log", "proxy_headers", "server_header"), False)
        # uvicorn calls it with the arguments of its own protocol.
        options["http"] = lambda **given: Client(self, _Requests(**given))
        options["timeout_keep_alive"] = int(limits.idle_seconds)
        options["headers"] = list({**headers, **configured_headers}.items())
        super().__init__(uvicorn.Config(FairRequests(app, self.connections, configured_headers), **options))

    @property
    def should_exit(self) -> bool:
        """Whether the server is to exit. Any thread, and uvicorn's handler of signals, may set it."""
        return self._should_exit

    @should_exit.setter
    def should_exit(self, value: bool) -> None:
        self._should_exit = value
        self._wake()

    def stop(self) -> None:
        """Let the server exit. Any thread may call this."""
        self.should_exit = True

    def run_until_signal(self, sockets: Sequence[socket.socket]) -> int:
        """Run until SIGTERM or SIGINT, and return 0; 1 if the application fails to start. In a thread, handle none."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                # uvicorn handles both while it runs, then restores these handlers and raises the signals again.
                signal.signal(number, lambda *_: self.stop())
        with contextlib.suppress(SystemExit):
            self.run(sockets=list(sockets))
        return 0 if self.started else 1  # the log has the reason

    async def main_loop(self) -> None:
        """Call `on_started`, run until the server is to exit, and end the requests that wait."""
        loop, exits = asyncio.get_running_loop(), asyncio.Event()
        self._wake = partial(loop.call_soon_threadsafe, exits.set)
        self._on_started()
        # uvicorn's own loop wakes ten times a second, which takes a third of the CPU of an exporter at rest.
        while not await self.on_tick(0):  # renews the header Date
            loop.call_soon(self.connections.end_late)  # apart, so that an error does not end the server
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(exits.wait(), _TICK_SECONDS)
        self._wake = lambda: None
        # uvicorn waits for all requests to end, and a held one may take a whole report interval.
        self._on_stopping()


class _Requests(HttpToolsProtocol):
    """uvicorn's protocol. Each request has an `Exchange`."""

    connection: Connection

    def on_headers_complete(self) -> None:
        """Start the request. An error ends the connection."""
        if len(self.pipeline) >= self.connection.limits.pipelined_requests:
            raise OverflowError("too many requests wait for an earlier one")
        self.connection.start_request(int(dict(self.headers).get(b"content-length", b"0")))
        self.scope["state"]["exchange"] = Exchange(self.connection, self.connection.peer)
        super().on_headers_complete()


class Client(asyncio.BufferedProtocol):
    """One connection: counts it, opens it with TLS or without, and passes on what it receives in small parts."""

    def __init__(self, server: LimitedServer, requests: _Requests, counted: Connection | None = None) -> None:
        self._server = server
        self._requests = requests
        self._counted = counted

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count a new connection. Start TLS, or start to read requests."""
        if self._counted is None:
            self._counted = self._count(transport)
        if (connection := self._counted) is not None:
            self._requests.connection = connection
            connection.abort, connection.close = transport.abort, transport.close
            transport.set_write_buffer_limits(high=_WRITE_BYTES)
            self._requests.connection_made(transport)

    def _count(self, transport: asyncio.Transport) -> Connection | None:
        """Return a new connection; None if there is no room for it, or if another client opens it with TLS."""
        sock = transport.get_extra_info("socket")
        connection = Connection(Peer.of_socket(sock), self._server.connections.limits)
        context = None if sock.family == socket.AF_UNIX else self._server.tls()
        # The accepted socket for TLS: `start_tls` would lose what the client has sent already.
        accepted = None if context is None else socket.socket(fileno=os.dup(sock.fileno()))
        if not self._server.connections.admit(connection):
            transport.abort()
            if accepted is not None:
                accepted.close()
            return None
        _log.debug("connection of %s", connection.owner)
        if context is None or accepted is None:
            return connection
        transport.abort()
        connection.abort = asyncio.ensure_future(self._open_with_tls(accepted, context, connection)).cancel
        return None

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection, unless it was not counted or is opened with TLS."""
        if self._counted is not None:
            self._server.connections.remove(self._counted)
            self._requests.connection_lost(exc)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - asyncio's signature
        """Return where to put what is read."""
        return self._server.read_buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Parse what was read, within the limit of a request's head."""
        self._requests.data_received(bytes(self._server.read_buffer[:nbytes]))
        self._requests.connection.receive(nbytes)

    def pause_writing(self) -> None:
        """Let replies wait for the client."""
        self._requests.pause_writing()

    def resume_writing(self) -> None:
        """Go on with replies."""
        self._requests.resume_writing()

    async def _open_with_tls(self, sock: socket.socket, context: ssl.SSLContext, connection: Connection) -> None:
        """Do the handshake. It ends with the connection of another client."""
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _TLS_RECEIVE_BYTES)
        try:
            # A connection that waits for its turn has a file, but not the buffers of TLS, which take 200 KiB.
            async with self._server.handshakes.of(connection.owner):
                await asyncio.get_running_loop().connect_accepted_socket(
                    lambda: Client(self._server, self._requests, connection),
                    sock,
                    ssl=context,
                    ssl_handshake_timeout=connection.limits.handshake_seconds,
                    ssl_shutdown_timeout=_SHUTDOWN_SECONDS,
                )
        except BaseException as error:
            _log.debug("connection of %s not opened: %r", connection.owner, error)
            self._server.connections.remove(connection)
            sock.close()
            if not isinstance(error, (OSError, ProblemError, asyncio.CancelledError)):
                raise
