"""Who owns the other end of a socket, according to the Linux kernel. Standard library only.

A unix socket has SO_PEERCRED (unix(7)). For TCP between two processes of one machine, `sock_diag` (sock_diag(7)) names
the uid and the inode of each socket, or /proc/net/tcp (proc_pid_net(5)) where a sandbox or the kernel lacks that. A
connection that comes through a proxy, a tunnel or a container's port mapping belongs to the process that forwards it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import sys
from collections.abc import Iterator
from typing import NamedTuple, Tuple


class PeerCredentials(NamedTuple):
    """SO_PEERCRED of a unix connection, in this process's namespaces. Pid 0: a process it cannot see."""

    pid: int
    uid: int
    gid: int


class SocketOwner(NamedTuple):
    """The owner of a TCP socket of this machine."""

    uid: int
    """The uid that created the socket, in this process's user namespace; the overflow uid if it has none there."""
    inode: int
    """The number in `socket:[INODE]` of /proc/PID/fd."""
    cgroup_id: int | None = None
    """The cgroup (version 2) of the process that created the socket: the inode of its folder. None before Linux 5.8."""


_Address = Tuple[str, int]

# `struct ucred`: pid, uid, gid.
_CREDENTIALS = struct.Struct("3i")

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLM_F_REQUEST, _NLM_F_DUMP = 1, 0x300
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_ANY_STATE, _LISTENING = 0xFFFFFFFF, 1 << 10
# The state of a listener in /proc/net/tcp.
_LISTEN = "0A"
_NO_COOKIE = 0xFFFFFFFF
# `struct nlmsghdr`: length, type, flags, sequence number, port.
_HEADER = struct.Struct("=IHHII")
# The start of `struct inet_diag_req_v2`: family, protocol, extensions, states.
_REQUEST = struct.Struct("=BBBxI")
_PORTS = struct.Struct("!HH")
_INTERFACE_AND_COOKIE = struct.Struct("=III")
# Where ports and local address are in the reply: in `struct inet_diag_msg` after family, state, timer, retransmissions.
_PORTS_OFFSET = _HEADER.size + 4
_ADDRESS_OFFSET = _PORTS_OFFSET + _PORTS.size
# Where uid and inode are: after `struct inet_diag_sockid`, expiry and the lengths of both queues.
_OWNER_OFFSET = _PORTS_OFFSET + 48 + 12
_OWNER = struct.Struct("=II")
_ATTRIBUTES_OFFSET = _OWNER_OFFSET + _OWNER.size
# `struct rtattr`: length and type; the value and the next attribute are aligned to 4 bytes.
_ATTRIBUTE = struct.Struct("=HH")
_INET_DIAG_CGROUP_ID = 21
_SO_PEERPIDFD = 77


def unix_peer(sock: socket.socket) -> PeerCredentials:
    """Return the process at the other end of a connected unix socket, as it was when it connected or listened."""
    return PeerCredentials(
        *_CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    )


def peer_pidfd(sock: socket.socket) -> int | None:
    """Return a new pidfd of the process at the other end of a unix socket; None before Linux 6.5.

    A pid may be reused while a connection waits to be accepted; a pidfd stays with the process that connected.

    Raises:
        OSError: the process has exited, or there is no free descriptor.
    """
    try:
        return sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError as error:
        if error.errno == errno.ENOPROTOOPT:
            return None
        raise


def tcp_peer_owner(sock: socket.socket) -> SocketOwner | None:
    """Return the owner of the other end of a TCP connection within this machine, in about 20 microseconds.

    None if the other end is on another machine or in another network namespace, has been closed, or was not accepted.
    """
    try:
        return _owner(sock.getpeername()[:2], sock.getsockname()[:2])
    except OSError:
        return None


def tcp_listener_owner(address: tuple[str, int]) -> SocketOwner | None:
    """Return the owner of the socket that listens at an address of this machine; None if there is none.

    A connection that the listener has not accepted yet has no owner of its own.
    """
    try:
        return _owner(address, None)
    except OSError:
        return None


def listening_sockets() -> list[tuple[tuple[str, int], int]]:
    """Return the address on loopback and the inode of each socket that listens there, in this network namespace.

    There is none if the kernel does not answer such questions.
    """
    found = []
    with contextlib.suppress(OSError):
        for family, loopback in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
            for reply in _ask(family, ("", 0), ("", 0), _LISTENING, _NLM_F_DUMP):
                packed = reply[_ADDRESS_OFFSET : _ADDRESS_OFFSET + (4 if family == socket.AF_INET else 16)]
                host, port = _unmapped((socket.inet_ntop(family, packed), _PORTS.unpack_from(reply, _PORTS_OFFSET)[0]))
                host = host if any(packed) else loopback
                if host == loopback or host.startswith("127."):
                    found.append(((host, port), _OWNER.unpack_from(reply, _OWNER_OFFSET)[1]))
    return found


def user_name(uid: int) -> str:
    """Return a user for messages: the name, or `uid 1001` if it has none."""
    import pwd  # only for messages

    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"uid {uid}"


def _owner(local: _Address, remote: _Address | None) -> SocketOwner | None:
    """Return the owner of the socket with these addresses; without a remote address, of the listener."""
    local, remote = _unmapped(local), _unmapped(remote) if remote is not None else None
    try:
        found = _from_sock_diag(local, remote)
    except OSError:
        found = _from_proc(local, remote)
    # A socket without a file, such as a connection that was not accepted yet, belongs to no process. The kernel shows
    # uid 0 for it, which must not be taken for root.
    return found if found is not None and found.inode else None


def _from_sock_diag(local: _Address, remote: _Address | None) -> SocketOwner | None:
    family = socket.AF_INET6 if ":" in local[0] else socket.AF_INET
    to = remote if remote is not None else ("", 0)
    for reply in _ask(family, local, to, _ANY_STATE):
        # Where the connection is not found, the kernel returns the listener of that port.
        if _PORTS.unpack_from(reply, _PORTS_OFFSET) == (local[1], to[1]):
            uid, inode = _OWNER.unpack_from(reply, _OWNER_OFFSET)
            return SocketOwner(uid, inode, _cgroup_id(reply))
    return None


def _from_proc(local: _Address, remote: _Address | None) -> SocketOwner | None:
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(FileNotFoundError), open(table) as lines:  # noqa: PTH123 - pathlib is not imported here
            next(lines)
            for row in (line.split(None, 10) for line in lines):
                own, other = map(_address, row[1:3])
                listens = row[3] == _LISTEN and own[1] == local[1] and own[0] in (local[0], "0.0.0.0", "::")
                if listens if remote is None else (own, other) == (local, remote):
                    return SocketOwner(int(row[7]), int(row[9]))
    return None


def _address(text: str) -> _Address:
    """Return an address of /proc/net/tcp, whose host is words of 32 bits in the machine's byte order."""
    host, port = text.split(":")
    packed = b"".join(int(host[start : start + 8], 16).to_bytes(4, sys.byteorder) for start in range(0, len(host), 8))
    family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
    return _unmapped((socket.inet_ntop(family, packed), int(port, 16)))


def _unmapped(address: _Address) -> _Address:
    """Return an IPv4 address for its IPv6-mapped form, and an address without its zone."""
    # The kernel finds sockets of both families by the IPv4 address.
    host = address[0][7:] if address[0].startswith("::ffff:") else address[0]
    return host.partition("%")[0], address[1]


def _ask(family: int, local: _Address, remote: _Address, states: int, flags: int = 0) -> Iterator[bytes]:
    """Yield the kernel's messages about one socket, or about all in some states with `_NLM_F_DUMP`.

    Raises:
        OSError: the kernel does not answer such questions.
    """
    everywhere = "::" if family == socket.AF_INET6 else "0.0.0.0"
    request = (
        _REQUEST.pack(family, socket.IPPROTO_TCP, 0, states)
        + _PORTS.pack(local[1], remote[1])
        + socket.inet_pton(family, local[0] or everywhere).ljust(16, b"\0")
        + socket.inet_pton(family, remote[0] or everywhere).ljust(16, b"\0")
        + _INTERFACE_AND_COOKIE.pack(0, _NO_COOKIE, _NO_COOKIE)
    )
    header = _HEADER.pack(_HEADER.size + len(request), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST | flags, 0, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG) as netlink:
        netlink.settimeout(1.0)
        netlink.send(header + request)
        while True:
            reply = netlink.recv(1 << 16)
            while reply:
                length, kind = _HEADER.unpack_from(reply)[:2]
                if kind == _NLMSG_DONE:
                    return
                if kind == _NLMSG_ERROR:
                    error = -struct.unpack_from("=i", reply, _HEADER.size)[0]
                    if error == errno.ENOENT:  # there is no such socket
                        return
                    raise OSError(error, os.strerror(error))
                yield reply[:length]
                reply = reply[(length + 3) & ~3 :]
            if not flags:
                return


def _cgroup_id(reply: bytes) -> int | None:
    """Return the cgroup of a reply of `sock_diag`."""
    position = _ATTRIBUTES_OFFSET
    while position + _ATTRIBUTE.size <= len(reply):
        length, kind = _ATTRIBUTE.unpack_from(reply, position)
        if length < _ATTRIBUTE.size:
            break
        if kind == _INET_DIAG_CGROUP_ID:
            return int.from_bytes(reply[position + _ATTRIBUTE.size : position + length], sys.byteorder)
        position += (length + 3) & ~3
    return None
