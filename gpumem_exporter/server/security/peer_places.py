"""Finds the places of the peers of connections over loopback, where the kernel names only the user of a socket.

The search reads the descriptors of processes. It runs in one thread of its own, and a pass serves all connections that
wait for one: however many connections a user opens, another user's waits for the current pass and the next one.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple
from weakref import WeakKeyDictionary

from gpumem_client.wire.peer import SocketOwner
from gpumem_exporter.core.place import UNKNOWN, Place
from gpumem_exporter.host.sockets import SocketHolders
from gpumem_exporter.server.security.peer import Peer, own_places

__all__ = ["UNSEEN", "PeerPlace", "PeerPlaces"]


class PeerPlace(NamedTuple):
    """Where the peer of a connection runs."""

    place: Place
    certain: bool
    """False if the exporter does not see in which cgroup the peer's TCP socket was created: a container may
    have passed it to the process that holds it."""


UNSEEN = PeerPlace(UNKNOWN, certain=False)


class PeerPlaces:
    """Finds the place of a peer, once for each connection. Used on the event loop, except `of_holder`."""

    def __init__(self, holders: SocketHolders | None = None) -> None:
        self._holders = holders or SocketHolders(own_places())
        self._known: WeakKeyDictionary[Peer, PeerPlace] = WeakKeyDictionary()
        self._wanted: dict[SocketOwner, asyncio.Future[Place]] = {}
        self._search: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, "gpumem-peers")
        self._rests_until_seconds = 0.0

    async def of(self, peer: Peer) -> PeerPlace:
        """Return the place of a peer; unknown if the exporter cannot see which processes hold its socket.

        All holders that the exporter sees must be in the same place.
        """
        if peer.tcp is None:
            return PeerPlace(peer.place, certain=True)
        found = self._known.get(peer)
        if found is None:
            waiting = self._wanted.get(peer.tcp)
            if waiting is None:
                waiting = self._wanted[peer.tcp] = asyncio.get_running_loop().create_future()
            if self._search is None or self._search.done():
                self._search = asyncio.ensure_future(self._search_all())
            place = await asyncio.shield(waiting)
            found = self._known[peer] = PeerPlace(place, certain=self._holders.created_in(peer.tcp) is not None)
        return found

    def of_holder(self, peer: Peer, pid: int | None) -> PeerPlace | None:
        """Return the place of a peer that is this process, without a search; None if it is another process."""
        if peer.tcp is None:
            return PeerPlace(peer.place, certain=True)
        place = self._holders.place_of(pid, peer.tcp) if pid is not None else None
        return None if place is None else PeerPlace(place, certain=self._holders.created_in(peer.tcp) is not None)

    async def _search_all(self) -> None:
        loop = asyncio.get_running_loop()
        while self._wanted:
            # At most half of the time, so that connections without end do not use a core.
            await asyncio.sleep(self._rests_until_seconds - loop.time())
            wanted, self._wanted = self._wanted, {}
            found: dict[SocketOwner, set[Place]] = {}
            started_seconds = loop.time()
            try:
                found = await loop.run_in_executor(self._thread, self._holders.places, tuple(wanted))
            finally:
                self._rests_until_seconds = 2 * loop.time() - started_seconds
                for owner, waiting in wanted.items():
                    places = found.get(owner, set())
                    if not waiting.done():
                        waiting.set_result(places.pop() if len(places) == 1 else UNKNOWN)
