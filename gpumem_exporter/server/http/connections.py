"""The clients and their limits: connections, counted from accept, and what they make the exporter keep.

When connections or a budget in bytes are used up, the owner with the most loses first.
"""

from __future__ import annotations

import ipaddress
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TypeAlias

from starlette.types import Scope

from gpumem_exporter.server.http.peer import Peer

Owner: TypeAlias = str
"""A user of this machine or a container, as `Place.share` names them, or another machine by its address."""

_IDLE_SECONDS = 1.0
"""A connection makes room for another one of its own owner only after this time."""
_REFUSALS = 64
"""The number of connections beyond the limit that are kept until they are answered with 503. Others are closed."""

_log = logging.getLogger(__name__)

PIECE_BYTES = 128 << 10
"""A longer reply is sent in pieces of this size, so that a slow client's copy of it is never larger."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of clients."""

    max_connections: int
    """Half of them may be of one user or machine."""
    pipelined_requests: int = 8
    """The number of requests that may wait for an earlier one; with more, the connection is closed."""
    bodies_bytes: int = 16 << 20
    """The size of all bodies of unanswered requests together."""
    unread_bytes: int = 24 << 20
    """The size of all replies that clients have not read."""
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


def owner_of(peer: Peer) -> Owner:
    """Return the owner of a connection. An IPv6 network of 64 bits is one owner: its machines have all addresses."""
    if peer.uid is not None:
        # In which container a TCP connection was made is not known yet: its place is unknown.
        return peer.place.share(peer.uid)
    if ":" in peer.host:
        return ipaddress.IPv6Address(peer.host.partition("%")[0]).packed[:8].hex()
    return peer.host


@dataclass(slots=True, eq=False)
class Connection:
    """One connection."""

    peer: Peer
    owner: Owner
    close: Callable[[], object] = lambda: None
    """Closes it at once."""
    waiting_since_seconds: float | None = None
    """When the exporter began to wait for its client, which has no request or has not finished sending one; None while
    the exporter works on a request."""
    refused: bool = False
    """It is beyond the limit, and its first request is answered with 503."""
    reject_bodies: Callable[[], object] = lambda: None
    """Answers its requests whose bodies arrive with 503, and frees the bodies."""
    bodies_bytes: int = 0
    """The bodies of its unanswered requests."""
    unread_reply: object = None
    """The long reply that is being sent; the same object for all readers of a page."""
    unread_bytes: int = 0
    """Its size."""
    buffered_bytes: int = 0
    """What its transport keeps, because the client does not read."""

    @classmethod
    def of(cls, scope: Scope) -> Connection | None:
        """Return the connection of an ASGI request; None without a server, as in tests."""
        found: Connection | None = scope.get("state", {}).get("connection")
        return found

    @classmethod
    def owner_of(cls, scope: Scope) -> Owner:
        """Return the owner of the connection of an ASGI request; empty without a server, as in tests."""
        connection = cls.of(scope)
        return connection.owner if connection is not None else ""


@dataclass(slots=True)
class _Owned:
    """The connections of one owner."""

    every: dict[Connection, None] = field(default_factory=dict)
    waiting: dict[Connection, None] = field(default_factory=dict)
    """The connections that wait for their client, in the order in which the wait started."""


class Connections:
    """Counts connections by owner, so that no owner keeps others out. Used on the event loop only.

    An owner has at most half of the connections. When all are taken, the owner with the most loses the connection
    that has waited longest for its client: a connection without a request, or with a request that is not finished.
    """

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._clock = clock
        self._owners: dict[Owner, _Owned] = {}
        self._count = 0
        self._refused: set[Connection] = set()

    def __len__(self) -> int:
        return self._count

    def admit(self, connection: Connection) -> bool:
        """Count a new connection and make room for it. Return False if it must be closed at once.

        If there is no room, it is kept to be answered with 503, unless too many others are.
        """
        if self._has_room(connection.owner):
            self._owners.setdefault(connection.owner, _Owned()).every[connection] = None
            self._count += 1
            self.wait(connection)
            return True
        _log.debug("no room for a connection of %s", connection.owner)
        if len(self._refused) >= _REFUSALS:
            return False
        connection.refused = True
        self._refused.add(connection)
        return True

    def remove(self, connection: Connection) -> None:
        """Forget a connection that has ended; one that made room is forgotten already."""
        self._refused.discard(connection)
        owned = self._owners.get(connection.owner)
        if owned is None or connection not in owned.every:
            return
        del owned.every[connection]
        owned.waiting.pop(connection, None)
        self._count -= 1
        if not owned.every:
            del self._owners[connection.owner]

    def wait(self, connection: Connection) -> None:
        """Note that the exporter waits for the client from now on."""
        connection.waiting_since_seconds = self._clock()
        owned = self._owners.get(connection.owner)
        if owned is not None and connection in owned.every:
            owned.waiting.pop(connection, None)
            owned.waiting[connection] = None

    def work(self, connection: Connection) -> None:
        """Note that the exporter works on a request of this connection."""
        connection.waiting_since_seconds = None
        owned = self._owners.get(connection.owner)
        if owned is not None:
            owned.waiting.pop(connection, None)

    def close_one(self) -> bool:
        """Close a connection of the owner with the most, because files or memory are used up; False without any."""
        largest = max(self._owners.values(), key=lambda owned: len(owned.every), default=None)
        if largest is None:
            return False
        self._close(next(iter(largest.waiting or largest.every)))
        return True

    def _has_room(self, owner: Owner) -> bool:
        """Return whether there is room for a connection of this owner, after closing another one if necessary."""
        own = self._owners.get(owner) or _Owned()
        if len(own.every) >= self._limit // 2:
            return self._close_idle(own)
        if self._count < self._limit:
            return True
        largest = max(self._owners.values(), key=lambda owned: (len(owned.every) + (owned is own), owned is not own))
        if largest is own:
            return self._close_idle(own)
        self._close(next(iter(largest.waiting or largest.every)))
        return True

    def _close_idle(self, own: _Owned) -> bool:
        """Close the connection that has waited longest, if that is long enough."""
        longest = next(iter(own.waiting), None)
        if longest is None or self._clock() - (longest.waiting_since_seconds or 0.0) < _IDLE_SECONDS:
            return False
        self._close(longest)
        return True

    def _close(self, connection: Connection) -> None:
        _log.debug("a connection of %s makes room", connection.owner)
        self.remove(connection)
        connection.close()


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
        self._readers: Counter[int] = Counter()
        """The number of readers of each long reply, by its identity."""
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
    totals: Counter[Owner] = Counter()
    for connection in connections:
        totals[connection.owner] += size_of(connection)
    owner = max(totals, key=totals.__getitem__)
    return max((each for each in connections if each.owner == owner), key=size_of)


class Clients:
    """What all clients together have."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.connections = Connections(limits.max_connections)
        self.bodies = RequestBodies(limits.bodies_bytes)
        self.unread = UnreadReplies(limits.unread_bytes)
