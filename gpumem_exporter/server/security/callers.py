"""The callers of requests and their rights, from the connection and the headers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gpumem_exporter.actions.caller import Caller, CallerKind, Rights
from gpumem_exporter.server.http.peer import Peer, PeerPlaces
from gpumem_exporter.server.http.problems import ProblemError
from gpumem_exporter.server.security.request_guard import Rule


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

        Raises ProblemError as `Rule.admit` does, and with 403 if the caller is in an unknown place.
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
