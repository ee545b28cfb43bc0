"""The caller of an action: what it may do, and one spelling of it for logs, events and the API.

A caller comes from the kernel, a token, the policy file or an alert that the rules admitted. No text of a request
becomes a part of it, except the name of an alert, which is reduced to letters, digits and `_.-`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from gpumem_exporter.core.container import HERE, Place
from gpumem_exporter.core.samples import ReportingProcess
from gpumem_exporter.errors import ActionForbiddenError, ActionNotAllowedError

_MAX_ALERT_NAME = 128
# The actions that need `Rights.ALL`.
_ONLY_ALL = frozenset({"terminate"})
# The actions that need no more rights with `force`. `engine_starts` decides whose engines they may disturb, and a
# profile stops its own process only.
_FORCED_FOR_OWN = frozenset({"empty_cache", "profile", "release_memory", "resume_memory"})


def share_of(key: str) -> str:
    """Return the holder of one share of every limit for a `Caller.key`.

    It is the user that made the container, the container, whose root can become every uid, or the key outside of
    containers.
    """
    _, of_container, place = key.partition(":container:")
    container, of_user, user = place.partition(":of:")
    return f"uid:{user}" if of_user else f"container:{container}" if of_container else key


class CallerKind(Enum):
    """How a request for an action came to the exporter."""

    UNIX = "unix"
    """On the unix socket, where the kernel identifies the peer."""
    LOOPBACK = "loopback"
    """Over TCP from a user of this machine, whom the kernel identifies."""
    TCP = "tcp"
    """Over TCP; only the address is known."""
    POLICY = "policy"
    """From a rule of the policy file."""
    ALERT = "alert"
    """From an alert of Alertmanager."""
    UNKNOWN = "unknown"
    """From a peer without an address."""


class Rights(Enum):
    """The processes that a caller may act on; the API has the same values."""

    ALL = "all"
    """Every process, and the exporter itself."""
    OWN = "own"
    """The processes of its own user. In a container: the user's processes there, or all of them for root."""
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who requests an action."""

    kind: CallerKind
    rights: Rights = Rights.NONE
    uid: int | None = None
    """Of a user of this machine, in the exporter's user namespace."""
    pid: int = 0
    """Of the peer of a unix socket, in the exporter's PID namespace; 0 if the exporter cannot see it."""
    host: str = ""
    """The address of a TCP peer."""
    name: str = ""
    """Of the policy's rule or of the alert."""
    token: str = ""
    """The name of the token's file; empty without a token."""
    place: Place = HERE
    """Where a user of this machine runs."""
    sender: Caller | None = None
    """The client that sent the alert."""

    @classmethod
    def policy(cls, rule: str) -> Caller:
        """Return the caller for actions of a policy's rule."""
        return cls(CallerKind.POLICY, Rights.ALL, name=rule)

    @classmethod
    def alert(cls, name: str, sender: Caller) -> Caller:
        """Return the caller for actions of an alert, which has the rights of the client that sent it."""
        safe = re.sub(r"[^\w.-]", "_", name[:_MAX_ALERT_NAME])
        return cls(CallerKind.ALERT, sender.rights, name=safe, sender=sender)

    @property
    def key(self) -> str:
        """The owner of rate limits, idempotency keys and entries of the audit log.

        All processes of a user have the same key, and so have all clients with the same token.
        """
        if self.token:
            return f"token:{self.token}"
        if self.kind in (CallerKind.POLICY, CallerKind.ALERT):
            return f"{self.kind.value}:{self.name}"
        if self.uid is None:
            return f"{self.kind.value}:{self.host}"
        if self.place.here:
            return f"uid:{self.uid}"
        of_user = "" if self.place.user is None else f":of:{self.place.user}"
        return f"uid:{self.uid}:container:{self.place.container}{of_user}"

    @property
    def share(self) -> str:
        """The holder of one share of every limit: see `share_of`."""
        return share_of(self.key)

    def permitted_actions(self, allowed: Iterable[str]) -> tuple[str, ...]:
        """Return which of the actions of `--action.allow` the caller may request."""
        if self.rights is Rights.NONE:
            return ()
        return tuple(action for action in allowed if self.rights is Rights.ALL or action not in _ONLY_ALL)

    def require_permission(self, action: str, allowed: frozenset[str], *, force: bool) -> None:
        """Check that a caller may request an action, whatever the processes are.

        Raises:
            ActionNotAllowedError: `--action.allow` does not have the action.
            ActionForbiddenError: the action needs the rights to act on every process.
        """
        if action not in allowed:
            has = ", ".join(sorted(allowed)) or "none"
            raise ActionNotAllowedError(
                f"{action} is not allowed here; --action.allow has {has}: start the exporter with {action} added to it"
            )
        if self.rights is Rights.ALL:
            return
        forces_all = force and action not in _FORCED_FOR_OWN
        if action in _ONLY_ALL or forces_all or self.rights is Rights.NONE:
            what = f"{action} with force" if force else action
            raise ActionForbiddenError(f"{what} needs {self.missing_rights}")

    @property
    def missing_rights(self) -> str:
        """What a caller without all rights needs, for messages."""
        return (
            "root or the exporter's user, outside of containers, or the token of --action.token-file; "
            f"{self} has the rights {self.rights.value!r}"
        )

    def may_act_on(self, process: ReportingProcess) -> bool:
        """Return whether a process is a possible target. The kernel names its owner: its uid and its place."""
        return self.may_act_for(process.owner_uid, process.key.place)

    def may_act_for(self, owner_uid: int | None, place: Place) -> bool:
        """Return whether a process of this user in this place is a possible target; None if only a token vouches."""
        if self.rights is not Rights.OWN:
            return self.rights is Rights.ALL
        # Outside of containers, a user owns its processes wherever they run, as with kill(2). In a container, a user
        # owns its processes in the same container, and root owns all processes there.
        if self.uid is None or owner_uid is None or not self.place.reaches(place):
            return False
        return owner_uid == self.uid or (self.uid == 0 and not self.place.here)

    def __str__(self) -> str:
        if self.kind is CallerKind.POLICY:
            return self.key
        if self.kind is CallerKind.ALERT:
            return f"{self.key} by {self.sender}"
        text = self.kind.value
        if self.uid is None:
            text += f":{self.host}" if self.host else ""
        else:
            text += f":uid={self.uid}" + (f":pid={self.pid}" if self.kind is CallerKind.UNIX else "")
            text += "" if self.place.here else f":container={self.place}"
        return f"token:{self.token}@{text}" if self.token else text


def caller_text(requested_by: str) -> str:
    """Return a caller's spelling without the socket and the pid of the request: `uid 1001`, `policy:hoard`."""
    return re.sub(r"^(?:unix|loopback):uid=(\d+).*", r"uid \1", requested_by)
