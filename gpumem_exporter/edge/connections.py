"""The limits of clients, their connections by owner, and their requests.

When the connections are used up, or the replies that clients have not read, the owner with the most loses first.
"""

from __future__ import annotations

import ipaddress
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, TypeAlias

from gpumem_exporter.core.caller import Caller
from gpumem_exporter.edge.peer import Peer

Owner: TypeAlias = str
"""A user of this machine or a container, as `Place.share` names them, or another machine by its address."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of clients."""

    max_connections: int
    """Half of them may be of one user or machine."""
    pipelined_requests: int = 8
    """The number of requests that may wait for an earlier one; with more, the connection is closed."""
    unread_bytes: int = 24 << 20
    """The size of all long replies that clients have not read."""
    head_bytes: int = 64 << 10
    """The size of request line and headers."""
    request_seconds: float = 10.0
    """The time until the headers of a request have arrived, with the TLS handshake before; the same for the body."""
    handshake_seconds: float = 3.0
    """The time for a TLS handshake, once it has its turn."""
    unread_seconds: float = 30.0
    """The time until a client reads a piece of its reply."""
    idle_seconds: float = 75.0
    """The time for which a connection without a request is kept."""
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
    """One connection, and how far its requests are. Used on the event loop only."""

    peer: Peer
    limits: Limits
    clock: Callable[[], float] = time.monotonic
    owner: Owner = field(init=False)
    abort: Callable[[], object] = lambda: None
    """Ends it with a reset."""
    close: Callable[[], object] = lambda: None
    """Ends it when what was written is sent."""
    is_open: bool = True
    unread_bytes: int = 0
    """The size of the long reply that is being sent."""
    waiting_since_seconds: float = field(init=False)
    """Since when the exporter has waited for the next step of its client; infinite while it works on a request."""
    due_seconds: float = field(init=False)
    """When it is ended, unless its client does the next step before; infinite while the exporter works on a request."""
    _is_idle: bool = field(init=False)
    """Whether no byte of the next request has arrived."""
    _permitted_bytes: int = field(init=False)
    """What may arrive until the headers of the next request are complete."""

    def __post_init__(self) -> None:
        self.owner = owner_of(self.peer)
        self._permitted_bytes = self.limits.head_bytes
        self.wait(self.limits.request_seconds)

    def wait(self, seconds: float, *, is_idle: bool = False) -> None:
        """Note that the client has the next step, and this time for it."""
        self._is_idle = is_idle
        self.waiting_since_seconds = self.clock()
        self.due_seconds = self.waiting_since_seconds + seconds

    def work(self) -> None:
        """Note that the exporter has the next step, and any time for it."""
        self._is_idle = False
        self.waiting_since_seconds = self.due_seconds = math.inf

    def rest(self) -> None:
        """Note that a request is answered."""
        # uvicorn closes an idle connection after the same time, but waits until its client has read the last reply.
        self.wait(self.limits.idle_seconds, is_idle=True)

    def start_request(self, body_bytes: int) -> None:
        """Note that the headers of a request have arrived."""
        self._permitted_bytes = body_bytes + self.limits.head_bytes

    def receive(self, size: int) -> None:
        """Count received bytes, after they were parsed. End the connection if they are a head that is too long."""
        if self._is_idle:
            self.wait(self.limits.request_seconds)
        self._permitted_bytes -= size
        # The parser keeps an unfinished header, and would keep it for ever.
        if self._permitted_bytes < 0:
            _log.debug("a connection of %s ended: its headers are too long", self.owner)
            self.abort()


@dataclass(slots=True, eq=False)
class Exchange:
    """A request, who sent it, and its turn."""

    connection: Connection
    peer: Peer
    """The process at the other end; without a user if that process is a proxy."""
    caller: Caller = field(init=False)
    """The caller of an action. Missing on the routes where the guard identifies no caller."""
    turn: AsyncExitStack = field(default_factory=AsyncExitStack)
    """The turn of a long body or of a read. `turn.aclose()` ends it before the reply does."""

    @classmethod
    def of(cls, scope: Mapping[str, Any]) -> Exchange:
        """Return the exchange of an ASGI scope or a `Request`. KeyError if the request did not pass the edge."""
        exchange: Exchange = scope["state"]["exchange"]
        return exchange

    @property
    def owner(self) -> Owner:
        """The owner of its connection, by whom requests are limited."""
        return self.connection.owner


class Connections:
    """Counts connections by owner, so that no owner keeps others out. Used on the event loop only.

    An owner has at most half of the connections. When all are taken, the owner with the most loses the connection
    that has waited longest for its client: for a request, for the rest of one, or until a reply is read. A connection
    with a request that the exporter works on is ended for another owner only.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        # The connections of each owner, the oldest first.
        self._owners: dict[Owner, dict[Connection, None]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._owners.values()))

    def admit(self, connection: Connection) -> bool:
        """Count a new connection, and make room for it. Return False if there is no room: it must be ended."""
        if not self._has_room(connection.owner):
            _log.debug("no room for a connection of %s", connection.owner)
            return False
        self._owners.setdefault(connection.owner, {})[connection] = None
        return True

    def remove(self, connection: Connection) -> None:
        """Forget a connection that has ended; one that made room is forgotten already."""
        connection.is_open = False
        owned = self._owners.get(connection.owner, {})
        owned.pop(connection, None)
        if not owned:
            self._owners.pop(connection.owner, None)

    def end_late(self) -> None:
        """End the connections whose time is over."""
        for late in [each for owned in self._owners.values() for each in owned if each.due_seconds < each.clock()]:
            self._end(late, "its client took too long")

    def start_reply(self, connection: Connection, size: int) -> None:
        """Count a long reply before it is sent, and end other connections if all long replies are too large."""
        connection.unread_bytes = size
        while (total := sum(map(_unread_bytes, self._owners.values()))) > self.limits.unread_bytes:
            # The owner first: many connections with short replies count together.
            heaviest = max(max(self._owners.values(), key=_unread_bytes), key=attrgetter("unread_bytes"))
            if heaviest.unread_bytes == total:
                break  # a single reply is never too large
            self._end(heaviest, "it does not read its reply")

    def _has_room(self, owner: Owner) -> bool:
        """Return whether there is room for a connection of this owner, after ending another one if necessary."""
        own = self._owners.get(owner, {})
        has_half = len(own) >= max(1, self.limits.max_connections // 2)
        if not has_half and len(self) < self.limits.max_connections:
            return True
        # The new connection counts for its owner: of two owners with equally many, the new connection's loses.
        largest = max(self._owners.values(), key=lambda owned: (len(owned) + (owned is own), owned is not own))
        loser = own if has_half else largest
        # Searched only when there is no room, 50 ns for each connection; an order costs each request.
        # Not the connection that is due first: a new connection has less time than the idle connections of a flood.
        longest = min(loser, key=attrgetter("waiting_since_seconds"))
        if loser is own and longest.waiting_since_seconds == math.inf:
            return False
        self._end(longest, "it makes room")
        return True

    def _end(self, connection: Connection, why: str) -> None:
        _log.debug("a connection of %s ended: %s", connection.owner, why)
        self.remove(connection)
        connection.abort()


def _unread_bytes(connections: Iterable[Connection]) -> int:
    return sum(each.unread_bytes for each in connections)
