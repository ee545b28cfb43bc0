"""The other end of a connection, as the kernel identifies it."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from gpumem_exporter.host.containers import container_id
from gpumem_exporter.procfs import pid_namespace
from gpumem_exporter.server.http.addresses import is_loopback
from gpumem_exporter.wire.peer import socket_pid, tcp_peer_owner, unix_peer

__all__ = ["Peer", "Place"]

_FORWARDED = frozenset((b"forwarded", b"x-forwarded-for", b"x-real-ip", b"via"))
"""Headers of proxies: the connection is then the proxy's, not the caller's."""


@dataclass(frozen=True)
class Peer:
    """The process at the other end of a connection, in the exporter's namespaces.

    Attributes:
        host: Address of a TCP peer; empty for a unix socket.
        uid: Its user; None for another machine, for a proxy, and where the kernel does not know it.
        pid: Of a unix socket's peer; 0 if the exporter cannot see that process, and for TCP.
        inode: Of the peer's TCP socket on this machine; 0 if unknown.
    """

    host: str = ""
    uid: int | None = None
    pid: int = 0
    inode: int = 0

    @classmethod
    def of_socket(cls, sock: socket.socket | None) -> Peer:
        """Identify the peer of a new connection. Takes some 20 microseconds for loopback."""
        if sock is None:
            return cls()
        if sock.family == socket.AF_UNIX:
            credentials = unix_peer(sock)
            peer = cls(uid=_known(credentials.uid), pid=credentials.pid)
            if credentials.uid in (0, os.geteuid()):
                _ = peer.place  # while the process certainly exists: its pid may be used again
            return peer
        try:
            # A socket for both address families reports an IPv4 peer by its IPv6-mapped address.
            host = sock.getpeername()[0].removeprefix("::ffff:")
        except OSError:
            return cls()  # it has closed the connection
        owner = tcp_peer_owner(sock) if is_loopback(host) else None
        return cls(host) if owner is None else cls(host, uid=_known(owner.uid), inode=owner.inode)

    @classmethod
    def of(cls, scope: Mapping[str, Any]) -> Peer:
        """Return the peer of an ASGI request; a request that a proxy forwards has no known user, on a socket too."""
        peer: Peer = scope.get("state", {}).get("peer") or cls()
        forwarded = any(name in _FORWARDED for name, _ in scope.get("headers", ()))
        return cls(peer.host) if forwarded else peer

    @property
    def on_unix_socket(self) -> bool:
        """Whether the peer is connected to the unix socket, whose peer the kernel always knows."""
        return not self.host and self.uid is not None

    @cached_property
    def process(self) -> int | None:
        """The pid; None if the exporter cannot see it. Reads the descriptors of all processes for a TCP connection."""
        return self.pid or (socket_pid(self.inode) if self.inode else None)

    @cached_property
    def place(self) -> Place:
        """Where the process runs. May take as long as `process`."""
        pid = self.process
        if pid is None:
            return Place(in_own_namespaces=False, container="")
        if _namespaces(str(pid)) == _own_namespaces():
            return Place(in_own_namespaces=True, container="")
        return Place(in_own_namespaces=False, container=_container(str(pid)))

    def in_own_namespaces(self) -> bool:
        """Return whether the peer is in the exporter's PID and user namespace, and not in a container of its own.

        False if the process cannot be seen.
        """
        return self.place.in_own_namespaces


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process runs."""

    in_own_namespaces: bool
    """In the exporter's PID and user namespace; False if the process cannot be seen."""
    container: str
    """The id of its container by its cgroup, else `pid:[INODE]`, its PID namespace.

    Empty in the exporter's namespaces, and if the process cannot be seen.
    """


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


@cache
def _own_namespaces() -> tuple[int, str] | None:
    return _namespaces("self")


def _namespaces(pid: str) -> tuple[int, str] | None:
    """Return the depth of a process's PID namespace below /proc's, and the map of its user namespace.

    Unlike /proc/PID/ns, both are readable without the right to trace the process.
    """
    entry = Path("/proc", pid)
    try:
        status = (entry / "status").read_text("utf-8", "replace").splitlines()
        depth = next(len(line.split()) - 1 for line in status if line.startswith("NSpid:"))
        return depth, (entry / "uid_map").read_text("utf-8")
    except (OSError, StopIteration):
        return None


def _container(pid: str) -> str:
    try:
        by_cgroup = container_id(Path("/proc", pid, "cgroup").read_text("utf-8", "replace"))
    except OSError:
        by_cgroup = ""
    namespace = pid_namespace(f"/proc/{pid}")
    return by_cgroup or (f"pid:[{namespace}]" if namespace else "")
