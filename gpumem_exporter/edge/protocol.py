"""One connection: uvicorn's HTTP protocol with the limits that it lacks, and the budgets of all connections in bytes.

This module and `uvicorn_server` are the only ones that rely on names which uvicorn does not document. They support the
versions of `SUPPORTED_UVICORN`; a unit test fails if the range differs from pyproject.toml's or a name is missing. To
allow a newer uvicorn, run that test and the tests of limits and TLS with it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gpumem_exporter.edge.connections import PIECE_BYTES, Connection, Connections, Limits, Owner
from gpumem_exporter.edge.problems import problem_response

SUPPORTED_UVICORN = ">=0.32,<0.55"

READ_AWAY_SECONDS = 2.0
READ_AWAY_BYTES = 4 << 20
UNREAD_SECONDS = 30.0
"""The time for a client to read the end of its last reply, after which the connection is closed without it."""

# The unread bytes of a connection from which on it counts, and gets no more until they are read.
_BUFFER_BYTES = 32 << 10
# The unread bytes that a connection with TLS may have in addition: encrypted, and not visible here.
_TLS_BYTES = PIECE_BYTES + (64 << 10)
_HEAD, _END_OF_HEAD = b"HTTP/1.1 ", b"\r\n\r\n"

_log = logging.getLogger(__name__)


class Clients:
    """What all clients together have, and their limits."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.connections = Connections(limits.max_connections)
        self.bodies = RequestBodies(limits.bodies_bytes)
        self.unread = UnreadReplies(limits.unread_bytes)


class LimitedProtocol(HttpToolsProtocol):
    """One connection, with a limit for everything that its client can make the exporter keep. For the event loop only.

    The state of each request has its `connection`, the `owner` of that, and the process at the other end as `peer`.
    """

    transport: ReplyTransport  # type: ignore[assignment]

    def __init__(self, *arguments: Any, connection: Connection, clients: Clients, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._connection = connection
        self._clients = clients
        self._limits = clients.limits
        self._tls_bytes = 0
        self._request_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None
        self._in_head = True
        self._head_received = 0
        self._head_length = 0

    # The connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer of the first request."""
        # uvicorn waits for ever for a request that never ends: a client that sends nothing would keep its file.
        transport.set_write_buffer_limits(high=_BUFFER_BYTES)
        wrapped: Any = ReplyTransport(transport, self.loop, self._unfinished)
        super().connection_made(wrapped)
        self._connection.close = self.transport.abort
        self._connection.reject_bodies = self._reject_bodies
        if transport.get_extra_info("sslcontext") is not None:
            self._tls_bytes = _TLS_BYTES
            transport.set_read_buffer_limits(high=_BUFFER_BYTES)  # type: ignore[attr-defined]
        self._start_request_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers and free what the connection had."""
        self._clients.connections.remove(self._connection)
        self._clients.bodies.free(self._connection)
        self._clients.unread.forget(self._connection)
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
        self._clients.unread.buffer(self._connection, self.transport.get_write_buffer_size() + self._tls_bytes)

    def resume_writing(self) -> None:
        """Stop the timer: the client has read."""
        self._stop_unread_timer()
        self._clients.unread.buffer(self._connection, 0)
        super().resume_writing()

    # The parser's callbacks, in the order of a request

    def on_message_begin(self) -> None:
        """Start a request."""
        super().on_message_begin()
        self.scope["state"]["peer"] = self._connection.peer
        self.scope["state"]["owner"] = self._connection.owner
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
        """Start the application, or refuse the request: the parser stops at an error, and the connection is closed."""
        if len(self.pipeline) >= self._limits.pipelined_requests:
            raise RuntimeError("too many requests wait")
        if self._connection.refused:
            self._reject(503, "too many connections are open", {"Retry-After": "1"})
            raise RuntimeError("the connection is refused")
        if self._head_length > self._limits.head_bytes:
            self._reject(431, self._head_too_long())
            raise RuntimeError("the headers are too long")
        self._in_head = False
        self._head_received = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Take a part of a body, and make room if the bodies of all connections are too long."""
        if self.transport.is_closing():
            return
        if not self.cycle.response_complete:
            self._clients.bodies.add(self._connection, len(body))
        if not self.transport.is_closing():
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Stop the timer: the whole request has arrived."""
        self._in_head = True
        self._stop_request_timer()
        if not self.cycle.response_complete:
            self._connection.waiting_since_seconds = math.inf
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Mark the connection as idle."""
        if not self.pipeline:
            self._clients.bodies.free(self._connection)
            self._connection.waiting_since_seconds = time.monotonic()
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
        # A client that has its reply, or has sent nothing, would take a 408 for the reply to its next request.
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
        """Free the received bodies, and answer with 503."""
        # At once: other connections may receive more before this one's task runs.
        for cycle in (self.cycle, *(waiting for waiting, _ in self.pipeline)):
            cycle.body = bytearray()
        self._clients.bodies.free(self._connection)
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
        self._connection.waiting_since_seconds = time.monotonic()
        self.transport.close()


class ReplyTransport:
    """A transport that sends a reply in one packet, and whose `close()` lets the client read the reply first.

    It has the other methods of the transport that it wraps.
    """

    def __init__(
        self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, unfinished: Callable[[], bool]
    ) -> None:
        self._transport = transport
        self._loop = loop
        # Returns whether the client may still send, because the last request has not arrived completely.
        self._unfinished = unfinished
        self._left_bytes = READ_AWAY_BYTES
        # Runs while the transport reads away what arrives.
        self._timer: asyncio.TimerHandle | None = None
        # The head of a reply, which waits for the body until the event loop has nothing else to do.
        self._head = b""
        self._send_head: asyncio.Handle | None = None

    def close(self) -> None:
        """Close the connection, after its client had the time to read the reply."""
        if self.is_closing():
            return
        self._flush()
        if not self._unfinished():
            self._end()
            return
        # If a socket is closed while bytes are unread, the kernel sends a reset, and the client's kernel discards the
        # reply. So this direction ends first, and what else arrives is read, for a bounded time and amount. TLS has no
        # half of a connection that could be closed; there, the client closes it after the reply.
        self._timer = self._loop.call_later(READ_AWAY_SECONDS, self._end)
        self._transport.resume_reading()
        if self._transport.can_write_eof():
            self._transport.write_eof()

    def _end(self) -> None:
        """Close the connection once the client has read what was sent."""
        # A closing transport of uvloop waits for its buffer for ever: the connection would keep its file and its place.
        self._transport.close()
        if self._transport.get_write_buffer_size():
            self._timer = self._loop.call_later(UNREAD_SECONDS, self._transport.abort)

    def reads_away(self, size: int) -> bool:
        """Return whether received bytes are to be dropped, because the connection is being closed."""
        if self._timer is None:
            return self._transport.is_closing()
        self._left_bytes -= size
        if self._left_bytes < 0:
            self.close_now()
        return True

    def close_now(self) -> None:
        """Close the connection without waiting for the client."""
        self.stop()
        self._transport.close()

    def stop(self) -> None:
        """Stop the timer: the connection has ended."""
        if self._timer is not None:
            self._timer.cancel()

    def is_closing(self) -> bool:
        """Return whether `close()` has been called."""
        return self._timer is not None or self._transport.is_closing()

    def write(self, data: Any) -> None:
        """Write; nothing is written after `close()` or `abort()`."""
        if self.is_closing():  # uvloop would raise
            return
        # uvicorn writes head and body of a reply one after the other, and uvloop sends each at once: the client would
        # wake up twice. Here, the head waits for the body.
        if self._send_head is not None:
            self._send_head.cancel()
            self._send_head, data = None, self._head + data
        elif data.startswith(_HEAD) and data.endswith(_END_OF_HEAD):
            self._head = data
            self._send_head = self._loop.call_soon(self._flush)
            return
        self._transport.write(data)

    def _flush(self) -> None:
        """Send a head whose body has not come."""
        if self._send_head is not None:
            self.write(b"")

    def abort(self) -> None:
        """Close the connection at once."""
        self.stop()
        self._transport.abort()

    def pause_reading(self) -> None:
        """Stop reading, unless what arrives is read away."""
        if self._timer is None:
            self._transport.pause_reading()

    def get_write_buffer_size(self) -> int:
        """Return the number of bytes that the client has not read."""
        return self._transport.get_write_buffer_size() + len(self._head if self._send_head else b"")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class RequestBodies:
    """The budget of the bodies of all unanswered requests. Used on the event loop only."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._total_bytes = 0
        # In the order of their first part: of connections with equal bodies, the oldest is rejected. With a set, whose
        # order is arbitrary, benchmarks/attacks took 50 MiB more for 600 half-sent bodies.
        self._connections: dict[Connection, None] = {}

    def add(self, connection: Connection, size: int) -> None:
        """Count a part of a body, and reject the bodies of a connection if that is too much."""
        self._total_bytes += size
        connection.bodies_bytes += size
        self._connections[connection] = None
        if self._total_bytes > self._limit_bytes:
            _heaviest(self._connections, lambda each: each.bodies_bytes).reject_bodies()

    def free(self, connection: Connection) -> None:
        """Forget the bodies of a connection, if there are any."""
        self._total_bytes -= connection.bodies_bytes
        connection.bodies_bytes = 0
        self._connections.pop(connection, None)


class UnreadReplies:
    """The budget of the replies that clients have not read. Used on the event loop only.

    A page counts once, whatever the number of its readers.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._connections: dict[Connection, None] = {}
        # The number of readers of each long reply, by its identity.
        self._readers: Counter[int] = Counter()
        self.total_bytes = 0

    def send(self, connection: Connection, reply: object, size: int) -> None:
        """Count a long reply of this size before it is sent, and close other connections if that is too much."""
        connection.unread_reply, connection.unread_bytes = reply, size
        self._connections[connection] = None
        self._readers[id(reply)] += 1
        if self._readers[id(reply)] == 1:
            self.total_bytes += size
            self._close_heaviest()

    def sent(self, connection: Connection) -> None:
        """Forget the long reply of a connection: the transport has taken it, or the connection has ended."""
        reply, size = connection.unread_reply, connection.unread_bytes
        connection.unread_reply, connection.unread_bytes = None, 0
        if size:
            self._readers[id(reply)] -= 1
            if not self._readers[id(reply)]:
                del self._readers[id(reply)]
                self.total_bytes -= size
        if not connection.buffered_bytes:
            self._connections.pop(connection, None)

    def buffer(self, connection: Connection, buffered_bytes: int) -> None:
        """Note how many bytes the transport of a connection keeps; 0 when its client has read them."""
        self.total_bytes += buffered_bytes - connection.buffered_bytes
        connection.buffered_bytes = buffered_bytes
        if buffered_bytes:
            self._connections[connection] = None
            self._close_heaviest()
        elif not connection.unread_bytes:
            self._connections.pop(connection, None)

    def forget(self, connection: Connection) -> None:
        """Forget everything of a connection that has ended."""
        self.buffer(connection, 0)
        self.sent(connection)

    def _close_heaviest(self) -> None:
        while self.total_bytes > self._limit_bytes and len(self._connections) > 1:
            heaviest = _heaviest(self._connections, lambda each: each.unread_bytes + each.buffered_bytes)
            _log.debug("a connection of %s closed: it does not read its replies", heaviest.owner)
            self.forget(heaviest)
            heaviest.close()


def _heaviest(connections: Collection[Connection], size_of: Callable[[Connection], int]) -> Connection:
    """Return the connection with the most bytes of the owner with the most bytes."""
    # The owner first: many connections with a few bytes each count together.
    totals: Counter[Owner] = Counter()
    for connection in connections:
        totals[connection.owner] += size_of(connection)
    owner = max(totals, key=totals.__getitem__)
    return max((each for each in connections if each.owner == owner), key=size_of)
