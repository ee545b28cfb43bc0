"""Another user of the machine: connections, and a server that records what it receives.

The kernel names the effective user that created a socket and connected it.
"""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401 - the socket module imports it later, as another user who cannot read it
import os
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.waiting import wait_for

OTHER_UID = 1001
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as other users")


@contextlib.contextmanager
def acting_as(uid: int) -> Iterator[None]:
    """Create and connect sockets as this user. Only root can."""
    before = os.geteuid()
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(before)


@dataclass(frozen=True, slots=True)
class RogueServer:
    """A server at an address of the exporter."""

    url: str
    log: Path
    connections: Path

    def received(self) -> bytes:
        """Everything that clients have sent."""
        return self.log.read_bytes()

    def connected(self) -> int:
        """The number of connections that clients have opened."""
        return self.connections.stat().st_size


@contextlib.contextmanager
def rogue_server(folder: Path, socket_path: Path | None = None) -> Iterator[RogueServer]:
    """Run a server of another user, on loopback or at a path of a unix socket. It answers every request with 200."""
    log, connections = folder / "received", folder / "connections"
    with log.open("ab", buffering=0) as received, connections.open("ab", buffering=0) as connected:
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            _serve(received.fileno(), connected.fileno(), writer, socket_path)
    os.close(writer)
    try:
        with os.fdopen(reader) as ready:
            port = ready.readline().strip()
        assert port, "the server did not start"
        yield RogueServer(f"unix://{socket_path}" if socket_path else f"http://127.0.0.1:{port}", log, connections)
    finally:
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: os.waitpid(pid, os.WNOHANG)[0] == pid, "the end of the server")


def _serve(log: int, connections: int, ready: int, socket_path: Path | None) -> None:
    """The child: only system calls, because the parent may have threads."""
    try:
        os.setgroups([])
        os.setgid(OTHER_UID)
        os.setuid(OTHER_UID)
        if socket_path is None:
            listener = socket.socket()
            listener.bind(("127.0.0.1", 0))
        else:
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(str(socket_path))
        listener.listen()
        os.write(ready, f"{listener.getsockname()[1] if socket_path is None else 1}\n".encode())
        while True:
            connection, _ = listener.accept()
            os.write(connections, b".")
            while data := connection.recv(65536):
                os.write(log, data)
                if b"\r\n\r\n" in data:
                    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
            connection.close()
    finally:
        os._exit(1)
