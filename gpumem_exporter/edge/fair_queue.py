"""Requests that wait: held for a command or the end of an action, or for the turn of their owner at long work."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from enum import Enum, auto
from typing import TypeVar

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gpumem_exporter.edge.connections import PIECE_BYTES, Connection, Limits, Owner
from gpumem_exporter.edge.problems import ProblemError
from gpumem_exporter.edge.protocol import UnreadReplies

T = TypeVar("T")
# A body of this length has been read before the application asks for it: uvicorn reads that much ahead.
_SHORT_BODY_BYTES = 64 << 10
_REFUSAL_SECONDS = 1.0
_RETRY_AFTER = {"Retry-After": "1"}


class Held(Enum):
    """Why a request is held no longer."""

    WOKEN = auto()
    LATE = auto()
    """The time is over."""
    GONE = auto()
    """The client disconnected."""
    STOPPING = auto()
    """The exporter stops."""


class HeldRequests:
    """All requests that are held, by what they wait for: a process or the id of an action."""

    def __init__(self) -> None:
        self._held: defaultdict[Hashable, set[asyncio.Future[Held]]] = defaultdict(set)
        self._stopping = False

    def __len__(self) -> int:
        return sum(map(len, self._held.values()))

    async def hold(self, key: Hashable, seconds: float, receive: Receive) -> Held:
        """Hold a request, whose body has been read, until `wake(key)` and for this time at most."""
        if self._stopping:
            return Held.STOPPING
        woken: asyncio.Future[Held] = asyncio.get_running_loop().create_future()
        self._held[key].add(woken)
        # uvicorn does not cancel the handler of a client that disconnected; `receive` reports it.
        disconnected = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((woken, disconnected), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if woken.done():
                return woken.result()
            return Held.GONE if disconnected.done() else Held.LATE
        finally:
            disconnected.cancel()
            self._held[key].discard(woken)
            if not self._held[key]:
                del self._held[key]

    def wake(self, key: Hashable) -> None:
        """End the requests that wait for this."""
        self._end(key, Held.WOKEN)

    def stop(self) -> None:
        """End every held request now and each later one at once, because the exporter stops."""
        self._stopping = True
        for key in self._held:
            self._end(key, Held.STOPPING)

    def _end(self, key: Hashable, why: Held) -> None:
        for woken in self._held.get(key, ()):
            if not woken.done():
                woken.set_result(why)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Turns:
    """Lets a few owners work at a time, in turns. Used on the event loop only.

    A number runs and a number waits, in all and of one owner.
    """

    def __init__(
        self, running: int, *, running_of_owner: int = 1, waiting_of_owner: int = 64, waiting: int = 1024
    ) -> None:
        self._running = running
        self._running_of_owner = running_of_owner
        self._waiting_of_owner = waiting_of_owner
        self._waiting = waiting
        self._active: Counter[Owner] = Counter()
        # The futures of the requests that wait. The first owner has the next turn.
        self._queues: dict[Owner, deque[asyncio.Future[None]]] = {}
        self._executor: ThreadPoolExecutor | None = None

    @contextlib.asynccontextmanager
    async def of(self, owner: Owner) -> AsyncIterator[None]:
        """Wait for a turn of this owner; it lasts until the block ends. Raises ProblemError (503) if too many wait."""
        await self.start(owner)
        try:
            yield
        finally:
            self.end(owner)

    async def run(self, owner: Owner, function: Callable[[], T]) -> T:
        """Call a function in a thread, in a turn of this owner. Raises ProblemError (503) if too many wait."""
        async with self.of(owner):
            if self._executor is None:
                # The threads belong to the turns: the threads of `to_thread` may all be waiting for a disk or /proc.
                self._executor = ThreadPoolExecutor(self._running, thread_name_prefix="turn")
            return await asyncio.get_running_loop().run_in_executor(self._executor, function)

    async def start(self, owner: Owner) -> None:
        """Wait for a turn of this owner, which lasts until `end`. Raises ProblemError (503) if too many wait."""
        if not self._queues.get(owner) and self._may_start(owner):
            self._active[owner] += 1
            return
        if not self._has_room(owner):
            # A client that ignores Retry-After would otherwise keep the event loop busy with refusals.
            await asyncio.sleep(_REFUSAL_SECONDS)
            raise _too_many()
        queue = self._queues.setdefault(owner, deque())
        turn = asyncio.get_running_loop().create_future()
        queue.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            # The turn may have started before the cancellation arrived here: nothing else would end it.
            if turn.done() and not turn.cancelled():
                self.end(owner)
            raise

    def end(self, owner: Owner) -> None:
        """End a turn of this owner, and start the next ones."""
        self._active[owner] -= 1
        self._active = +self._active  # forgets the owners without a turn
        for each in tuple(self._queues):
            self._start_next(each)

    def _may_start(self, owner: Owner) -> bool:
        return self._active.total() < self._running and self._active[owner] < self._running_of_owner

    def _has_room(self, owner: Owner) -> bool:
        """Return whether another one of this owner may wait, after the owner with the most has lost its latest."""
        waiting = len(self._queues.get(owner, ()))
        if waiting >= self._waiting_of_owner:
            return False
        if sum(map(len, self._queues.values())) < self._waiting:
            return True
        largest = max(self._queues.values(), key=len)
        # Two owners with equally many would take the last place from each other for ever.
        if len(largest) <= waiting + 1:
            return False
        latest = largest.pop()
        if not latest.done():
            latest.set_exception(_too_many())
        return True

    def _start_next(self, owner: Owner) -> None:
        queue = self._queues[owner]
        while queue and (queue[0].cancelled() or self._may_start(owner)):
            turn = queue.popleft()
            if turn.cancelled():
                continue
            self._active[owner] += 1
            turn.set_result(None)
            if queue:  # the other owners are before its next turn
                self._queues[owner] = self._queues.pop(owner)
            break
        if not queue:
            del self._queues[owner]


class _Turn:
    """The turn of one request. It starts at most once."""

    def __init__(self, turns: Turns, owner: Owner) -> None:
        self._turns = turns
        self._owner = owner
        self._started = False
        self._runs = False

    async def start(self) -> None:
        if not self._started:
            await self._turns.start(self._owner)
            self._started = self._runs = True

    def end(self) -> None:
        if self._runs:
            self._runs = False
            self._turns.end(self._owner)


class FairRequests:
    """The middleware in which owners take turns, and long replies are sent piece by piece."""

    def __init__(self, app: ASGIApp, limits: Limits, unread: UnreadReplies) -> None:
        self._app = app
        self._bodies = Turns(limits.bodies, running_of_owner=max(1, limits.bodies // 4))
        self._reads = Turns(limits.reads)
        self._unread = unread

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on the request.

        If too many long bodies wait, the first `receive()` of the next application raises the ProblemError of a 503.
        """
        connection: Connection | None = scope.get("state", {}).get("connection")
        if connection is None:  # not a request
            await self._app(scope, receive, send)
            return
        turn = None
        if _has_long_body(scope):
            turn = _Turn(self._bodies, connection.owner)
            receive = _receive_in(turn, receive)
            # For the application, once it has read the body. Until then, others' bodies wait in the clients' sockets.
            scope["state"]["end_body_turn"] = turn.end
        elif scope["method"] in ("GET", "HEAD") and scope["path"].startswith("/api/"):
            # Writes (reports, actions) and scrapes do not wait for reads.
            turn = _Turn(self._reads, connection.owner)
            # For a route that waits for a process: its owner may read other documents meanwhile.
            scope["state"]["end_read_turn"] = turn.end
            try:
                await turn.start()
            except ProblemError as problem:
                await problem.response()(scope, receive, send)
                return
            send = _end_before(send, turn)
        try:
            await self._app(scope, receive, self._send_in_pieces(connection, send))
        finally:
            if turn is not None:
                turn.end()

    def _send_in_pieces(self, connection: Connection, send: Send) -> Send:
        """Return a `send` in which each piece waits until the client has read the previous ones.

        A body that many clients read is sent as the `pieces` of a message, which they share.
        """

        # Otherwise every slow client would have a copy of its reply, and with TLS an encrypted one.
        async def send_in_pieces(message: Message) -> None:
            body, pieces = message.get("body", b""), message.get("pieces")
            size = len(body) if pieces is None else sum(map(len, pieces))
            if pieces is None and size <= PIECE_BYTES:
                await send(message)
                return
            self._unread.send(connection, body if pieces is None else pieces, size)
            unsent, more = size, message.get("more_body", False)
            try:
                for piece in cut(body) if pieces is None else pieces:
                    unsent -= len(piece)
                    await send({"type": "http.response.body", "body": piece, "more_body": more or unsent > 0})
            finally:
                self._unread.sent(connection)

        return send_in_pieces


def cut(body: bytes) -> Iterator[bytes]:
    """Yield the pieces of a long body."""
    for start in range(0, len(body), PIECE_BYTES):
        yield body[start : start + PIECE_BYTES]  # a copy: a view would keep all of the body


def _receive_in(turn: _Turn, receive: Receive) -> Receive:
    async def receive_in_turn() -> Message:
        await turn.start()
        return await receive()

    return receive_in_turn


def _end_before(send: Send, turn: _Turn) -> Send:
    """Return a `send` that ends the turn."""

    # A client that reads slowly, or follows a stream, would occupy the turn.
    async def end_and_send(message: Message) -> None:
        turn.end()
        await send(message)

    return end_and_send


def _has_long_body(scope: Scope) -> bool:
    if scope["method"] != "POST":
        return False
    for name, value in scope["headers"]:
        if name == b"content-length":
            return not (value.isdigit() and len(value) < 10 and int(value) <= _SHORT_BODY_BYTES)
    return True


def _too_many() -> ProblemError:
    return ProblemError(503, "too many requests wait for their turn", _RETRY_AFTER)
