"""Checks requests before the routes that change something or show events: caller, web page, size of the body.

The other routes are readable by every client, except by web pages if the exporter listens on loopback alone.
"""

from __future__ import annotations

import ipaddress
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gpumem_client.wire.protocol import PROFILES_PATH, REPORTS_PATH
from gpumem_exporter.core.caller import Caller, CallerKind, Rights
from gpumem_exporter.edge.connections import Exchange
from gpumem_exporter.edge.listeners import is_loopback
from gpumem_exporter.edge.peer import Peer, PeerPlaces
from gpumem_exporter.edge.problems import ProblemCode, ProblemError
from gpumem_exporter.edge.watched_files import TokenFile

if TYPE_CHECKING:
    from gpumem_exporter.edge.web_access import WebAccess  # loaded only if there is a web configuration

ACTIONS_PATH = "/api/v1/actions"
ALERTS_PATH = "/api/v1/alerts"
CALLER_PATH = "/api/v1/caller"
EVENTS_PATH = "/api/v1/events"
HISTORY_PATH = "/api/v1/history"
JOBS_PATH = "/api/v1/jobs"
LIVE_PATH = "/api/v1/live"
NVML_PATH = "/api/v1/nvml"
PROCESSES_PATH = "/api/v1/processes"
RELOAD_PATH = "/-/reload"

MAX_REPORT_BYTES = 1 << 20
"""The largest report: three times one of 64 devices with 16 phases and components each."""
MAX_BODY_BYTES = 64 << 10
"""The largest body on the other routes."""

_FORWARDED = frozenset((b"forwarded", b"x-forwarded-for", b"x-real-ip", b"via"))
_LOOPBACK_NAMES = frozenset(("localhost", "ip6-localhost", "127.0.0.1", "::1"))
_OUTCOMES = {401: "unauthorized", 403: "unauthorized", 413: "too_large", 503: "busy"}

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Rule:
    """The clients that may use a group of routes: with a token file the clients with its token, else local users."""

    what: str
    """The subject of the routes, for messages: "actions"."""
    flag: str
    """The flag of the token file."""
    token: TokenFile | None
    """Required from every client; None admits every user of this machine."""

    def refusal(self, peer: Peer, headers: Mapping[bytes, bytes]) -> ProblemError | None:
        """Return why a client is refused; None if it is admitted.

        401: a missing or wrong token. 403: the exporter has no token and cannot identify the user.
        """
        if self.token is not None:
            if self.matches_token(headers):
                return None
            wrong = headers.get(b"authorization", b"").lower().startswith(b"bearer")
            return ProblemError(
                ProblemCode.WRONG_TOKEN if wrong else ProblemCode.TOKEN_REQUIRED,
                f"{self.what}: {'wrong token' if wrong else 'a token is required'}; send the token of the exporter's "
                f"{self.flag} as `Authorization: Bearer TOKEN`",
                {"WWW-Authenticate": 'Bearer realm="gpumem-exporter"'},
            )
        if peer.uid is not None:
            return None
        place = f"from {peer.host}"
        if not peer.host or is_loopback(peer.host):
            place = "through a proxy, nor from a user that the kernel does not name"
        return ProblemError(
            ProblemCode.UNKNOWN_CALLER,
            f"{self.what} are allowed over loopback and the unix socket, not {place}; start the "
            f"exporter with {self.flag} and send that token",
        )

    def matches_token(self, headers: Mapping[bytes, bytes]) -> bool:
        """Return whether a request has this rule's token."""
        scheme, _, presented = headers.get(b"authorization", b"").partition(b" ")
        return self.token is not None and scheme.lower() == b"bearer" and self.token.matches(presented.strip())


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
        """Return the caller of an ASGI request."""
        caller, _ = await self.examine(scope)
        return caller

    async def examine(self, scope: Mapping[str, Any]) -> tuple[Caller, ProblemError | None]:
        """Return the caller of an ASGI request, and why it has no rights; None if it has some.

        With rights, a caller may act at least on its own processes. The error is the one of the rule, or a 403 if the
        caller is in an unknown place.
        """
        peer = Exchange.of(scope).peer
        caller = _identified(peer)
        if (problem := self.rule.refusal(peer, dict(scope["headers"]))) is not None:
            return caller, problem
        if self.rule.token is not None:
            return replace(caller, rights=Rights.ALL, token=self.rule.token.path.name), None
        place, certain = peer.where or await self.places.of(peer)
        caller = replace(caller, place=place)
        if not place.known:
            return caller, ProblemError(
                ProblemCode.UNKNOWN_CALLER,
                f"{self.rule.what}: the exporter cannot see where the process of {caller} runs, as through `kubectl "
                "port-forward`; use the unix socket, on Kubernetes from the exporter's container with `kubectl exec`, "
                f"or start the exporter with {self.rule.flag} and send that token",
            )
        has_all = place.here and certain and peer.uid in (0, self.owner_uid)
        return replace(caller, rights=Rights.ALL if has_all else Rights.OWN), None

    def require_all(self, caller: Caller, what: str) -> None:
        """Raise a ProblemError (403) for a caller that may only act on its own processes."""
        if caller.rights is Rights.ALL:
            return
        users = "root" if self.owner_uid == 0 else f"root and uid {self.owner_uid}"
        raise ProblemError(
            ProblemCode.NOT_PERMITTED,
            f"{what}: allowed for {users} outside of containers, not for {caller}, which may act on its own "
            f"processes; use the unix socket as root, or start the exporter with {self.rule.flag} and send that token",
        )


def _identified(peer: Peer) -> Caller:
    """Return the peer as a caller without rights."""
    if peer.uid is None:
        return Caller(CallerKind.TCP if peer.host else CallerKind.UNKNOWN, host=peer.host)
    if peer.host:
        return Caller(CallerKind.LOOPBACK, uid=peer.uid, host=peer.host)
    return Caller(CallerKind.UNIX, uid=peer.uid, pid=peer.pid)


class OwnNames:
    """The names of the exporter that `Host` and `Origin` may have."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(name.lower().rstrip(".") for name in names if name) | _LOOPBACK_NAMES

    def require_own_host(self, headers: Mapping[bytes, bytes]) -> None:
        """Raise a ProblemError (403) for a request for another host name."""
        # In a DNS rebinding attack, another site's name resolves to this machine's address; the name reveals the
        # attack. An IP address cannot be rebound, so every IP address is accepted.
        authority = headers.get(b"host", b"").decode("latin-1")
        host = _host(authority)
        if authority and host not in self._names and _ip(host) is None:
            shown = repr(authority[:200])
            detail = f"the Host {shown} is not this exporter's: use its IP address, the machine's name or a token"
            raise ProblemError(ProblemCode.FOREIGN_HOST, detail)

    def name_this_node(self, authority: str, address: str) -> bool:
        """Return whether `host:port` names this machine and no other. A request came to `address`."""
        host = _host(authority)
        if (ip := _ip(host)) is None:
            return host in self._names - _LOOPBACK_NAMES
        return not ip.is_loopback and not ip.is_unspecified and host in (*self._names, address)


def _host(authority: str) -> str:
    host = authority[1:].partition("]")[0] if authority.startswith("[") else authority.partition(":")[0]
    return host.lower().rstrip(".")


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def require_own_page(headers: Mapping[bytes, bytes]) -> None:
    """Raise a ProblemError (403) for a request that a browser marks as made by another site's page."""
    host = headers.get(b"host", b"").lower()
    foreign = headers.get(b"origin", b"http://" + host).lower() not in (b"http://" + host, b"https://" + host)
    if foreign or headers.get(b"sec-fetch-site") in (b"cross-site", b"same-site"):
        raise ProblemError(
            ProblemCode.FOREIGN_PAGE, "requests from other sites' web pages are refused: open the exporter's own page"
        )


_RESTRICTED = tuple(f"{path}/" for path in (ACTIONS_PATH, ALERTS_PATH, EVENTS_PATH, PROFILES_PATH, RELOAD_PATH))
_RESTRICTED_BELOW = (f"{JOBS_PATH}/", f"{NVML_PATH}/", f"{PROCESSES_PATH}/")


def is_restricted(path: str) -> bool:
    """Return whether the rule for actions guards a path."""
    return f"{path}/".startswith(_RESTRICTED) or path.startswith(_RESTRICTED_BELOW)


def is_report(method: str, path: str) -> bool:
    """Return whether the rule for reports guards a request: a report, or a profile that a reporter sends."""
    return path == REPORTS_PATH or (path == PROFILES_PATH and method == "POST")


@dataclass(frozen=True, slots=True)
class Guard:
    """The middleware. It sets the peer of the exchange, and its caller on the routes of actions and events."""

    app: ASGIApp
    routes: Mapping[str, ASGIApp]
    """The most frequent routes by path, besides `app`: FastAPI's search for a route takes as long as they do."""
    own_names: OwnNames
    reports: Rule
    callers: Callers
    on_report_refused: Callable[[str], None]
    """Called with the outcome of a refused report: `unauthorized`, `too_large`, `busy` or `invalid`."""
    body_limits: Mapping[str, int]
    """The size of the largest body by path, where it is not `MAX_BODY_BYTES`."""
    loopback_only: bool = False
    """Whether the exporter listens on loopback alone. A request for another name then reads nothing."""
    web: WebAccess | None = None
    """The users of the TCP addresses, from `--web.config.file`."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on an admitted request; answer others with a problem."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path, method = scope["path"], scope["method"]
        try:
            guarded = await self._admit(scope, path)
            if guarded and method == "POST":
                body = await read_body(scope, receive, self.body_limits.get(path, MAX_BODY_BYTES))
                if body is None:
                    return
                receive = _replay(body, receive)
        except ProblemError as problem:
            _log.debug("%s %s refused: %s %s", method, path, problem.status, problem.detail)
            if path == REPORTS_PATH:
                self.on_report_refused(_OUTCOMES.get(problem.status, "invalid"))
            await problem.response()(scope, receive, send)
            return
        if method == "HEAD":
            scope = {**scope, "method": "GET"}  # the server sends no body
        await self.routes.get(path, self.app)(scope, receive, send)

    async def _admit(self, scope: Scope, path: str) -> bool:
        """Return whether the request is for a route that changes something or shows events.

        Raises ProblemError if the request is refused.
        """
        headers, exchange = dict(scope["headers"]), Exchange.of(scope)
        peer = exchange.peer
        if not _FORWARDED.isdisjoint(headers):
            # The kernel names the proxy, on a socket too, whose user is not the caller.
            exchange.peer = peer = Peer(peer.host)
        reports = is_report(scope["method"], path)
        rule = self.reports if reports else self.callers.rule
        # Every route over TCP is restricted to the users, as of Prometheus' own exporters. A client of the unix socket
        # whom the kernel identifies is exempt. A request has either a password or a token in its one `Authorization`
        # header, so a token stands for both: of actions on every route, of reports on theirs.
        if (
            self.web is not None
            and len(self.web.users)
            and (peer.host or peer.uid is None)
            and not (self.callers.rule.matches_token(headers) or rule.matches_token(headers))
        ):
            await self.web.users.authenticate(headers.get(b"authorization", b""), exchange.owner)
        if not reports and not is_restricted(path):
            # What these show depends on the caller, so another site's page must not ask in the user's name.
            if path in (CALLER_PATH, HISTORY_PATH, LIVE_PATH):
                require_own_page(headers)
            # Clients on this machine use its names; a request for another name is a web page's.
            if self.loopback_only and peer.host and not rule.matches_token(headers):
                self.own_names.require_own_host(headers)
            return False
        require_own_page(headers)
        if rule.token is None:
            # A client with the token is not a web page, and may use any name of the exporter.
            self.own_names.require_own_host(headers)
        if reports:
            problem = rule.refusal(peer, headers)
        else:
            exchange.caller, problem = await self.callers.examine(scope)
        if problem is not None:
            raise problem
        if path in (ALERTS_PATH, RELOAD_PATH) or path.startswith(NVML_PATH + "/"):
            self.callers.require_all(exchange.caller, path)
        # A reload has no body, so its Content-Type does not matter.
        if scope["method"] == "POST" and path != RELOAD_PATH:
            _require_json(headers, b"gzip" if path == PROFILES_PATH else b"identity")
        return True


def _require_json(headers: Mapping[bytes, bytes], encoding: bytes) -> None:
    # A web page cannot send this media type to another site without that site's permission.
    media_type = headers.get(b"content-type", b"").partition(b";")[0].strip().lower().decode("latin-1")
    if media_type != "application/json":
        given = f"not {media_type[:64]!r}" if media_type else "which the request does not have"
        detail = f"expected JSON with `Content-Type: application/json`, {given}"
        raise ProblemError(ProblemCode.WRONG_MEDIA_TYPE, detail)
    if headers.get(b"content-encoding", b"identity").lower() != encoding:
        expected = "a body without Content-Encoding" if encoding == b"identity" else "`Content-Encoding: gzip`"
        raise ProblemError(ProblemCode.WRONG_MEDIA_TYPE, f"expected {expected}")


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes | None:
    """Read the whole body; None if the client disconnects. Raises ProblemError if it is longer than `limit` bytes."""
    # A body without a length is refused before, and the parser cuts off what is longer than its length.
    if int(dict(scope["headers"]).get(b"content-length", b"0")) > limit:
        detail = f"the body is longer than {limit} bytes, the maximum of this route; send a shorter one, or several"
        raise ProblemError(ProblemCode.TOO_LARGE, detail)
    parts = []
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(parts)


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that returns the whole body, then the messages of the connection: `http.disconnect`."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return first.pop() if first else await receive()

    return replayed
