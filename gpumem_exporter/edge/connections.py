"""The limits of clients, and their connections, counted from accept.

When the connections are used up, the owner with the most loses first.
"""

from __future__ import annotations

import ipaddress
import logging
import math
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from operator import attrgetter
from typing import TypeAlias

from gpumem_exporter.edge.peer import Peer

Owner: TypeAlias = str
"""A user of this machine or a container, as `Place.share` names them, or another machine by its address."""

# A connection makes room for another one of its own owner only after this time.
_IDLE_SECONDS = 1.0
# The number of connections beyond the limit that are kept until they are answered with 503. Others are closed.
_REFUSALS = 64

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
    """Return the owner of a connection."""
    if peer.uid is not None:
        # In which container a TCP connection was made is not known yet: its place is unknown.
        return peer.place.share(peer.uid)
    if ":" in peer.host:
        # A machine may take every address of its network of 64 bits, so that the network is one owner.
        return ipaddress.IPv6Address(peer.host.partition("%")[0]).packed[:8].hex()
    return peer.host


@dataclass(slots=True, eq=False)
class Connection:
    """One connection."""

    peer: Peer
    owner: Owner
    close: Callable[[], object] = lambda: None
    """Closes it at once."""
    waiting_since_seconds: float = math.inf
    """When the exporter began to wait for its client, which has no request or has not finished sending one; infinite
    while the exporter works on a request."""
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


class Connections:
    """Counts connections by owner, so that no owner keeps others out. Used on the event loop only.

    An owner has at most half of the connections. When all are taken, the owner with the most loses the connection
    that has waited longest for its client: a connection without a request, or with a request that is not finished.
    """

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._clock = clock
        # The connections of each owner, the oldest first.
        self._owners: dict[Owner, dict[Connection, None]] = {}
        self._count = 0
        self._refused: set[Connection] = set()

    def __len__(self) -> int:
        return self._count

    def admit(self, connection: Connection) -> bool:
        """Count a new connection and make room for it. Return False if it must be closed at once.

        If there is no room, it is kept to be answered with 503, unless too many others are.
        """
        connection.waiting_since_seconds = self._clock()
        if self._has_room(connection.owner):
            self._owners.setdefault(connection.owner, {})[connection] = None
            self._count += 1
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
        owned = self._owners.get(connection.owner, {})
        if connection in owned:
            del owned[connection]
            self._count -= 1
            if not owned:
                del self._owners[connection.owner]

    def close_one(self) -> bool:
        """Close a connection of the owner with the most, because files or memory are used up; False without any."""
        if not self._owners:
            return False
        self._close(_longest_waiting(max(self._owners.values(), key=len)))
        return True

    def _has_room(self, owner: Owner) -> bool:
        """Return whether there is room for a connection of this owner, after closing another one if necessary."""
        own = self._owners.get(owner, {})
        if len(own) >= max(1, self._limit // 2):
            return self._close_idle(own)
        if self._count < self._limit:
            return True
        # The new connection counts for its owner: of two owners with equally many, the new connection's loses.
        largest = max(self._owners.values(), key=lambda owned: (len(owned) + (owned is own), owned is not own))
        if largest is own:
            return self._close_idle(own)
        self._close(_longest_waiting(largest))
        return True

    def _close_idle(self, own: Collection[Connection]) -> bool:
        """Close the connection that has waited longest, if that is long enough."""
        longest = _longest_waiting(own)
        if self._clock() - longest.waiting_since_seconds < _IDLE_SECONDS:
            return False
        self._close(longest)
        return True

    def _close(self, connection: Connection) -> None:
        _log.debug("a connection of %s makes room", connection.owner)
        self.remove(connection)
        connection.close()


def _longest_waiting(connections: Collection[Connection]) -> Connection:
    """Return the connection that has waited longest for its client; the oldest one if none waits."""
    # Searched only when there is no room, 50 ns for each connection; an order costs each request.
    return min(connections, key=attrgetter("waiting_since_seconds"))
