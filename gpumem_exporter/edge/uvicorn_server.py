"""The server: uvicorn with counted connections, TLS on the TCP sockets only, and limits of each client."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from gpumem_exporter.edge.connections import Connection, Limits, Owner, owner_of
from gpumem_exporter.edge.fair_queue import FairRequests, Turns
from gpumem_exporter.edge.peer import Peer
from gpumem_exporter.edge.problems import ProblemError
from gpumem_exporter.edge.protocol import Clients, LimitedProtocol

# The number of connections that are accepted before other work of the event loop runs.
_BATCH = 32
# The time without files or memory for new connections until the next attempt; asyncio would pause for a second.
_PAUSE_SECONDS = 0.05
_USED_UP = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_TICK_SECONDS = 1.0
# The time for a client to confirm the end of a TLS connection.
_SHUTDOWN_SECONDS = 1.0

# The kernel's buffer of a connection with TLS. uvloop keeps a buffer as large as the longest read, up to 256 KiB.
_TLS_RECEIVE_BYTES = 16 << 10

_log = logging.getLogger(__name__)


class LimitedServer(uvicorn.Server):
    """uvicorn with `LimitedProtocol`. The unix socket never uses TLS."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        limits: Limits,
        tls: ssl.SSLContext | None,
        on_started: Callable[[], None],
        on_stopping: Callable[[], None] = lambda: None,
        **options: Any,
    ) -> None:
        self._clients = Clients(limits)
        self._tls = tls
        self._on_started = on_started
        self._on_stopping = on_stopping
        # While the server runs.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._exiting = asyncio.Event()
        app = FairRequests(app, limits, self._clients.unread)
        protocol: Any = LimitedProtocol
        options |= {"http": protocol, "loop": "uvloop", "ws": "none", "lifespan": "on", "log_config": None}
        options |= dict.fromkeys(("access_log", "proxy_headers", "server_header"), False)
        super().__init__(uvicorn.Config(app, **options))

    def stop(self) -> None:
        """Let the server exit. Any thread, and a signal handler, may call this."""
        self.should_exit = True
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # another thread has closed the loop: the server has stopped
                loop.call_soon_threadsafe(self._exiting.set)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal to exit."""
        super().handle_exit(sig, frame)
        self.stop()

    async def main_loop(self) -> None:
        """Run until the server is to exit."""
        self._loop = asyncio.get_running_loop()
        # uvicorn looks ten times a second whether to exit, which takes a third of the CPU of an exporter at rest.
        while not await self.on_tick(0):  # sets the Date header, which has seconds
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._exiting.wait(), _TICK_SECONDS)
        self._loop = None

    def run_until_signal(self, sockets: Sequence[socket.socket]) -> int:
        """Run until SIGTERM or SIGINT, and return 0; 1 if the application fails to start. In a thread, handle none."""

        def stop(*_: object) -> None:
            self.should_exit = True

        # uvicorn handles both signals while it runs, then restores these handlers and raises the signals again.
        in_main_thread = threading.current_thread() is threading.main_thread()
        numbers = (signal.SIGTERM, signal.SIGINT) if in_main_thread else ()
        before = {number: signal.signal(number, stop) for number in numbers}
        try:
            self.run(sockets=list(sockets))
        except SystemExit:
            return 1  # the log has the reason
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        return 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application, accept connections, and call `on_started`."""
        # Without sockets: asyncio would count a connection only when its handshake has ended, and stop accepting for a
        # second when the files are used up.
        await super().startup([])
        limits = self._clients.limits
        handshakes = Turns(limits.handshakes, running_of_owner=max(1, limits.handshakes // 4))
        for sock in sockets or ():
            tls = None if sock.family == socket.AF_UNIX else self._tls
            acceptor: Any = Acceptor(sock, self._clients, self._protocol, tls, handshakes)
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
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop: first end the requests that wait."""
        # uvicorn waits for all requests to end, and a held one may take a whole report interval.
        self._on_stopping()
        await super().shutdown(sockets)


class Acceptor:
    """Accepts the connections of one listening socket. Used on the event loop only; the caller closes the socket."""

    def __init__(
        self,
        sock: socket.socket,
        clients: Clients,
        protocol: Callable[[Connection], asyncio.Protocol],
        tls: ssl.SSLContext | None,
        handshakes: Turns,
    ) -> None:
        self._sock = sock
        self._connections = clients.connections
        self._limits = clients.limits
        self._protocol = protocol
        self._tls = tls
        self._handshakes = handshakes
        self._loop = asyncio.get_running_loop()
        self._connecting: set[asyncio.Task[None]] = set()
        self._resume: asyncio.TimerHandle | None = None
        self._logged = False
        sock.setblocking(False)
        if tls is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _TLS_RECEIVE_BYTES)
        self._start()

    def close(self) -> None:
        """Accept no more connections, and end connections whose handshake has not ended."""
        self._loop.remove_reader(self._sock.fileno())
        if self._resume is not None:
            self._resume.cancel()
        for task in self._connecting:
            task.cancel()

    async def wait_closed(self) -> None:
        """Wait until no handshake runs."""
        if self._connecting:
            await asyncio.wait(tuple(self._connecting))

    def _start(self) -> None:
        self._loop.add_reader(self._sock.fileno(), self._accept)

    def _accept(self) -> None:
        for _ in range(_BATCH):
            try:
                sock, _ = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _USED_UP:
                    raise
                self._make_room(error)
                return
            self._open(sock)

    def _make_room(self, error: OSError) -> None:
        """Close a connection, and accept again when its file is free."""
        # Connections that wait in the kernel's queue keep the socket readable: without a pause the loop would spin.
        self._connections.close_one()
        if not self._logged:
            self._logged = True
            _log.warning("connections are closed for new ones", extra={"fields": {"error": error.strerror}})
        self._loop.remove_reader(self._sock.fileno())
        self._resume = self._loop.call_later(_PAUSE_SECONDS, self._start)

    def _open(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        peer = Peer.of_socket(sock)
        connection = Connection(peer, owner_of(peer))
        if not self._connections.admit(connection):
            sock.close()
            return
        _log.debug("connection of %s", connection.owner)
        task = self._loop.create_task(self._connect(sock, connection))
        connection.close = task.cancel
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect(self, sock: socket.socket, connection: Connection) -> None:
        """Hand a connection to its protocol, which changes `connection.close`."""

        def protocol() -> asyncio.Protocol:
            return self._protocol(connection)

        try:
            if self._tls is None:
                await self._loop.connect_accepted_socket(protocol, sock)
            else:
                handshake = self._do_handshake(self._tls, protocol, sock, connection.owner)
                await asyncio.wait_for(handshake, self._limits.handshake_seconds)
        except BaseException as error:
            _log.debug("connection of %s not opened: %r", connection.owner, error)
            self._connections.remove(connection)
            sock.close()
            if not isinstance(error, (OSError, ProblemError, asyncio.TimeoutError, asyncio.CancelledError)):
                raise

    async def _do_handshake(
        self, tls: ssl.SSLContext, protocol: Callable[[], asyncio.Protocol], sock: socket.socket, owner: Owner
    ) -> None:
        # A connection that waits for its turn has a file, but none of the buffers of TLS.
        async with self._handshakes.of(owner):
            await self._loop.connect_accepted_socket(
                protocol,
                sock,
                ssl=tls,
                ssl_handshake_timeout=self._limits.handshake_seconds,
                ssl_shutdown_timeout=_SHUTDOWN_SECONDS,
            )
