"""The other end of a connection, as the kernel identifies it, and where it runs."""

from __future__ import annotations

import asyncio
import os
import select
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

from gpumem_client.wire.peer import PeerCredentials, SocketOwner, peer_pidfd, tcp_peer_owner, unix_peer
from gpumem_client.wire.procfs import start_time_ticks
from gpumem_exporter.core.container import UNKNOWN, Place
from gpumem_exporter.edge.listeners import is_loopback
from gpumem_exporter.node.containers import Places
from gpumem_exporter.node.proc_entries import ProcEntries
from gpumem_exporter.node.sockets import SocketHolders


class PeerPlace(NamedTuple):
    """Where the peer of a connection runs."""

    place: Place
    certain: bool
    """False if the exporter does not see in which cgroup the peer's TCP socket was created: a container may
    have passed it to the process that holds it."""


@dataclass(eq=False)
class Peer:
    """The process at the other end of a connection, in the exporter's namespaces."""

    host: str = ""
    """The address of a TCP peer; empty for a unix socket."""
    uid: int | None = None
    """Its user; None for another machine, for a proxy, and where the kernel does not know it."""
    pid: int = 0
    """The process at a unix socket; 0 if the exporter cannot see that process, and for TCP."""
    start_time_ticks: int = 0
    """When that process started."""
    place: Place = UNKNOWN
    """Where that process runs; unknown for TCP."""
    tcp: SocketOwner | None = None
    """The peer's TCP socket on this machine; None if unknown."""
    where: PeerPlace | None = field(init=False, default=None)
    """Where the peer runs; None until `PeerPlaces` has found the place of a TCP socket on this machine."""

    def __post_init__(self) -> None:
        if self.tcp is None:
            self.where = PeerPlace(self.place, certain=True)

    @classmethod
    def of_socket(cls, sock: socket.socket) -> Peer:
        """Identify the peer of a new connection. Takes some 20 microseconds for loopback, and 80 for a unix socket."""
        if sock.family == socket.AF_UNIX:
            credentials = unix_peer(sock)
            return _unix_peer(_known(credentials.uid), credentials, sock)
        try:
            # A socket for both address families reports an IPv4 peer by its IPv6-mapped address.
            host = sock.getpeername()[0].removeprefix("::ffff:")
        except OSError:
            return cls()  # it has closed the connection
        owner = tcp_peer_owner(sock) if is_loopback(host) else None
        return cls(host) if owner is None else cls(host, uid=_known(owner.uid), tcp=owner)


class PeerPlaces:
    """Finds the place of a peer, once for each connection. Used on the event loop, except `of_holder`."""

    def __init__(self, holders: SocketHolders | None = None) -> None:
        self._holders = holders or SocketHolders(own_places())
        self._wanted: set[SocketOwner] = set()
        self._found: dict[SocketOwner, set[Place]] = {}
        self._turn = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, "gpumem-peers")
        self._rests_until_seconds = 0.0

    async def of(self, peer: Peer) -> PeerPlace:
        """Return the place of a peer, and keep it as `peer.where`. All holders of its socket must be in the same place.

        The place is unknown if the exporter cannot see which processes hold the socket.
        """
        if peer.where is None and peer.tcp is not None:
            self._wanted.add(peer.tcp)
            async with self._turn:
                # Turns come in the order of the calls: this one's socket was in the last pass, or is in the next one.
                if peer.tcp in self._wanted:
                    await self._search()
                places = self._found.get(peer.tcp, set())
            place = next(iter(places)) if len(places) == 1 else UNKNOWN
            peer.where = PeerPlace(place, certain=self._holders.created_in(peer.tcp) is not None)
        return peer.where or PeerPlace(UNKNOWN, certain=False)

    def of_holder(self, peer: Peer, pid: int | None) -> PeerPlace | None:
        """Return the place of a TCP peer that is this process, without a search; None if it is another process."""
        if peer.tcp is None or pid is None or (place := self._holders.place_of(pid, peer.tcp)) is None:
            return None
        return PeerPlace(place, certain=self._holders.created_in(peer.tcp) is not None)

    async def _search(self) -> None:
        """Find all sockets that are wanted now."""
        # Over loopback the kernel names only the user of a socket, so the search reads the descriptors of processes. It
        # runs in one thread of its own, and a pass serves all connections that wait for one: however many connections a
        # user opens, another user's waits for the current pass and the next one.
        loop = asyncio.get_running_loop()
        # At most half of the time, so that connections without end do not use a core.
        await asyncio.sleep(self._rests_until_seconds - loop.time())
        wanted, self._wanted, self._found = self._wanted, set(), {}
        started_seconds = loop.time()
        try:
            self._found = await loop.run_in_executor(self._thread, self._holders.places, tuple(wanted))
        finally:
            self._rests_until_seconds = 2 * loop.time() - started_seconds


@cache
def own_places() -> Places:
    """Return what finds the places of processes, as the exporter's own /proc shows them."""
    return Places()


def _unix_peer(uid: int | None, credentials: PeerCredentials, sock: socket.socket) -> Peer:
    """Return the peer of a unix socket. Its process is unknown if another process may have its pid by now."""
    unseen = Peer(uid=uid)
    pid, pidfd = credentials.pid, None
    try:
        # The pidfd first, and the check for an exit last: what is read in between is of the process that connected.
        pidfd = peer_pidfd(sock) if pid else None
        ticks, place = start_time_ticks(f"/proc/{pid}"), own_places().of(pid) if pid else UNKNOWN
        if not pid or (_has_exited(pidfd) if pidfd is not None else _uid(pid) != credentials.uid):
            return unseen
        return Peer(uid=uid, pid=pid, start_time_ticks=ticks, place=place)
    except OSError:
        return unseen  # it has exited
    finally:
        if pidfd is not None:
            os.close(pidfd)


def _has_exited(pidfd: int) -> bool:
    """Return whether the process has exited, so that another process may have its pid."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def _uid(pid: int) -> int | None:
    """Return the effective uid of a process: what is known of a reused pid before Linux 6.5."""
    status = ProcEntries(Path("/proc")).status(pid)
    return status.uid if status is not None else None


_OVERFLOW_UID = 65534


def _known(uid: int) -> int | None:
    """Return None for the uid that stands for every user outside of the exporter's user namespace."""
    return None if uid == _OVERFLOW_UID and not _has_every_uid() else uid


@cache
def _has_every_uid() -> bool:
    try:
        return Path("/proc/self/uid_map").read_text("ascii").split() == ["0", "0", "4294967295"]
    except OSError:
        return False
