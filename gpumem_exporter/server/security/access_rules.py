"""The caller of a request and its rights. Pure: derived from the connection and the headers."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gpumem_exporter.actions.caller import Caller, CallerKind
from gpumem_exporter.server.http.addresses import is_loopback
from gpumem_exporter.server.http.problems import ProblemError
from gpumem_exporter.server.security.peer import Peer
from gpumem_exporter.server.security.tokens import TokenFile

__all__ = ["OwnNames", "Rule"]


@dataclass(frozen=True, slots=True)
class Rule:
    """The callers that may use a group of routes.

    Args:
        what: the subject of the routes, for messages: "actions".
        flag: the flag of the token file.
        token: required from every caller; None admits loopback, root and the exporter's own uid.
        owner_uid: the uid of the exporter.
        any_user: whether without a token every user of this machine is admitted on the unix socket as well.
    """

    what: str
    flag: str
    token: TokenFile | None
    owner_uid: int
    any_user: bool = False

    def admit(self, peer: Peer, headers: Mapping[bytes, bytes]) -> Caller:
        """Admit a request and return its caller.

        Raises:
            ProblemError: 401 for a missing or wrong token; 403 if the exporter has no token and the caller no right.
        """
        if self.token is not None:
            if self.matches_token(headers):
                return _caller(peer, token=True)
            bearer = headers.get(b"authorization", b"").lower().startswith(b"bearer")
            wrong = "wrong token" if bearer else "a token is required"
            raise ProblemError(
                401,
                f"{self.what}: {wrong}; send `Authorization: Bearer TOKEN`, the token of the exporter's {self.flag}",
                {"WWW-Authenticate": 'Bearer realm="gpumem-exporter"'},
            )
        if peer.on_unix_socket:
            if self.any_user or peer.uid in (0, self.owner_uid):
                return _caller(peer)
            raise ProblemError(
                403,
                f"{self.what} are allowed for the exporter's uid {self.owner_uid} and root, not for uid "
                f"{peer.uid}; start the exporter with {self.flag} and send that token as "
                "`Authorization: Bearer TOKEN`",
            )
        if peer.uid is not None:
            return _caller(peer)
        place = f"from {peer.host or 'an unknown peer'}"
        if is_loopback(peer.host):
            place = "through a proxy, nor from a user that the kernel does not name"
        raise ProblemError(
            403,
            f"{self.what} are allowed over loopback and the unix socket, not {place}; start the "
            f"exporter with {self.flag} and send that token as `Authorization: Bearer TOKEN`",
        )

    def matches_token(self, headers: Mapping[bytes, bytes]) -> bool:
        """Return whether a request has this rule's token."""
        scheme, _, presented = headers.get(b"authorization", b"").partition(b" ")
        return self.token is not None and scheme.lower() == b"bearer" and self.token.matches(presented.strip())


def _caller(peer: Peer, *, token: bool = False) -> Caller:
    """Return the peer as the caller of an action, authenticated by a token or not."""
    if peer.on_unix_socket:
        return Caller(CallerKind.UNIX, uid=peer.uid, pid=peer.pid, token=token)
    return Caller(CallerKind.TCP if peer.host else CallerKind.UNKNOWN, host=peer.host, token=token)


_LOOPBACK_NAMES = frozenset(("localhost", "ip6-localhost", "127.0.0.1", "::1"))


class OwnNames:
    """The names of the exporter that `Host` and `Origin` may have.

    In a DNS rebinding attack, another site's name resolves to this machine's address; the name reveals the attack. An
    IP address cannot be rebound, so every IP address is accepted.

    Args:
        names: the machine's names and those of `--web.listen-address`.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(name.lower().rstrip(".") for name in names if name) | _LOOPBACK_NAMES

    def __contains__(self, authority: object) -> bool:
        """Return whether the `host` or `host:port` of a `Host` header is the exporter's."""
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
        """Refuse a request that a browser marks as made by another site's page.

        Raises:
            ProblemError: 403.
        """
        origin = headers.get(b"origin")
        if origin is not None:
            scheme, separator, authority = origin.decode("latin-1").lower().partition("://")
            host = headers.get(b"host", b"").decode("latin-1").lower()
            if not separator or scheme not in ("http", "https") or authority != host:
                raise ProblemError(
                    403, f"requests from the web page {_shown(origin)} are refused: it is not a page of the exporter"
                )
        if headers.get(b"sec-fetch-site") in (b"cross-site", b"same-site"):
            raise ProblemError(403, "requests from other sites' web pages are refused")

    def require_own_host(self, headers: Mapping[bytes, bytes]) -> None:
        """Refuse a request for another host name.

        Raises:
            ProblemError: 403.
        """
        host = headers.get(b"host", b"")
        if host and host.decode("latin-1") not in self:
            raise ProblemError(
                403,
                f"the Host {_shown(host)} is not this exporter's: use its IP address, the machine's name or a token",
            )


def _host_of(authority: str) -> str:
    if authority.startswith("["):
        return authority[1:].partition("]")[0]
    return authority.partition(":")[0]


def _shown(value: bytes) -> str:
    return repr(value[:200].decode("latin-1"))
