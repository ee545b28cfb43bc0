"""What the operating system shows of processes. `Host` is the interface, which the demo's simulated node has too."""

from __future__ import annotations

from typing import Protocol

from gpumem_client.wire.protocol import ProcessIdentity
from gpumem_exporter.core.container import Place
from gpumem_exporter.core.readings import ProcessFacts


class Host(Protocol):
    """The processes of a node. Thread-safe: the poller calls it from its thread, other callers from the event loop."""

    def facts(self, pid: int) -> ProcessFacts | None:
        """Return the description of a process; None if it does not exist. Facts that cannot be read are empty."""

    def host_pid(self, identity: ProcessIdentity, peer_pid: int | None) -> int | None:
        """Return the pid of a reporter in the driver's list; None if it cannot be known.

        `identity` is the reporter's description of itself, in its own PID namespace. `peer_pid` is the pid of the peer
        of its unix socket (SO_PEERCRED); None over TCP.
        """

    def owner_uid(self, identity: ProcessIdentity, host_pid: int | None) -> int | None:
        """Return the effective uid of the process that a reporter names; None if the exporter cannot see the process.

        `host_pid` is the result of `host_pid`. If it is None and the reporter names the exporter's own PID namespace,
        the result is the uid of the process that has the reporter's pid there, whenever it started.
        """

    def place(self, host_pid: int) -> Place:
        """Return where a process runs; unknown if the exporter cannot see it."""

    def slurm_job(self, pid: int | None) -> str | None:
        """Return the Slurm job of a process by its cgroup, empty if it is in no job; None if the host cannot tell.

        `pid` is None for a process that the exporter cannot see.
        """

    def program(self, host_pid: int) -> int | None:
        """Return a number that each exec of the process changes; None if it is unknown or the process has exited."""

    def alive(self, host_pid: int, start_time_ticks: int) -> bool:
        """Return whether this process still runs, not a later one with the same pid. A zombie does not run."""
