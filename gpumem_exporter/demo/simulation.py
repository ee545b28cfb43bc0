"""The simulated node: devices, processes and time.

The simulation has its own time, which advances in ticks and only in `advance`. The same seed and the same calls create
the same node. Callers must hold `lock` while they access processes or values of devices; `advance` acquires it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from gpumem_exporter import __version__
from gpumem_exporter.core.allocator_model import SimulatedOutOfMemoryError
from gpumem_exporter.core.samples import ProcessFacts
from gpumem_exporter.demo.device import SimulatedDevice, build_devices
from gpumem_exporter.demo.process import SimulatedProcess
from gpumem_exporter.demo.workloads import DEMO_WORKLOADS, Workload
from gpumem_exporter.wire.protocol import ProcessIdentity

__all__ = ["TICK_SECONDS", "Simulation"]

TICK_SECONDS = 0.5
MAX_CATCH_UP_TICKS = 20
"""The most ticks in one call of `advance`; the rest of a longer pause (the machine slept) is skipped."""
CLOCK_TICKS_PER_SECOND = 100
UPTIME_SECONDS = 40 * 86400
"""The uptime of the simulated machine when the demo starts."""
PID_NAMESPACE = 4026531836
"""The inode of the initial PID namespace on Linux."""
PID_MAX = 4_194_304
PID_MIN_LATER = 300
"""The first pid that Linux uses after it has reached PID_MAX."""
SMOOTHING = 0.5
"""The share by which a device's utilization approaches that of its processes in one tick."""


@dataclass(slots=True)
class _WorkloadInstance:
    """One process slot of a workload, with its current process."""

    workload: Workload
    index: int
    starts_at_tick: int
    launches: int = 0
    process: SimulatedProcess | None = None
    program: Iterator[None] | None = None


class Simulation:
    """The node.

    Args:
        seed: determines UUIDs, pids and all random numbers.
        now: the current time of the caller's clock in seconds, which `advance` also uses.
        workloads: the workloads of the node.
    """

    def __init__(self, seed: int, now: float, workloads: Sequence[Workload] = DEMO_WORKLOADS) -> None:
        self.lock = threading.Lock()
        self._seed = seed
        self._rng = Random(f"{seed}:node")  # noqa: S311 - not for cryptography
        self.devices = build_devices(self._rng)
        self._by_uuid = {device.identity.uuid: device for device in self.devices}
        self._origin_seconds = now
        self._tick = 0
        self._next_pid = self._rng.randint(12_000, 60_000)
        self._by_pid: dict[int, SimulatedProcess] = {}
        self._instances = [
            _WorkloadInstance(workload, index, starts_at_tick=-workload.warm_up_ticks)
            for workload in workloads
            for index in range(len(workload.placements))
        ]
        self._warm_up()

    def advance(self, now: float) -> None:
        """Advance the simulation to `now`."""
        target = int((now - self._origin_seconds) / TICK_SECONDS)
        with self.lock:
            for _ in range(min(target - self._tick, MAX_CATCH_UP_TICKS)):
                self._tick += 1
                for instance in self._instances:
                    self._advance_instance(instance)
                self._measure_utilization()
            skipped_ticks = target - self._tick
            if skipped_ticks > 0:
                self._origin_seconds += skipped_ticks * TICK_SECONDS

    def processes(self) -> tuple[SimulatedProcess, ...]:
        """Return the running processes."""
        return tuple(self._by_pid.values())

    def process(self, pid: int) -> SimulatedProcess | None:
        """Return the process with a pid; None if there is none."""
        return self._by_pid.get(pid)

    def device(self, uuid: str) -> SimulatedDevice | None:
        """Return the device with a UUID; None if there is none."""
        return self._by_uuid.get(uuid)

    def _warm_up(self) -> None:
        """Run every workload for its warm-up time, so that the demo starts with a busy node."""
        self._tick = min((instance.starts_at_tick for instance in self._instances), default=0)
        while self._tick < 0:
            for instance in self._instances:
                self._advance_instance(instance)
            self._tick += 1
        for _ in range(8):
            self._measure_utilization()

    def _advance_instance(self, instance: _WorkloadInstance) -> None:
        if instance.program is None:
            if self._tick < instance.starts_at_tick:
                return
            self._launch(instance)
        program, process = instance.program, instance.process
        if program is None or process is None:
            return
        try:
            next(program)
        except StopIteration:
            self._end(instance, process, crashed=False)
        except SimulatedOutOfMemoryError:
            self._end(instance, process, crashed=True)

    def _launch(self, instance: _WorkloadInstance) -> None:
        """Start a process; if there is no memory for its CUDA context, it is retried later."""
        workload, index = instance.workload, instance.index
        instance.launches += 1
        rng = Random(f"{self._seed}:{workload.name}:{index}:{instance.launches}")  # noqa: S311
        pid = self._take_pid()
        started_seconds = UPTIME_SECONDS + self._tick * TICK_SECONDS
        start_time_ticks = int(started_seconds * CLOCK_TICKS_PER_SECOND)
        identity = ProcessIdentity(
            pid=pid,
            start_time_ticks=start_time_ticks,
            pid_namespace=PID_NAMESPACE,
            session=f"{rng.getrandbits(64):016x}",
            session_started_seconds=started_seconds,
            workload=workload.name,
            rank=str(index) if workload.ranks else "",
            command=workload.command,
            torch_version=workload.torch_version,
            allocator_settings=workload.allocator_settings,
            client_version=__version__,
        )
        process = SimulatedProcess(
            identity,
            _facts(workload, index, pid, start_time_ticks, rng),
            [self.devices[number] for number in workload.placements[index]],
            reports=workload.reports,
            rng=rng,
            clock=lambda: self._tick * TICK_SECONDS,
        )
        instance.process, instance.program = process, workload.program(process)
        self._by_pid[pid] = process
        try:
            for device in range(len(workload.placements[index])):
                process.load_libraries(workload.context_bytes, device=device)
        except SimulatedOutOfMemoryError:
            self._end(instance, process, crashed=True)

    def _end(self, instance: _WorkloadInstance, process: SimulatedProcess, *, crashed: bool) -> None:
        process.end(crashed=crashed)
        del self._by_pid[process.pid]
        instance.process = instance.program = None
        instance.starts_at_tick = self._tick + instance.workload.restart_ticks

    def _take_pid(self) -> int:
        pid = self._next_pid
        self._next_pid += self._rng.randint(1, 400)
        if self._next_pid >= PID_MAX:
            self._next_pid = PID_MIN_LATER
        return self._take_pid() if pid in self._by_pid else pid

    def _measure_utilization(self) -> None:
        for device in self.devices:
            wanted = sum(process.busy_ratio for process in self._by_pid.values() if process.uses(device))
            wanted *= self._rng.uniform(0.9, 1.05)
            smoothed = device.utilization_ratio + SMOOTHING * (min(wanted, 1.0) - device.utilization_ratio)
            device.utilization_ratio = round(smoothed, 2)


def _facts(workload: Workload, index: int, pid: int, start_time_ticks: int, rng: Random) -> ProcessFacts:
    if not workload.k8s_pod:
        return ProcessFacts(pid, start_time_ticks, command=workload.command, user=workload.user)
    return ProcessFacts(
        pid,
        start_time_ticks,
        command=workload.command,
        user=workload.user,
        container_id=f"{rng.getrandbits(256):064x}",
        k8s_namespace=workload.k8s_namespace,
        k8s_pod=f"{workload.k8s_pod}-{index}",
        k8s_container="main",
    )
