"""Finds the ports of loopback on which a process listens, according to the kernel.

The exporter sees only its own network namespace. A process counts as the listener if it holds the descriptor of the
socket, and the socket is of its user and was created in its cgroup: see `host.sockets`.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import NamedTuple

from gpumem_client.wire.peer import SocketOwner, listening_sockets, tcp_listener_owner
from gpumem_client.wire.trust import Trust
from gpumem_exporter.core.container import Place
from gpumem_exporter.node.sockets import SocketHolders


class Listener(NamedTuple):
    """A socket that listens on loopback."""

    address: tuple[str, int]
    """Of loopback."""
    inode: int


@dataclass(frozen=True)
class ListenerTrust(Trust):
    """Accepts a server if the socket that listens at its address is this one. Checked before anything is sent."""

    inode: int = 0

    def objection(self, sock: socket.socket, _path: str) -> str:
        """Return why the server is not accepted; empty if it is."""
        owner = tcp_listener_owner(sock.getpeername()[:2])
        return "" if owner is not None and owner.inode == self.inode else "another process listens there"


class Listeners:
    """The sockets that listened on loopback at one time. Reading them takes some milliseconds."""

    def __init__(self, holders: SocketHolders) -> None:
        self._holders = holders
        self._by_uid: dict[int, dict[int, tuple[tuple[str, int], SocketOwner]]] = {}
        for address, inode in listening_sockets():
            owner = tcp_listener_owner(address)
            if owner is not None and owner.inode == inode:
                self._by_uid.setdefault(owner.uid, {})[owner.inode] = address, owner

    def of(self, pid: int, uid: int, place: Place) -> tuple[Listener, ...]:
        """Return the sockets of a process, which must be of this user and in this place."""
        candidates = self._by_uid.get(uid, {})
        owners = {inode: owner for inode, (_, owner) in candidates.items()}
        held = self._holders.sockets_of(pid, owners) if owners else []
        return tuple(
            Listener(candidates[inode][0], inode)
            for inode in held
            if self._holders.place_of(pid, owners[inode]) == place
        )
