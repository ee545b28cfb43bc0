"""The operating system of the simulated node."""

from __future__ import annotations

from gpumem_exporter.core.samples import ProcessFacts
from gpumem_exporter.demo.simulation import Simulation
from gpumem_exporter.wire.protocol import ProcessIdentity

__all__ = ["DemoHost"]


class DemoHost:
    """A `gpumem_exporter.host.Host` for the simulation. Thread-safe; calls never block for long."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    def facts(self, pid: int) -> ProcessFacts | None:
        """Return the facts of a simulated process; None for any other pid."""
        with self._simulation.lock:
            process = self._simulation.process(pid)
            return None if process is None else process.facts

    def host_pid(self, identity: ProcessIdentity, peer_pid: int | None) -> int | None:  # noqa: ARG002 - part of the interface
        """Return a simulated process's own pid; None for a real process, which is on none of the simulated devices."""
        return identity.pid if self.alive(identity.pid, identity.start_time_ticks) else None

    def program(self, host_pid: int) -> int | None:  # noqa: ARG002 - part of the interface
        """Return None: simulated processes never exec."""
        return None

    def alive(self, host_pid: int, start_time_ticks: int) -> bool:
        """Return whether this simulated process still runs."""
        facts = self.facts(host_pid)
        return facts is not None and facts.start_time_ticks == start_time_ticks
