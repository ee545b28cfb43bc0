"""Decides whether the sender of a report may report for the process that it names.

The kernel names the sender; the report names the process. In this order:

- A sender without a known uid has the report token: the request guard has checked it. It may name any process that
  /proc does not contradict. Such a report is not attested.
- A process that the exporter cannot see belongs to the sender's user.
- A user may name its own processes.
- Root, and the exporter's user, may name every process, if they are in the exporter's namespaces.
- Root of a container may name itself and the processes of its PID namespace, unless that is the exporter's.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass

from gpumem_exporter.errors import ForeignProcessError
from gpumem_exporter.host import Host
from gpumem_exporter.procfs import pid_namespace
from gpumem_exporter.server.security.peer import Peer
from gpumem_exporter.wire.peer import has_socket
from gpumem_exporter.wire.protocol import ProcessIdentity

__all__ = ["ReportSenders", "ReportedProcess"]

_RETRY_SECONDS = 10.0
"""The time between two searches for a process that was not found."""


@dataclass(frozen=True, slots=True)
class ReportedProcess:
    """The process of a report, according to the kernel."""

    host_pid: int | None
    """Its pid in the driver's list; None if it is unknown."""
    owner_uid: int | None
    """Its user; None if only the token vouches for the report."""


@dataclass(frozen=True, slots=True)
class _Known:
    """A decision, for one connection."""

    start_time_ticks: int
    peer: Peer
    decided_seconds: float
    decision: ReportedProcess | str
    """The process, or why the report is refused."""


class ReportSenders:
    """Identifies the processes of reports, once for each connection. Used on the event loop only.

    Args:
        host: the operating system.
        clock: monotonic seconds.
        max_known: the maximum number of results that are kept.
    """

    def __init__(self, host: Host, *, clock: Callable[[], float], max_known: int) -> None:
        self._host = host
        self._clock = clock
        self._max_known = max_known
        self._own_uid = os.geteuid()
        self._own_namespace = pid_namespace()
        self._known: dict[tuple[int, int, int | None], _Known] = {}

    async def identify(self, identity: ProcessIdentity, peer: Peer) -> ReportedProcess:
        """Return the process of a report. The first report of a connection is decided in a thread, which reads /proc.

        Raises:
            ForeignProcessError: the sender may not report for this process.
        """
        key = (identity.pid_namespace, identity.pid, peer.uid)
        known, now = self._known.get(key), self._clock()
        if known is None or known.start_time_ticks != identity.start_time_ticks or not _valid(known, peer, now):
            decision = await asyncio.to_thread(self._decide, identity, peer)
            self._known.pop(key, None)
            while len(self._known) >= self._max_known:
                del self._known[next(iter(self._known))]
            known = self._known[key] = _Known(identity.start_time_ticks, peer, now, decision)
        if isinstance(known.decision, str):
            raise ForeignProcessError(known.decision)
        return known.decision

    def _decide(self, identity: ProcessIdentity, peer: Peer) -> ReportedProcess | str:
        """Return the process, or why the sender may not report for it."""
        host_pid = self._host.host_pid(identity, peer.pid or None)
        uid = self._host.owner_uid(identity, host_pid)
        if peer.uid is None:
            if uid is not None and host_pid is None:
                return f"pid {identity.pid} of this node is another process than the one that the report describes"
            return ReportedProcess(host_pid, None)
        if uid is None:
            return ReportedProcess(host_pid if host_pid == peer.pid else None, peer.uid)
        if not self._may_name(peer, host_pid, uid):
            place = " in a container" if uid == peer.uid else ""
            return (
                f"pid {identity.pid} belongs to uid {uid}, and this connection to uid {peer.uid}{place}: a process is "
                "reported by itself, by its own user, or by root outside of containers"
            )
        return ReportedProcess(host_pid, peer.uid if host_pid is None else uid)

    def _may_name(self, peer: Peer, host_pid: int | None, uid: int) -> bool:
        if uid == peer.uid != 0:
            return True
        if peer.uid == 0 and host_pid is not None and _is_process(peer, host_pid):
            return True
        if peer.uid in (0, self._own_uid) and peer.in_own_namespaces():
            return True
        return peer.uid == 0 and host_pid is not None and self._in_container_of(peer, host_pid)

    def _in_container_of(self, peer: Peer, host_pid: int) -> bool:
        """Return whether a process shares the peer's PID namespace, and that is not the exporter's."""
        namespace = pid_namespace(f"/proc/{peer.process}") if peer.process else 0
        return namespace not in (0, self._own_namespace) and namespace == pid_namespace(f"/proc/{host_pid}")


def _valid(known: _Known, peer: Peer, now: float) -> bool:
    """Return whether a decision is of this connection and, if no process was found, not too old."""
    if known.peer is not peer and peer.uid is not None:
        return False
    found = isinstance(known.decision, ReportedProcess) and known.decision.host_pid is not None
    return found or now - known.decided_seconds < _RETRY_SECONDS


def _is_process(peer: Peer, pid: int) -> bool:
    """Return whether the peer is this process."""
    return pid == peer.pid if peer.pid else bool(peer.inode) and has_socket(pid, peer.inode)
