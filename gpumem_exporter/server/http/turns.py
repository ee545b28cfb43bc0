"""Turns of owners at work that takes long, so that no owner's requests keep another one waiting."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gpumem_exporter.server.http.connections import Connection, Owner
from gpumem_exporter.server.http.problems import ProblemError

__all__ = ["BodyTurns", "ReadTurns", "Turns"]

T = TypeVar("T")

_SHORT_BODY_BYTES = 64 << 10
"""A body of this length has been read before the application asks for it: uvicorn reads that much ahead."""
_REFUSAL_SECONDS = 1.0
_RETRY_AFTER = {"Retry-After": "1"}


class Turns:
    """Lets a few owners work at a time, in turns. Used on the event loop only.

    Args:
        running: how many work at the same time.
        running_of_owner: how many of them may be of one owner.
        waiting_of_owner: how many of one owner may wait.
        waiting: how many may wait in all.
    """

    def __init__(
        self, running: int, *, running_of_owner: int = 1, waiting_of_owner: int = 64, waiting: int = 1024
    ) -> None:
        self._running = running
        self._running_of_owner = running_of_owner
        self._waiting_of_owner = waiting_of_owner
        self._waiting = waiting
        self._active: Counter[Owner] = Counter()
        self._queues: dict[Owner, deque[asyncio.Future[None]]] = {}
        """Those that wait. The owner that is first has the next turn."""
        self._executor: ThreadPoolExecutor | None = None

    @contextlib.asynccontextmanager
    async def of(self, owner: Owner) -> AsyncIterator[None]:
        """Wait for a turn of this owner; it lasts until the block ends.

        Raises:
            ProblemError: 503, because too many wait.
        """
        await self.take(owner)
        try:
            yield
        finally:
            self.end(owner)

    async def run(self, owner: Owner, function: Callable[[], T]) -> T:
        """Call a function in a thread, in a turn of this owner.

        The threads belong to the turns: the threads of `asyncio.to_thread` may all be waiting for a disk or /proc.

        Raises:
            ProblemError: as `of`.
        """
        async with self.of(owner):
            if self._executor is None:
                self._executor = ThreadPoolExecutor(self._running, thread_name_prefix="turn")
            return await asyncio.get_running_loop().run_in_executor(self._executor, function)

    async def take(self, owner: Owner) -> None:
        """Wait for a turn of this owner, which lasts until `end`.

        Raises:
            ProblemError: as `of`.
        """
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
            if turn.done() and not turn.cancelled():
                self.end(owner)
            raise

    def end(self, owner: Owner) -> None:
        """End a turn of this owner, and start those that are next."""
        self._active[owner] -= 1
        self._active = +self._active
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


@dataclass(frozen=True, slots=True)
class ReadTurns:
    """An application in which owners take turns at reading the API's documents.

    A turn ends when the reply starts, so a client that reads slowly does not occupy it. Writes
    (reports, actions) and scrapes do not wait for it.

    Args:
        app: the next application.
        turns: the turns.
    """

    app: ASGIApp
    turns: Turns

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on the request in its turn; refuse it if too many wait."""
        connection = Connection.of(scope)
        if (
            connection is None
            or scope["type"] != "http"
            or scope["method"] not in ("GET", "HEAD")
            or not scope["path"].startswith("/api/")
        ):
            await self.app(scope, receive, send)
            return
        owner = connection.owner
        try:
            await self.turns.take(owner)
        except ProblemError as problem:
            await problem.response()(scope, receive, send)
            return
        ended = False

        async def send_and_end(message: Message) -> None:
            nonlocal ended
            if not ended:
                ended = True
                self.turns.end(owner)
            await send(message)

        try:
            await self.app(scope, receive, send_and_end)
        finally:
            if not ended:
                self.turns.end(owner)


@dataclass(frozen=True, slots=True)
class BodyTurns:
    """An application in which owners take turns at sending long bodies.

    A turn lasts from the first part until the application has read the body and calls `end_body_turn` of the request's
    state, at the latest until its end. Others' bodies wait in the clients' sockets. So neither memory nor one round of
    the event loop is taken by hundreds of them.

    Args:
        app: the next application.
        turns: the turns.
    """

    app: ASGIApp
    turns: Turns

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on the request. If too many bodies wait, the first `receive()` raises the ProblemError of a 503."""
        connection = Connection.of(scope)
        if connection is None or _has_short_body(scope):
            await self.app(scope, receive, send)
            return
        owner = connection.owner
        started = ended = False

        async def receive_in_turn() -> Message:
            nonlocal started
            if not started:
                await self.turns.take(owner)
                started = True
            return await receive()

        def end() -> None:
            nonlocal ended
            if started and not ended:
                ended = True
                self.turns.end(owner)

        scope["state"]["end_body_turn"] = end
        try:
            await self.app(scope, receive_in_turn, send)
        finally:
            end()


def _too_many() -> ProblemError:
    return ProblemError(503, "too many requests wait for their turn", _RETRY_AFTER)


def _has_short_body(scope: Scope) -> bool:
    if scope["type"] != "http" or scope["method"] != "POST":
        return True
    for name, value in scope["headers"]:
        if name == b"content-length":
            return value.isdigit() and len(value) < 10 and int(value) <= _SHORT_BODY_BYTES
    return False
