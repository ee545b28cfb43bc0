"""A socket in a process whose descriptors belong to somebody else.

A program may close descriptors that it has never heard of, or put a file of its own in their place (`os.closerange`,
`os.dup2`): what is sent under the number, read from it or closed by it would then be the program's. So each use first
asks whether the number still means this socket.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket

__all__ = ["OwnSocket", "own_descriptor"]

_SO_COOKIE = 57
"""linux/socket.h, from 4.6 on: 8 bytes which no other socket has."""
_LEAST_DESCRIPTORS = (512, 3)
"""Out of the way of a program that puts files at numbers of its choice, or counts on the lowest; never a standard
stream's, which a program that was started without them may open later."""


def own_descriptor(sock: socket.socket) -> socket.socket:
    """The same socket under a number that the program will hardly choose; `sock` is closed.

    Raises:
        OSError: no descriptor is left, and the last ones are the program's.
    """
    try:
        for least in _LEAST_DESCRIPTORS:
            with contextlib.suppress(OSError):  # the process may have no such numbers
                descriptor = fcntl.fcntl(sock.fileno(), fcntl.F_DUPFD_CLOEXEC, least)
                return socket.socket(sock.family, sock.type, sock.proto, fileno=descriptor)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    finally:
        sock.close()


class OwnSocket:
    """A connected socket that leaves alone whatever else has got its number.

    Its methods are the socket's, and raise ConnectionResetError, or do nothing, where the number is another file's.
    """

    __slots__ = ("_mark", "_socket")

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._mark = _mark(sock)

    def sendall(self, data: bytes) -> None:
        """Send all bytes."""
        self._own().sendall(data)

    def recv(self, size: int) -> bytes:
        """Receive at most `size` bytes."""
        return self._own().recv(size)

    def settimeout(self, seconds: float) -> None:
        """Set the timeout of each call."""
        self._own().settimeout(seconds)

    def setsockopt(self, level: int, option: int, value: bytes) -> None:
        """Set a socket option."""
        self._own().setsockopt(level, option, value)

    def interrupt(self) -> None:
        """End what waits for it in another thread."""
        with contextlib.suppress(OSError):
            # Not a TLS socket's own, which would have it go on without TLS until it is shut down.
            socket.socket.shutdown(self._own(), socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket if its descriptor is still the client's."""
        if self._is_own():
            self._socket.close()
        else:
            self._socket.detach()  # or the number would be closed with the object

    def _own(self) -> socket.socket:
        if not self._is_own():
            raise ConnectionResetError("the program has closed the connection's descriptor")
        return self._socket

    def _is_own(self) -> bool:
        try:
            return _mark(self._socket) == self._mark
        except OSError:
            return False


def _mark(sock: socket.socket) -> object:
    """What tells this socket from all other files. Without letting go of the GIL, where the kernel allows that."""
    try:
        return sock.getsockopt(socket.SOL_SOCKET, _SO_COOKIE, 8)
    except OSError:
        status = os.fstat(sock.fileno())
        return status.st_dev, status.st_ino
