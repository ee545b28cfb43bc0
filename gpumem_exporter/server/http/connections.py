"""The connections of all clients, counted from accept, and which of them makes room for a new one."""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from starlette.types import Scope

from gpumem_exporter.server.security.peer import Peer

__all__ = ["Connection", "Connections", "Owner", "owner_of"]

Owner: TypeAlias = str
"""A user of this machine or a container, as `Place.share` names them, or another machine by its address."""

_IDLE_SECONDS = 1.0
"""A connection makes room for another one of its own owner only after this time."""
_REFUSALS = 64
"""The number of connections beyond the limit that are kept until they are answered with 503. Others are closed."""


def owner_of(peer: Peer) -> Owner:
    """Return the owner of a connection.

    For local users see `Place.share`; in which container a TCP connection was made is not known yet. An IPv6 network of
    64 bits is one owner: its machines have all addresses.
    """
    if peer.uid is not None:
        return peer.place.share(peer.uid)
    if ":" in peer.host:
        return ipaddress.IPv6Address(peer.host.partition("%")[0]).packed[:8].hex()
    return peer.host


@dataclass(slots=True, eq=False)
class Connection:
    """One connection.

    Attributes:
        peer: the process or machine at the other end.
        owner: the user or machine that it counts for.
        close: closes it at once.
        waiting_since_seconds: when the exporter began to wait for its client, which has no request or has not finished
            sending one; None while the exporter works on a request.
        refused: it is beyond the limit, and its first request is answered with 503.
    """

    peer: Peer
    owner: Owner
    close: Callable[[], object] = lambda: None
    waiting_since_seconds: float | None = None
    refused: bool = False

    @classmethod
    def of(cls, scope: Scope) -> Connection | None:
        """Return the connection of an ASGI request; None without a server, as in tests."""
        found: Connection | None = scope.get("state", {}).get("connection")
        return found


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

    Args:
        limit: the maximum number of connections.
        clock: monotonic seconds.
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
        self.remove(connection)
        connection.close()
