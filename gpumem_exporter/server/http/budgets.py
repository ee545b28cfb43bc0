"""Budgets in bytes for what clients make the exporter keep: bodies that arrive, replies that are not read.

One budget is for all connections. When it is used up, the owner with the most loses the connection with the most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gpumem_exporter.server.http.connections import Connection, Owner

__all__ = ["PIECE_BYTES", "PacedReplies", "RequestBodies", "UnreadReplies"]

PIECE_BYTES = 128 << 10
"""A longer reply is sent in pieces of this size, so that a slow client's copy of it is never larger."""


def _heaviest(amounts: Mapping[Connection, int]) -> Connection:
    """Return the connection with the most bytes of the owner with the most bytes."""
    totals: Counter[Owner] = Counter()
    for connection, amount in amounts.items():
        totals[connection.owner] += amount
    owner = max(totals, key=totals.__getitem__)
    return max((each for each in amounts if each.owner == owner), key=amounts.__getitem__)


class RequestBodies:
    """The bodies of the unanswered requests of all connections. Used on the event loop only.

    Args:
        limit_bytes: the budget.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._total_bytes = 0
        self._amounts: dict[Connection, int] = {}
        self._reject: dict[Connection, Callable[[], None]] = {}

    def add(self, connection: Connection, size: int, reject: Callable[[], None]) -> None:
        """Count a part of a body.

        Args:
            connection: has received it.
            size: in bytes.
            reject: frees all bodies of this connection, because the budget is used up; calls `free`.
        """
        self._total_bytes += size
        self._amounts[connection] = self._amounts.get(connection, 0) + size
        self._reject[connection] = reject
        if self._total_bytes > self._limit_bytes:
            self._reject[_heaviest(self._amounts)]()

    def free(self, connection: Connection) -> None:
        """Forget the bodies of a connection; none is known of most."""
        self._total_bytes -= self._amounts.pop(connection, 0)
        self._reject.pop(connection, None)


@dataclass(slots=True)
class _Unread:
    """What the client of one connection has not read."""

    body: bytes = b""
    """The long reply that is being sent; the same object for all readers of a page."""
    buffered_bytes: int = 0
    """In the transport, which does not take more."""


class UnreadReplies:
    """The replies that clients have not read. Used on the event loop only.

    Args:
        limit_bytes: the budget. A page counts once, whatever the number of its readers.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._unread: dict[Connection, _Unread] = {}
        self._readers: Counter[int] = Counter()
        """The number of readers of each long reply, by its identity."""
        self.total_bytes = 0

    def send(self, connection: Connection, body: bytes) -> None:
        """Count a long reply before it is sent, and close other connections if that is too much."""
        self._of(connection).body = body
        self._readers[id(body)] += 1
        if self._readers[id(body)] == 1:
            self.total_bytes += len(body)
            self._close_heaviest()

    def sent(self, connection: Connection) -> None:
        """Forget the long reply of a connection: the transport has taken it, or the connection has ended."""
        unread = self._unread.get(connection)
        if unread is not None:
            self._drop_body(unread)
            self._forget_if_empty(connection, unread)

    def buffer(self, connection: Connection, buffered_bytes: int) -> None:
        """Note how many bytes the transport of a connection keeps; 0 when its client has read them."""
        if buffered_bytes == 0 and connection not in self._unread:
            return
        unread = self._of(connection)
        self.total_bytes += buffered_bytes - unread.buffered_bytes
        unread.buffered_bytes = buffered_bytes
        self._forget_if_empty(connection, unread)
        self._close_heaviest()

    def forget(self, connection: Connection) -> None:
        """Forget everything of a connection that has ended."""
        unread = self._unread.pop(connection, None)
        if unread is not None:
            self._drop_body(unread)
            self.total_bytes -= unread.buffered_bytes

    def _of(self, connection: Connection) -> _Unread:
        return self._unread.setdefault(connection, _Unread())

    def _drop_body(self, unread: _Unread) -> None:
        body, unread.body = unread.body, b""
        if body:
            self._readers[id(body)] -= 1
            if not self._readers[id(body)]:
                del self._readers[id(body)]
                self.total_bytes -= len(body)

    def _forget_if_empty(self, connection: Connection, unread: _Unread) -> None:
        if not unread.body and not unread.buffered_bytes:
            self._unread.pop(connection, None)

    def _close_heaviest(self) -> None:
        while self.total_bytes > self._limit_bytes and len(self._unread) > 1:
            amounts = {each: len(unread.body) + unread.buffered_bytes for each, unread in self._unread.items()}
            heaviest = _heaviest(amounts)
            self.forget(heaviest)
            heaviest.close()


@dataclass(frozen=True, slots=True)
class PacedReplies:
    """An application whose long replies are sent piece by piece, each when the client has read the previous ones.

    Without it, every slow client would have a copy of its reply, and with TLS an encrypted one.

    Args:
        app: the next application.
        unread: the budget.
    """

    app: ASGIApp
    unread: UnreadReplies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on the request."""
        connection = Connection.of(scope)
        if connection is None:
            await self.app(scope, receive, send)
            return

        async def paced(message: Message) -> None:
            body = message.get("body", b"")
            if len(body) <= PIECE_BYTES:
                await send(message)
                return
            self.unread.send(connection, body)
            try:
                for start in range(0, len(body), PIECE_BYTES):
                    piece = body[start : start + PIECE_BYTES]  # a copy: a view would keep all of the body
                    more = message.get("more_body", False) or start + PIECE_BYTES < len(body)
                    await send({"type": "http.response.body", "body": piece, "more_body": more})
            finally:
                self.unread.sent(connection)

        await self.app(scope, receive, paced)
