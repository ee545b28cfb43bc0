"""The demo node: the simulation, its driver and host interfaces, and the thread that advances it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence

from gpumem_client.wire.protocol import ProcessIdentity
from gpumem_exporter.core.place import HERE, Place
from gpumem_exporter.core.samples import DeviceMemory, ProcessFacts, ProcessMemory
from gpumem_exporter.demo.device import SimulatedDevice
from gpumem_exporter.demo.reporter import NodeReporter
from gpumem_exporter.demo.simulation import TICK_SECONDS, Simulation
from gpumem_exporter.demo.workloads import DEMO_WORKLOADS, Workload
from gpumem_exporter.errors import NvmlDeviceLostError
from gpumem_exporter.nvml.provider import DeviceIdentity

__all__ = ["DemoNode"]


class DemoNode:
    """A simulated node whose processes report to an exporter over HTTP.

    `provider` and `host` work immediately. The processes run and report between `start` and `stop`.

    Args:
        seed: the same seed creates the same node.
        clock: monotonic seconds.
        workloads: the workloads of the node.
    """

    def __init__(
        self,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
        workloads: Sequence[Workload] = DEMO_WORKLOADS,
    ) -> None:
        self.simulation = Simulation(seed, clock(), workloads)
        self.provider = DemoProvider(self.simulation)
        self.host = DemoHost(self.simulation)
        self._clock = clock
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._reporter: NodeReporter | None = None

    def start(self, exporter_url: str, *, report_token: str | None = None) -> None:
        """Start the simulation and its reports. The exporter may start later.

        Args:
            exporter_url: `http://host:port` or `unix:///path`.
            report_token: the token for reports, if the exporter requires one.

        Raises:
            ConfigurationError: the URL has neither of the two forms.
            RuntimeError: the node was already started.
        """
        if self._thread is not None:
            raise RuntimeError("the demo node was already started")
        self._reporter = NodeReporter(self.simulation, exporter_url, report_token=report_token)
        self._thread = threading.Thread(target=self._run, args=(self._reporter,), name="gpumem-demo", daemon=True)
        self._thread.start()

    def stop(self, timeout_seconds: float = 5.0) -> None:
        """Stop the thread and wait at most `timeout_seconds`; may be called again."""
        self._stopping.set()
        if self._thread is not None and self._reporter is not None:
            self._reporter.interrupt()
            self._thread.join(timeout_seconds)

    def _run(self, reporter: NodeReporter) -> None:
        while not self._stopping.is_set():
            now = self._clock()
            self.simulation.advance(now)
            reporter.report_due(now)
            self._stopping.wait(TICK_SECONDS)
        reporter.close()


class DemoProvider:
    """A `gpumem_exporter.nvml.Provider` for the simulation. Thread-safe; calls never block for long.

    The `read_` methods raise NvmlDeviceLostError for an unknown UUID.
    """

    source = "demo"

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    def open(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""

    def release(self) -> None:
        """Do nothing."""

    def driver_version(self) -> str:
        """Return a version that is marked as simulated."""
        return "580.95.05-demo"

    def devices(self) -> tuple[DeviceIdentity, ...]:
        """Return the simulated devices."""
        return tuple(device.identity for device in self._simulation.devices)

    def read_memory(self, uuid: str) -> DeviceMemory:
        """Return the memory of a device."""
        with self._simulation.lock:
            return self._device(uuid).memory

    def read_processes(self, uuid: str) -> tuple[ProcessMemory, ...]:
        """Return the processes on a device."""
        with self._simulation.lock:
            device = self._device(uuid)
            return tuple(
                ProcessMemory(process.pid, slot.used_bytes)
                for process in self._simulation.processes()
                for slot in process.slots
                if slot.device is device
            )

    def read_utilization_ratio(self, uuid: str) -> float:
        """Return the utilization of a device, 0 to 1."""
        with self._simulation.lock:
            return self._device(uuid).utilization_ratio

    def _device(self, uuid: str) -> SimulatedDevice:
        for device in self._simulation.devices:
            if device.identity.uuid == uuid:
                return device
        raise NvmlDeviceLostError(f"the demo has no device {uuid!r}")


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

    def owner_uid(self, identity: ProcessIdentity, host_pid: int | None) -> int | None:  # noqa: ARG002 - as above
        """Return the exporter's uid for a simulated process: the exporter itself reports them."""
        return None if host_pid is None else os.geteuid()

    def place(self, host_pid: int) -> Place:  # noqa: ARG002 - as above
        """Return the exporter's place, where the simulated processes are."""
        return HERE

    def program(self, host_pid: int) -> int | None:  # noqa: ARG002 - part of the interface
        """Return None: simulated processes never exec."""
        return None

    def alive(self, host_pid: int, start_time_ticks: int) -> bool:
        """Return whether this simulated process still runs."""
        facts = self.facts(host_pid)
        return facts is not None and facts.start_time_ticks == start_time_ticks
