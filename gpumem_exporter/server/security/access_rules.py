"""Who asks, and whether they may. Pure: decided from the connection and the headers alone."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from gpumem_exporter.actions.caller import Caller, CallerKind
from gpumem_exporter.server.http.addresses import is_loopback
from gpumem_exporter.server.http.problems import ProblemError
from gpumem_exporter.server.security.tokens import TokenFile

__all__ = ["OwnNames", "Peer", "PeerCredentials", "Rule"]


class PeerCredentials(NamedTuple):
    """SO_PEERCRED of a unix connection, in the exporter's own namespaces. Pid 0: a process it cannot see."""

    pid: int
    uid: int
    gid: int


@dataclass(frozen=True, slots=True)
class Peer:
    """The other end of a connection."""

    host: str
    """The peer's address; empty for a unix socket."""
    credentials: PeerCredentials | None
    """None for TCP."""

    @classmethod
    def of(cls, scope: Mapping[str, Any]) -> Peer:
        """The peer of an ASGI request."""
        client = scope.get("client")
        # A socket that listens for both families calls an IPv4 peer by its IPv6-mapped address.
        host = client[0].removeprefix("::ffff:") if client else ""
        return cls(host, scope.get("state", {}).get("peer_credentials"))

    def caller(self, *, token: bool = False) -> Caller:
        """The peer as the caller of an action, with the right token or without."""
        if self.credentials is not None:
            return Caller(CallerKind.UNIX, uid=self.credentials.uid, pid=self.credentials.pid, token=token)
        return Caller(CallerKind.TCP if self.host else CallerKind.UNKNOWN, host=self.host, token=token)


@dataclass(frozen=True, slots=True)
class Rule:
    """Who may use a route.

    Args:
        what: what is done there, for messages: "actions".
        flag: the flag that names the token file.
        token: the token, which is then asked of everybody; without one, loopback and the socket's owner may.
        owner_uid: the uid that the exporter runs as.
    """

    what: str
    flag: str
    token: TokenFile | None
    owner_uid: int

    def admit(self, peer: Peer, headers: Mapping[bytes, bytes]) -> Caller:
        """Admit a request and return its caller.

        Raises:
            ProblemError: 401 for a missing or wrong token, 403 if this exporter has no token; says what to do.
        """
        if self.token is not None:
            if self.opened_by(headers):
                return peer.caller(token=True)
            bearer = headers.get(b"authorization", b"").lower().startswith(b"bearer")
            wrong = "the token is not right" if bearer else "a token is needed"
            raise ProblemError(
                401,
                f"{self.what}: {wrong}; send `Authorization: Bearer TOKEN`, the token of the exporter's {self.flag}",
                {"WWW-Authenticate": 'Bearer realm="gpumem-exporter"'},
            )
        if peer.credentials is not None:
            if peer.credentials.uid in (0, self.owner_uid):
                return peer.caller()
            raise ProblemError(
                403,
                f"{self.what} are open to the socket's owner (uid {self.owner_uid}) and root, not to uid "
                f"{peer.credentials.uid}; start the exporter with {self.flag} and send that token as "
                "`Authorization: Bearer TOKEN`",
            )
        if is_loopback(peer.host) and not _FORWARDED.intersection(headers):
            return peer.caller()
        through = "through a proxy" if is_loopback(peer.host) else f"from {peer.host or 'an unknown peer'}"
        raise ProblemError(
            403,
            f"{self.what} are open to this machine's loopback and to the unix socket's owner, not {through}; start the "
            f"exporter with {self.flag} and send that token as `Authorization: Bearer TOKEN`",
        )

    def opened_by(self, headers: Mapping[bytes, bytes]) -> bool:
        """Whether a request brings this rule's token."""
        scheme, _, presented = headers.get(b"authorization", b"").partition(b" ")
        return self.token is not None and scheme.lower() == b"bearer" and self.token.matches(presented.strip())


_FORWARDED = frozenset((b"forwarded", b"x-forwarded-for", b"x-real-ip", b"via"))
"""Whoever sends one of these was spoken for by a proxy: the loopback address is the proxy's, not the caller's."""


_LOOPBACK_NAMES = frozenset(("localhost", "ip6-localhost", "127.0.0.1", "::1"))


class OwnNames:
    """The names under which the exporter is reached: what `Host` and `Origin` may say.

    A page of another site that resolves its own name to this machine's address (DNS rebinding) gives itself away by
    that name. An IP address cannot be rebound, so every IP address is fine.

    Args:
        names: the machine's names and those of `--web.listen-address`.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(name.lower().rstrip(".") for name in names if name) | _LOOPBACK_NAMES

    def __contains__(self, authority: object) -> bool:
        """Whether `host` or `host:port`, as a `Host` header has it, is the exporter's."""
        if not isinstance(authority, str):
            return False
        host = _host_of(authority).lower().rstrip(".")
        if host in self._names:
            return True
        try:
            ipaddress.ip_address(host)
        except ValueError:
            return False
        return True

    def require_own_page(self, headers: Mapping[bytes, bytes]) -> None:
        """Refuse a request that the browser says another site's page has made.

        Raises:
            ProblemError: 403.
        """
        origin = headers.get(b"origin")
        if origin is not None:
            scheme, separator, authority = origin.decode("latin-1").lower().partition("://")
            host = headers.get(b"host", b"").decode("latin-1").lower()
            if not separator or scheme not in ("http", "https") or authority != host:
                raise ProblemError(
                    403, f"requests from the web page {_shown(origin)} are refused: it is not the exporter's"
                )
        if headers.get(b"sec-fetch-site") in (b"cross-site", b"same-site"):
            raise ProblemError(403, "requests from other sites' web pages are refused")

    def require_own_host(self, headers: Mapping[bytes, bytes]) -> None:
        """Refuse a request that was sent to another name.

        Raises:
            ProblemError: 403.
        """
        host = headers.get(b"host", b"")
        if host and host.decode("latin-1") not in self:
            raise ProblemError(
                403,
                f"the Host {_shown(host)} is not this exporter's: use its IP address, its machine's name or a token",
            )


def _host_of(authority: str) -> str:
    if authority.startswith("["):
        return authority[1:].partition("]")[0]
    return authority.partition(":")[0]


def _shown(value: bytes) -> str:
    return repr(value[:200].decode("latin-1"))
