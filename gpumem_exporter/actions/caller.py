"""The caller of an action: a value that rules decide on, and one spelling of it for logs, events and the API."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["Caller", "CallerKind"]


class CallerKind(Enum):
    """How a request for an action came to the exporter."""

    UNIX = "unix"
    """On the unix socket, where the kernel identifies the peer."""
    TCP = "tcp"
    """Over TCP; only the address is known."""
    POLICY = "policy"
    """From a rule of the policy file."""
    ALERT = "alert"
    """From an alert of Alertmanager."""
    UNKNOWN = "unknown"
    """From a peer without an address."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who requests an action.

    Attributes:
        kind: How the request came to the exporter.
        uid: Of the peer of a unix socket, in the exporter's user namespace; else None.
        pid: Of that peer, in the exporter's PID namespace; 0 if the exporter cannot see it.
        host: Address of a TCP peer; else empty.
        name: Name of the policy's rule or of the alert; else empty.
        token: Whether the request had the right token.
        sender: The client that sent the alert; else None.
    """

    kind: CallerKind
    uid: int | None = None
    pid: int | None = None
    host: str = ""
    name: str = ""
    token: bool = False
    sender: Caller | None = None

    @classmethod
    def policy(cls, rule: str) -> Caller:
        """The rule of a policy."""
        return cls(CallerKind.POLICY, name=rule)

    @classmethod
    def alert(cls, name: str, sender: Caller) -> Caller:
        """An alert, and the client that sent it."""
        return cls(CallerKind.ALERT, name=name, sender=sender)

    @property
    def anonymous(self) -> bool:
        """Whether only an address is known, which all users of a machine share."""
        return self.kind in (CallerKind.TCP, CallerKind.UNKNOWN) and not self.token

    @property
    def share(self) -> str:
        """The key of the caller's rate limit. It has no pid, because a user may start many processes."""
        return self._spelled(f"uid={self.uid}", self.sender.share if self.sender is not None else "")

    def __str__(self) -> str:
        return self._spelled(f"uid={self.uid}:pid={self.pid}", str(self.sender))

    def _spelled(self, peer: str, sender: str) -> str:
        if self.kind is CallerKind.UNIX:
            return f"token@unix:{peer}" if self.token else f"unix:{peer}"
        if self.kind is CallerKind.TCP:
            return f"token@{self.host}" if self.token else f"tcp:{self.host}"
        if self.kind is CallerKind.POLICY:
            return f"policy:{self.name}"
        if self.kind is CallerKind.ALERT:
            return f"alert:{self.name} by {sender}"
        return "token@unknown" if self.token else "unknown"
