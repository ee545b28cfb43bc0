"""TCP ports for servers with a known port, also after a restart. Other servers listen on port 0."""

from __future__ import annotations

import itertools
import os
import socket
from pathlib import Path

_LOWEST = 15_000
_EPHEMERAL = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
_COUNT = _EPHEMERAL - _LOWEST
_candidates = (_LOWEST + (os.getpid() * 97 + number) % _COUNT for number in itertools.count())


def free_port() -> int:
    """Return a port of 127.0.0.1 on which no server listens, and that this process has not returned before.

    The port is below the range that the kernel uses for connections and for servers on port 0, so no other program
    gets it before the caller uses it.
    """
    for port in _candidates:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("unreachable: the candidates have no end")
