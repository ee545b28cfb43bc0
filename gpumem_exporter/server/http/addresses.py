"""The addresses of `--web.listen-address`: `host:port`, `[ipv6]:port`, or `:port` for every address of the machine."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

_HOST_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_])?")


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """A TCP address to listen on. An empty host means every IPv4 and IPv6 address of the machine."""

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches it."""
        return self.host == "localhost" or is_loopback(self.host)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_listen_address(text: str) -> ListenAddress:
    """Parse an address, or raise ValueError with the accepted forms. With port 0 the kernel chooses the port."""
    wrong = ValueError("expected HOST:PORT, [IPV6]:PORT or :PORT")
    host, separator, port = text.strip().rpartition(":")
    if not separator or not port.isascii() or not port.isdecimal() or len(port) > 5 or int(port) > 65535:
        raise wrong
    if host.startswith("[") and host.endswith("]"):
        try:
            return ListenAddress(str(ipaddress.IPv6Address(host[1:-1])), int(port))
        except ValueError:
            raise wrong from None
    if host and not _HOST_NAME.fullmatch(host):
        raise wrong
    return ListenAddress(host, int(port))


def is_loopback(host: str) -> bool:
    """Return whether the address of a peer is a loopback address of this machine."""
    return host == "::1" or host.startswith(("127.", "::ffff:127."))
