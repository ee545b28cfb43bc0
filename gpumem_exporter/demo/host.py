"""The simulated node as its operating system shows it."""

from __future__ import annotations

from gpumem_exporter.core.samples import ProcessFacts
from gpumem_exporter.demo.simulation import Simulation
from gpumem_exporter.wire.protocol import ProcessIdentity

__all__ = ["DemoHost"]


class DemoHost:
    """A `gpumem_exporter.host.Host` over the simulation. Any thread may call it; nothing blocks for long."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    def facts(self, pid: int) -> ProcessFacts | None:
        """What is known of a simulated process; None for any other."""
        with self._simulation.lock:
            process = self._simulation.process(pid)
            return None if process is None else process.facts

    def host_pid(self, identity: ProcessIdentity, peer_pid: int | None) -> int | None:  # noqa: ARG002 - ours, always
        """A simulated process' own pid. Real processes that report to a demo are on none of its devices: None."""
        return identity.pid if self.alive(identity.pid, identity.start_time_ticks) else None

    def program(self, host_pid: int) -> int | None:  # noqa: ARG002 - simulated processes do not exec
        """Not known: simulated processes run what they run."""
        return None

    def alive(self, host_pid: int, start_time_ticks: int) -> bool:
        """That very simulated process is still there."""
        facts = self.facts(host_pid)
        return facts is not None and facts.start_time_ticks == start_time_ticks
