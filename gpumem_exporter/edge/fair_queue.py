"""Requests that wait: held for a command or the end of an action, or for the turn of their owner at long work."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Literal, TypeAlias, TypeVar

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gpumem_exporter.edge.connections import Connection, Connections, Exchange, Owner
from gpumem_exporter.edge.problems import ProblemCode, ProblemError

T = TypeVar("T")
# A body of this length has been read before the application asks for it: uvicorn reads that much ahead.
_SHORT_BODY_BYTES = 64 << 10
# A longer reply is sent in pieces of this size.
_PIECE_BYTES = 64 << 10
# The most that is read of a body that the application does not want.
_DROPPED_BYTES = 4 << 20


Held: TypeAlias = Literal["woken", "late", "gone"]
"""Why a request is held no longer: what it waits for has happened or the exporter stops; the time is over; the client
disconnected."""


class HeldRequests:
    """All requests that are held, by what they wait for: a process or the id of an action."""

    def __init__(self) -> None:
        self._held: defaultdict[Hashable, set[asyncio.Future[None]]] = defaultdict(set)
        self._stopping = False

    def __len__(self) -> int:
        return sum(map(len, self._held.values()))

    async def hold(self, key: Hashable, seconds: float, receive: Receive) -> Held:
        """Hold a request, whose body has been read, until `wake(key)` and for this time at most."""
        if self._stopping:
            return "woken"
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._held[key].add(woken)
        # uvicorn does not cancel the handler of a client that disconnected; `receive` reports it.
        disconnected = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((woken, disconnected), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            return "woken" if woken.done() else "gone" if disconnected.done() else "late"
        finally:
            disconnected.cancel()
            self._held[key].discard(woken)
            if not self._held[key]:
                del self._held[key]

    def wake(self, key: Hashable) -> None:
        """End the requests that wait for this."""
        for woken in self._held.get(key, ()):
            if not woken.done():
                woken.set_result(None)

    def stop(self) -> None:
        """End every held request now and each later one at once, because the exporter stops."""
        self._stopping = True
        for key in self._held:
            self.wake(key)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Turns:
    """Lets a few owners work at a time, in turns. Used on the event loop only.

    A number runs, in all and of one owner, and of one owner a number waits.
    """

    def __init__(self, running: int, *, running_of_owner: int = 1, waiting_of_owner: int = 64) -> None:
        self._most_of_owner = running_of_owner + waiting_of_owner
        self._requests: Counter[Owner] = Counter()
        # A request waits for its owner's semaphore, then for the one of all. So an owner has few places in the queue of
        # all, and its next request is behind the requests of other owners.
        self._all = asyncio.Semaphore(running)
        self._of_owner: defaultdict[Owner, asyncio.Semaphore]
        self._of_owner = defaultdict(partial(asyncio.Semaphore, running_of_owner))
        # The threads belong to the turns: the threads of `to_thread` may all be waiting for a disk or /proc.
        self._threads = ThreadPoolExecutor(running, thread_name_prefix="turn")

    @contextlib.asynccontextmanager
    async def of(self, owner: Owner) -> AsyncIterator[None]:
        """Wait for a turn of this owner; it lasts until the block ends. Raises ProblemError (503) if too many wait."""
        if self._requests[owner] >= self._most_of_owner:
            raise ProblemError(ProblemCode.BUSY, "too many requests wait; repeat this one later", {"Retry-After": "1"})
        self._requests[owner] += 1
        try:
            async with self._of_owner[owner], self._all:
                yield
        finally:
            self._requests[owner] -= 1
            if not self._requests[owner]:
                del self._requests[owner], self._of_owner[owner]

    async def run(self, owner: Owner, function: Callable[[], T]) -> T:
        """Call a function in a thread, in a turn of this owner. Raises ProblemError (503) if too many wait."""
        async with self.of(owner):
            return await asyncio.get_running_loop().run_in_executor(self._threads, function)


class FairRequests:
    """The middleware at the edge: owners take turns, and each step of a request has its time."""

    def __init__(self, app: ASGIApp, connections: Connections, replaced: Iterable[str] = ()) -> None:
        limits = connections.limits
        self._app = app
        self._connections = connections
        self._bodies = Turns(limits.bodies, running_of_owner=max(1, limits.bodies // 4))
        self._reads = Turns(limits.reads)
        # The names of the configured headers, which uvicorn adds.
        self._replaced = frozenset(name.lower().encode() for name in replaced)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on the request.

        If too many long bodies wait, the first `receive()` of the next application raises the ProblemError of a 503.
        """
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = Exchange.of(scope)
        connection = exchange.connection
        headers = dict(scope["headers"])
        length = int(headers.get(b"content-length", b"0"))
        is_chunked = b"transfer-encoding" in headers
        waits_for_turn = length > _SHORT_BODY_BYTES
        arrived = not length and not is_chunked
        if arrived:
            connection.work()
        else:
            connection.wait(connection.limits.request_seconds)

        async def receive_in_turn() -> Message:
            nonlocal arrived, waits_for_turn
            if waits_for_turn:
                await exchange.turn.enter_async_context(self._bodies.of(connection.owner))
                waits_for_turn = False
            message = await receive()
            if not arrived and not message.get("more_body"):
                arrived = True
                connection.work()
            return message

        async def send_in_time(message: Message) -> None:
            nonlocal waits_for_turn
            # A client that sends or reads slowly, or follows a stream, would occupy the turn.
            await exchange.turn.aclose()
            waits_for_turn = False
            if self._replaced and message["type"] == "http.response.start":
                kept = [header for header in message["headers"] if header[0].lower() not in self._replaced]
                message = {**message, "headers": kept}
            # The rest of an unwanted body is read before the reply: if a socket is closed while bytes are unread, the
            # kernel sends a reset, and the client never sees the reply. A client with `Expect` sends its body later.
            if not arrived and message["type"] == "http.response.start" and not is_chunked and b"expect" not in headers:
                dropped = 0
                while dropped <= _DROPPED_BYTES and (part := await receive_in_turn()).get("more_body"):
                    dropped += len(part["body"])
            await self._send(connection, message, send)

        app = self._app
        try:
            if is_chunked:  # behind the body, more headers may follow, which no limit sees
                app = ProblemError(ProblemCode.LENGTH_REQUIRED, "a body needs a Content-Length").response()
            elif scope["method"] in ("GET", "HEAD") and scope["path"].startswith("/api/"):
                # Writes (reports, actions) and scrapes do not wait for reads.
                try:
                    await exchange.turn.enter_async_context(self._reads.of(connection.owner))
                except ProblemError as refusal:
                    app = refusal.response()
            await app(scope, receive_in_turn, send_in_time)
        finally:
            await exchange.turn.aclose()
            if not arrived:  # what else arrives would be parsed as another request
                connection.close()

    async def _send(self, connection: Connection, message: Message, send: Send) -> None:
        """Send a part of a reply; a long one in pieces, each of which waits until the client has read the others."""
        # Otherwise every slow client would have a copy of its reply, with TLS an encrypted one that no limit sees.
        if message["type"] == "http.response.start":
            length = int(dict(message["headers"]).get(b"content-length", b"0"))
            if length > _PIECE_BYTES:
                self._connections.start_reply(connection, length)
        for piece in _pieces(message):
            # uvicorn would write to a connection that has ended, if an earlier request of it is answered.
            if not connection.is_open:
                break
            connection.wait(connection.limits.unread_seconds)
            await send(piece)
            connection.work()
        if message["type"] == "http.response.body" and not message.get("more_body"):
            connection.unread_bytes = 0
            connection.rest()  # now, because uvicorn has just scheduled the next request of the connection


def _pieces(message: Message) -> Iterator[Message]:
    body, more_body = message.get("body", b""), message.get("more_body", False)
    if len(body) <= _PIECE_BYTES:
        yield message
        return
    for start in range(0, len(body), _PIECE_BYTES):
        end = start + _PIECE_BYTES
        # A copy: a view would keep all of the body.
        yield {**message, "body": body[start:end], "more_body": more_body or end < len(body)}
