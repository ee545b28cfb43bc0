"""The callers of requests and their rights: derived from the connection and the headers, once for each request."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gpumem_exporter.actions.caller import Caller, CallerKind, Rights
from gpumem_exporter.server.http.addresses import is_loopback
from gpumem_exporter.server.http.peer import Peer, PeerPlaces
from gpumem_exporter.server.http.problems import ProblemError
from gpumem_exporter.server.security.tokens import TokenFile


@dataclass(frozen=True, slots=True)
class Rule:
    """The clients that may use a group of routes: with a token file the clients with its token, else local users."""

    what: str
    """The subject of the routes, for messages: "actions"."""
    flag: str
    """The flag of the token file."""
    token: TokenFile | None
    """Required from every client; None admits every user of this machine."""

    def admit(self, peer: Peer, headers: Mapping[bytes, bytes]) -> None:
        """Raise the ProblemError of a client that is refused."""
        if (problem := self.refusal(peer, headers)) is not None:
            raise problem

    def refusal(self, peer: Peer, headers: Mapping[bytes, bytes]) -> ProblemError | None:
        """Return why a client is refused; None if it is admitted.

        401: a missing or wrong token. 403: the exporter has no token and cannot identify the user.
        """
        if self.token is not None:
            return None if self.matches_token(headers) else self._unauthorized(headers)
        if peer.uid is not None:
            return None
        place = f"from {peer.host}"
        if not peer.host or is_loopback(peer.host):
            place = "through a proxy, nor from a user that the kernel does not name"
        return ProblemError(
            403,
            f"{self.what} are allowed over loopback and the unix socket, not {place}; start the "
            f"exporter with {self.flag} and send that token as `Authorization: Bearer TOKEN`",
        )

    def matches_token(self, headers: Mapping[bytes, bytes]) -> bool:
        """Return whether a request has this rule's token."""
        scheme, _, presented = headers.get(b"authorization", b"").partition(b" ")
        return self.token is not None and scheme.lower() == b"bearer" and self.token.matches(presented.strip())

    def _unauthorized(self, headers: Mapping[bytes, bytes]) -> ProblemError:
        bearer = headers.get(b"authorization", b"").lower().startswith(b"bearer")
        wrong = "wrong token" if bearer else "a token is required"
        return ProblemError(
            401,
            f"{self.what}: {wrong}; send `Authorization: Bearer TOKEN`, the token of the exporter's {self.flag}",
            {"WWW-Authenticate": 'Bearer realm="gpumem-exporter"'},
        )


@dataclass(frozen=True, slots=True)
class Callers:
    """Identifies the callers of actions and decides their rights.

    The token grants every right. Without a token file, root and the exporter's own user have every right if they are
    in the exporter's PID and user namespace and in no container; any other user of this machine may act on its own
    processes, and in a container only on processes in the same container. A caller in an unknown place has no rights.
    """

    rule: Rule
    """For actions."""
    owner_uid: int = field(default_factory=os.geteuid)
    """The uid of the exporter."""
    places: PeerPlaces = field(default_factory=PeerPlaces)

    async def of(self, scope: Mapping[str, Any]) -> Caller:
        """Return the caller of an ASGI request. It has no rights if the rule refuses the request."""
        peer: Peer = scope["state"]["peer"]
        caller = _identified(peer)
        if self.rule.refusal(peer, dict(scope["headers"])) is not None:
            return caller
        if self.rule.token is not None:
            return replace(caller, rights=Rights.ALL, token=self.rule.token.path.name)
        place, certain = await self.places.of(peer)
        if not place.known:
            return replace(caller, place=place)
        has_all = place.here and certain and peer.uid in (0, self.owner_uid)
        return replace(caller, rights=Rights.ALL if has_all else Rights.OWN, place=place)

    async def admit(self, scope: Mapping[str, Any]) -> Caller:
        """Return the caller of an ASGI request, which may act at least on its own processes.

        Raises:
            ProblemError: see `Rule.admit`; 403 if the caller is in an unknown place.
        """
        caller = await self.of(scope)
        if caller.rights is Rights.NONE and (problem := self.refusal(caller, scope)) is not None:
            raise problem
        return caller

    def refusal(self, caller: Caller, scope: Mapping[str, Any]) -> ProblemError | None:
        """Return why a caller has no rights; None if it has some."""
        problem = self.rule.refusal(scope["state"]["peer"], dict(scope["headers"]))
        if problem is not None or caller.rights is not Rights.NONE:
            return problem
        return ProblemError(
            403,
            f"{self.rule.what}: the exporter cannot see whether the process of {caller} is in a container; use the "
            "unix socket, in a sidecar from the exporter's container, or start the exporter with "
            f"{self.rule.flag} and send that token as `Authorization: Bearer TOKEN`",
        )

    def require_all(self, caller: Caller, what: str) -> None:
        """Raise a ProblemError (403) for a caller that may only act on its own processes."""
        if caller.rights is Rights.ALL:
            return
        users = "root" if self.owner_uid == 0 else f"root and uid {self.owner_uid}"
        raise ProblemError(
            403,
            f"{what}: allowed for {users} outside of containers, not for {caller}, which may act on its own "
            f"processes; use the unix socket as root, or start the exporter with {self.rule.flag} and send that token "
            "as `Authorization: Bearer TOKEN`",
        )


def _identified(peer: Peer) -> Caller:
    """Return the peer as a caller without rights."""
    if peer.on_unix_socket:
        return Caller(CallerKind.UNIX, uid=peer.uid, pid=peer.pid)
    if peer.uid is not None:
        return Caller(CallerKind.LOOPBACK, uid=peer.uid, host=peer.host)
    return Caller(CallerKind.TCP if peer.host else CallerKind.UNKNOWN, host=peer.host)


_LOOPBACK_NAMES = frozenset(("localhost", "ip6-localhost", "127.0.0.1", "::1"))


class OwnNames:
    """The names of the exporter that `Host` and `Origin` may have.

    In a DNS rebinding attack, another site's name resolves to this machine's address; the name reveals the attack. An
    IP address cannot be rebound, so every IP address is accepted.
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
        """Raise a ProblemError (403) for a request that a browser marks as made by another site's page."""
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
        """Raise a ProblemError (403) for a request for another host name."""
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
