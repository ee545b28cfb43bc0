"""The other end of a connection, as the kernel identifies it."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from gpumem_client.wire.peer import PeerCredentials, SocketOwner, peer_pidfd, tcp_peer_owner, unix_peer
from gpumem_client.wire.procfs import start_time_ticks
from gpumem_exporter.core.place import UNKNOWN, Place
from gpumem_exporter.host.places import Places
from gpumem_exporter.host.proc_entries import ProcEntries
from gpumem_exporter.server.http.addresses import is_loopback

__all__ = ["Peer", "own_places"]

_FORWARDED = frozenset((b"forwarded", b"x-forwarded-for", b"x-real-ip", b"via"))
"""Headers of proxies: the connection is then the proxy's, not the caller's."""


@dataclass(frozen=True, eq=False)
class Peer:
    """The process at the other end of a connection, in the exporter's namespaces.

    Attributes:
        host: Address of a TCP peer; empty for a unix socket.
        uid: Its user; None for another machine, for a proxy, and where the kernel does not know it.
        pid: Of a unix socket's peer; 0 if the exporter cannot see that process, and for TCP.
        start_time_ticks: When that process started.
        place: Where that process runs; see `server.security.peer_places` for TCP.
        tcp: The peer's TCP socket on this machine; None if unknown.
    """

    host: str = ""
    uid: int | None = None
    pid: int = 0
    start_time_ticks: int = 0
    place: Place = UNKNOWN
    tcp: SocketOwner | None = None

    @classmethod
    def of_socket(cls, sock: socket.socket | None) -> Peer:
        """Identify the peer of a new connection. Takes some 20 microseconds for loopback, and 80 for a unix socket."""
        if sock is None:
            return cls()
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

    @classmethod
    def of(cls, scope: Mapping[str, Any]) -> Peer:
        """Return the peer of an ASGI request; a request that a proxy forwards has no known user, on a socket too."""
        peer: Peer = scope.get("state", {}).get("peer") or cls()
        forwarded = not _FORWARDED.isdisjoint(dict(scope.get("headers", ())))
        return cls(peer.host) if forwarded else peer

    @property
    def on_unix_socket(self) -> bool:
        """Whether the peer is connected to the unix socket, whose peer the kernel always knows."""
        return not self.host and self.uid is not None


@cache
def own_places() -> Places:
    """Return what finds the places of processes, as the exporter's own /proc shows them."""
    return Places()


def _unix_peer(uid: int | None, credentials: PeerCredentials, sock: socket.socket) -> Peer:
    """Return the peer of a unix socket. Its process is unknown if another process may have its pid by now."""
    unseen = Peer(uid=uid)
    pid, pidfd = credentials.pid, None
    try:
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
