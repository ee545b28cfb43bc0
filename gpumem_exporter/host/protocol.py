"""What the exporter asks of the operating system, whoever answers: /proc, or the demo's simulated node."""

from __future__ import annotations

from typing import Protocol

from gpumem_exporter.core.samples import ProcessFacts
from gpumem_exporter.wire.protocol import ProcessIdentity

__all__ = ["Host"]


class Host(Protocol):
    """The processes of a node. Thread-safe: the poller asks from its thread, everything else from the event loop."""

    def facts(self, pid: int) -> ProcessFacts | None:
        """Who a process is; None when there is no such process (any more). What cannot be read is left empty."""
        ...

    def host_pid(self, identity: ProcessIdentity, peer_pid: int | None) -> int | None:
        """The pid by which the driver calls a reporter; None when it cannot be known, never a guess.

        Args:
            identity: what the reporter says of itself, in its own PID namespace.
            peer_pid: the kernel's word for the other end of its unix socket (SO_PEERCRED); None over TCP.
        """
        ...

    def program(self, host_pid: int) -> int | None:
        """A number that is another after each exec of a process; None where it cannot be known, or it has ended."""
        ...

    def alive(self, host_pid: int, start_time_ticks: int) -> bool:
        """This very process still runs, not a later one with the same pid; one that waits to be reaped does not."""
        ...
