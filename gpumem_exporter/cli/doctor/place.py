"""Is an exporter's address one of this machine's own?"""

from __future__ import annotations

import socket
from contextlib import closing
from urllib.parse import urlsplit

__all__ = ["is_on_this_machine"]


def is_on_this_machine(url: str) -> bool:
    """Whether an address leads back to this machine: a unix socket, or an IP address of its own.

    Sends nothing: connecting a datagram socket asks the kernel for a route, and the source address of a route to an
    address of one's own is that address, or another of the loopback. False for a name that cannot be resolved. A port
    that is forwarded here, as by `kubectl port-forward`, looks like this machine's.
    """
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return True
    try:
        found = socket.getaddrinfo(parts.hostname, parts.port or 9, type=socket.SOCK_DGRAM)
        return any(_leads_back(family, address) for family, _, _, _, address in found)
    except OSError:
        return False


def _leads_back(family: int, address: tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]) -> bool:
    try:
        with closing(socket.socket(family, socket.SOCK_DGRAM)) as probe:
            probe.connect(address)
            source = str(probe.getsockname()[0])
    except OSError:
        return False  # no route for this family
    return source == address[0] or source == "::1" or source.startswith("127.")
