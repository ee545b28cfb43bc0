"""A server of raw sockets that does with each connection what a test wants."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.support.waiting import patient

Talk = Callable[[socket.socket, int], None]
"""What the server does with its nth connection, in a thread of its own. An OSError ends it."""


@dataclass(frozen=True)
class ScriptedPeer:
    """A running server: its URL, and all connections that it accepted."""

    url: str
    connections: list[socket.socket]


@contextlib.contextmanager
def scripted_peer(talk: Talk, address: str | tuple[str, int]) -> Iterator[ScriptedPeer]:
    """Listen on a TCP address, or on the unix socket of a path, until the end of the block."""
    unix = isinstance(address, str)
    listener = socket.socket(socket.AF_UNIX if unix else socket.AF_INET)
    listener.bind(address)
    listener.listen(64)
    opened: list[socket.socket] = []

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                opened.append(connection)
                threading.Thread(target=quietly, args=(connection, len(opened)), daemon=True).start()

    def quietly(connection: socket.socket, number: int) -> None:
        with contextlib.suppress(OSError):
            talk(connection, number)

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        name = listener.getsockname()
        yield ScriptedPeer(f"unix://{name}" if unix else f"http://127.0.0.1:{name[1]}", opened)
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(patient(60))
        for each in (listener, *opened):
            each.close()
