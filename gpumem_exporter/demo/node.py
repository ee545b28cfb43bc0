"""The demo node: the simulation, its driver and host interfaces, and the thread that advances and reports it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from gpumem_client.guest_safety import ErrorLog
from gpumem_client.reporter.delivery import Delivery, Outcome, Wakeup
from gpumem_client.reporter.reporter_settings import ReporterSettings
from gpumem_client.wire.protocol import ProcessIdentity
from gpumem_exporter.core.container import HERE, Place
from gpumem_exporter.core.samples import DeviceMemory, ProcessFacts, ProcessMemory
from gpumem_exporter.core.series import StoredRow, Subject
from gpumem_exporter.demo.heap import take_profiles
from gpumem_exporter.demo.past import past_of
from gpumem_exporter.demo.process import DeviceSlot, SimulatedProcess
from gpumem_exporter.demo.simulation import TICK_SECONDS, Simulation
from gpumem_exporter.demo.workloads import DEMO_WORKLOADS, Workload
from gpumem_exporter.errors import NvmlDeviceLostError
from gpumem_exporter.node.host import Host
from gpumem_exporter.node.provider import DeviceIdentity, Provider

LONGEST_INTERVAL_SECONDS = 1.0
"""The longest time between two reports, so that commands run soon whatever the exporter's report interval."""


class NodeReporter:
    """Sends the reports of all simulated processes, over one connection and in one thread."""

    def __init__(self, simulation: Simulation, exporter_url: str, *, report_token: str | None = None) -> None:
        self.wakeup = Wakeup()
        settings = ReporterSettings.resolve(url=exporter_url, environ={"GPUMEM_REPORT_TOKEN": report_token or ""})
        self._delivery = Delivery(settings, self.wakeup, ErrorLog())
        self._simulation = simulation
        self._due: dict[SimulatedProcess, float] = {}

    def report_due(self, now: float) -> None:
        """Report each process whose report is due at `now`, until a report is not answered."""
        with self._simulation.lock:
            for process in self._simulation.processes():
                if process.reports and process not in self._due:
                    self._due[process] = now
                    take_profiles(process, self._send_profile)
        for process, due_seconds in tuple(self._due.items()):
            if process.ended:
                del self._due[process]
                if not process.crashed:
                    self._delivery.deliver(process.loop.final_report())
            elif now >= due_seconds:
                pause, outcome = self._report(process)
                if not pause:  # a command has run, and its result is due at once
                    pause, outcome = self._report(process)
                if outcome is Outcome.FAILED:
                    return
                self._due[process] = now + min(pause, LONGEST_INTERVAL_SECONDS)

    def close(self) -> None:
        """Close the connection."""
        self._delivery.close()

    def _send_profile(self, document: bytes) -> str:
        # A loop calls this with the lock, and the exporter reads the simulation before it answers. Only this thread
        # changes the simulation.
        self._simulation.lock.release()
        try:
            return self._delivery.send_profile(document)
        finally:
            self._simulation.lock.acquire()

    def _report(self, process: SimulatedProcess) -> tuple[float, Outcome]:
        with self._simulation.lock:
            report = process.loop.next_report()
        # Without the lock, because the exporter reads the simulation before it answers. Without a hold, because one
        # thread reports all processes.
        outcome, reply = self._delivery.deliver(replace(report, hold_seconds=0.0))
        with self._simulation.lock:
            return process.loop.answered(report, outcome, reply), outcome


class DemoNode:
    """A simulated node whose processes report to an exporter over HTTP. The same seed creates the same node.

    `provider` and `host` work immediately. The processes run and report between `start` and `stop`.
    """

    def __init__(
        self,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
        workloads: Sequence[Workload] = DEMO_WORKLOADS,
    ) -> None:
        self.simulation = Simulation(seed, clock(), workloads)
        self.provider = DemoProvider(self.simulation)  # type: ignore[abstract] # `open` and `close` do nothing
        self.host = DemoHost(self.simulation)  # type: ignore[abstract] # processes say their own Slurm job
        self._clock = clock
        self._thread: threading.Thread | None = None
        self._reporter: NodeReporter | None = None

    def start(self, exporter_url: str, *, report_token: str | None = None) -> None:
        """Start the simulation and its reports, once. The exporter may start later."""
        self._reporter = NodeReporter(self.simulation, exporter_url, report_token=report_token)
        self._thread = threading.Thread(target=self._run, args=(self._reporter,), name="gpumem-demo", daemon=True)
        self._thread.start()

    def past(self, until_unix_seconds: float) -> Iterable[tuple[Subject, Iterable[StoredRow]]]:
        """Return the rows of the hour before the start, which ends at a time."""
        return past_of(self.simulation.instances, int(until_unix_seconds))

    def stop(self, timeout_seconds: float = 5.0) -> None:
        """Stop the thread and wait at most `timeout_seconds`; may be called again."""
        if self._thread is not None and self._reporter is not None:
            self._reporter.wakeup.stop()
            self._thread.join(timeout_seconds)

    def _run(self, reporter: NodeReporter) -> None:
        while reporter.wakeup.starts_round():
            now = self._clock()
            self.simulation.advance(now)
            reporter.report_due(now)
            reporter.wakeup.wait(TICK_SECONDS)
        reporter.close()


class DemoProvider(Provider):
    """The simulated driver. Thread-safe; calls never block for long."""

    source = "demo"

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    def driver_version(self) -> str:
        return "580.95.05-demo"

    def devices(self) -> tuple[DeviceIdentity, ...]:
        return tuple(device.identity for device in self._simulation.devices)

    def read_memory(self, uuid: str) -> DeviceMemory:
        with self._simulation.lock:
            for device in self._simulation.devices:
                if device.identity.uuid == uuid:
                    return device.memory
        raise NvmlDeviceLostError(f"the demo has no device {uuid!r}")

    def read_processes(self, uuid: str) -> tuple[ProcessMemory, ...]:
        with self._simulation.lock:
            return tuple(ProcessMemory(process.pid, slot.used_bytes) for process, slot in self._slots(uuid))

    def read_utilization_ratio(self, uuid: str) -> float:
        with self._simulation.lock:
            return min(1.0, round(sum(process.busy_ratio for process, _ in self._slots(uuid)), 2))

    def read_active_pids(self, uuid: str) -> frozenset[int]:
        with self._simulation.lock:
            return frozenset(process.pid for process, _ in self._slots(uuid) if process.busy_ratio > 0)

    def _slots(self, uuid: str) -> Iterator[tuple[SimulatedProcess, DeviceSlot]]:
        for process in self._simulation.processes():
            for slot in process.slots:
                if slot.device.identity.uuid == uuid:
                    yield process, slot


class DemoHost(Host):
    """What the operating system of the simulated node shows. Thread-safe; calls never block for long."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    def facts(self, pid: int) -> ProcessFacts | None:
        with self._simulation.lock:
            process = self._simulation.process(pid)
            return None if process is None else process.facts

    def host_pid(self, identity: ProcessIdentity, peer_pid: int | None) -> int | None:  # noqa: ARG002
        # None for a real process, which is on none of the simulated devices
        return identity.pid if self.alive(identity.pid, identity.start_time_ticks) else None

    def owner_uid(self, identity: ProcessIdentity, host_pid: int | None) -> int | None:  # noqa: ARG002
        # The exporter itself reports them.
        return None if host_pid is None else os.geteuid()

    def place(self, host_pid: int) -> Place:  # noqa: ARG002
        return HERE

    def alive(self, host_pid: int, start_time_ticks: int) -> bool:
        facts = self.facts(host_pid)
        return facts is not None and facts.start_time_ticks == start_time_ticks
