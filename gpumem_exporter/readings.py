"""Takes the readings of the poller, in the poller's thread."""

from __future__ import annotations

from dataclasses import dataclass, field

from gpumem_exporter.core.recorders import ProcessRecorder
from gpumem_exporter.core.samples import NodeReading
from gpumem_exporter.core.store import Store
from gpumem_exporter.node.pid_namespaces import DriverPids
from gpumem_exporter.node.pod_resources import PodResources


@dataclass(slots=True)
class Readings:
    """Completes each reading, derives its events and stores it."""

    store: Store
    driver_pids: DriverPids | None = None
    """Drops pids that are not this namespace's."""
    pods: PodResources | None = None
    """Names the pods."""
    processes: ProcessRecorder = field(default_factory=ProcessRecorder)

    def take(self, reading: NodeReading) -> None:
        """Take a reading."""
        if self.driver_pids is not None:
            reading = self.driver_pids.check(reading)
        if self.pods is not None:
            reading = self.pods.name(reading)
        # The events come before the reading is stored: so the event of a process that ends has every value that the
        # page has shown.
        try:
            self.processes.take_reading(reading)
        finally:
            self.store.put_reading(reading)
