"""Decides whether the sender of a report may report for the process that it names.

The kernel names the sender: its user and its place. The report names the process. In this order:

- A sender without a known uid has the report token: the request guard has checked it. It may name any process that
  /proc does not contradict. Such a report is not attested.
- A process that the exporter cannot see belongs to the sender's user and place.
- Every process may name itself.
- Outside of containers, a user may name its own processes, wherever they run, and root and the exporter's user every
  process.
- In a container, a user may name its own processes in the same container, and root all processes there.
- A sender whose place is unknown may name no process that the exporter sees, except itself on the unix socket.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass, replace

from gpumem_client.wire.protocol import ProcessIdentity
from gpumem_exporter.core.container import UNKNOWN, Place
from gpumem_exporter.edge.peer import Peer, PeerPlace, PeerPlaces
from gpumem_exporter.errors import ForeignProcessError
from gpumem_exporter.node.host import Host

# The time between two searches for a process that was not found.
_RETRY_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class ReportedProcess:
    """The process of a report, according to the kernel."""

    host_pid: int | None
    """Its pid in the driver's list; None if it is unknown."""
    owner_uid: int | None
    """Its user; None if only the token vouches for the report."""
    place: Place = UNKNOWN
    """Where it runs; where its sender runs if the exporter cannot see it."""
    slurm_job_id: str | None = None
    """Its Slurm job by its cgroup, empty if it is in none; None if only the report can tell."""


@dataclass(frozen=True, slots=True)
class _Known:
    """A decision, for one connection."""

    start_time_ticks: int
    peer: Peer
    decided_seconds: float
    decision: ReportedProcess | str
    """The process, or why the report is refused."""
    unseen_job: str | None
    """`Host.slurm_job` of a process that is not seen, which changes with the first job of the node."""


class ReportSenders:
    """Identifies the processes of reports, once for each connection. Used on the event loop only."""

    def __init__(
        self, host: Host, *, clock: Callable[[], float], max_known: int, places: PeerPlaces | None = None
    ) -> None:
        self._host = host
        self._places = places or PeerPlaces()
        self._clock = clock
        self._max_known = max_known
        self._own_uid = os.geteuid()
        self._known: dict[tuple[int, int, int | None, Place], _Known] = {}

    async def identify(self, identity: ProcessIdentity, peer: Peer) -> ReportedProcess:
        """Return the process of a report. The first report of a connection is decided in a thread, which reads /proc.

        Raises ForeignProcessError if the sender may not report for this process.
        """
        key = (identity.pid_namespace, identity.pid, peer.uid, peer.place)
        known, now = self._known.get(key), self._clock()
        if (
            known is None
            or known.start_time_ticks != identity.start_time_ticks
            or known.unseen_job != self._host.slurm_job(None)
            or not _valid(known, peer, now)
        ):
            unseen_job = self._host.slurm_job(None)
            while (decision := await asyncio.to_thread(self._with_job, identity, peer)) is None:
                await self._places.of(peer)  # the report is about another process than its sender
            self._known.pop(key, None)
            # The keys have claims of reports, and a user can invent claims without end.
            while len(self._known) >= self._max_known:
                del self._known[next(iter(self._known))]
            known = self._known[key] = _Known(identity.start_time_ticks, peer, now, decision, unseen_job)
        if isinstance(known.decision, str):
            raise ForeignProcessError(known.decision)
        return known.decision

    def _with_job(self, identity: ProcessIdentity, peer: Peer) -> ReportedProcess | str | None:
        """Return the decision, with the Slurm job of the process, or of its sender if the process is not seen."""
        decision = self._decide(identity, peer)
        if not isinstance(decision, ReportedProcess) or (decision.host_pid is None and decision.owner_uid is None):
            return decision  # of another machine
        job = self._host.slurm_job(decision.host_pid if decision.host_pid is not None else peer.pid or None)
        return replace(decision, slurm_job_id=job)

    def _decide(self, identity: ProcessIdentity, peer: Peer) -> ReportedProcess | str | None:
        """Return the process, or why the sender may not report for it; None if its place must be searched first."""
        host_pid = self._host.host_pid(identity, peer.pid or None)
        uid = self._host.owner_uid(identity, host_pid)
        if peer.uid is None:
            if uid is not None and host_pid is None:
                return f"pid {identity.pid} of this node is another process than the report describes"
            return ReportedProcess(host_pid, None)
        # A process that reports itself over TCP holds the connection's socket, so no search is needed.
        sender = self._places.of_holder(peer, host_pid) or peer.where
        if sender is None:
            return None
        is_itself = host_pid is not None and (host_pid, identity.start_time_ticks) == (peer.pid, peer.start_time_ticks)
        if uid is None:
            return ReportedProcess(host_pid if is_itself else None, peer.uid, sender.place)
        # Without a place, the uid may be the uid of a user in another container.
        if peer.tcp is not None and not sender.place.known:
            return (
                f"the exporter cannot see which process of uid {peer.uid} has this TCP connection, and whether in "
                "a container: report over the unix socket, or with the token of --report.token-file"
            )
        place = self._host.place(host_pid) if host_pid is not None else sender.place
        if not is_itself and not self._may_name(peer.uid, sender, uid, place):
            where = "" if sender.place.here else " in a container" if sender.place.known else " in an unknown place"
            return (
                f"pid {identity.pid} belongs to uid {uid}, and this connection to uid {peer.uid}{where}: a process is "
                "reported by itself, by its own user in its container or outside of containers, or by root there"
            )
        return ReportedProcess(host_pid, peer.uid if host_pid is None else uid, place)

    def _may_name(self, sender_uid: int, sender: PeerPlace, uid: int, place: Place) -> bool:
        if sender.place.here and sender_uid in (0, self._own_uid) and sender.certain:
            return True
        return sender.place.reaches(place) and (uid == sender_uid or (sender_uid == 0 and not sender.place.here))


def _valid(known: _Known, peer: Peer, now: float) -> bool:
    """Return whether a decision is of this connection and, if no process was found, not too old."""
    # The kernel has named the user of this connection only. A token says the same on every connection.
    if known.peer is not peer and peer.uid is not None:
        return False
    found = isinstance(known.decision, ReportedProcess) and known.decision.host_pid is not None
    return found or now - known.decided_seconds < _RETRY_SECONDS
