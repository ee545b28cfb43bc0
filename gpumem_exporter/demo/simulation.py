"""The simulated node: devices, processes and time.

The simulation has its own time, which advances in ticks and only in `advance`. The same seed and the same calls create
the same node. Callers must hold `lock` while they access processes or values of devices; `advance` acquires it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from gpumem_client.allocator.simulated import SimulatedOutOfMemoryError
from gpumem_client.wire.procfs import INITIAL_PID_NAMESPACE
from gpumem_client.wire.protocol import ProcessIdentity
from gpumem_exporter import __version__
from gpumem_exporter.core.samples import ProcessFacts
from gpumem_exporter.demo.process import SimulatedDevice, SimulatedProcess
from gpumem_exporter.demo.programs import MIB
from gpumem_exporter.demo.workloads import DEMO_WORKLOADS, DEVICES, Workload
from gpumem_exporter.node.provider import DeviceIdentity

TICK_SECONDS = 0.5
MAX_CATCH_UP_TICKS = 20
"""The most ticks in one call of `advance`; the rest of a longer pause (the machine slept) is skipped."""
CLOCK_TICKS_PER_SECOND = 100
UPTIME_SECONDS = 40 * 86400
"""The uptime of the simulated machine when the demo starts."""
SMOOTHING = 0.5
"""The share by which a device's utilization approaches the utilization by its processes in one tick."""


@dataclass(slots=True)
class _Instance:
    """One process slot of a workload, with its current process."""

    workload: Workload
    index: int
    starts_at_tick: int
    launches: int = 0
    running: SimulatedProcess | None = None


class Simulation:
    """The node. The seed determines UUIDs, pids and all random numbers; `now` is the time of the caller's clock."""

    def __init__(self, seed: int, now: float, workloads: Sequence[Workload] = DEMO_WORKLOADS) -> None:
        self.lock = threading.Lock()
        self._seed = seed
        self._rng = Random(f"{seed}:node")  # noqa: S311 - not for cryptography
        self.devices = _devices(self._rng)
        self._origin_seconds = now
        self._next_pid = self._rng.randint(12_000, 60_000)
        self._by_pid: dict[int, SimulatedProcess] = {}
        self._instances = [
            _Instance(workload, index, starts_at_tick=-workload.warm_up_ticks)
            for workload in workloads
            for index in range(len(workload.placements))
        ]
        # Each workload runs for its warm-up time now, so that the demo starts with a busy node.
        self._tick = min((instance.starts_at_tick for instance in self._instances), default=0)
        while self._tick < 0:
            self._run_tick()
            self._tick += 1

    def advance(self, now: float) -> None:
        """Advance the simulation to `now`."""
        target = int((now - self._origin_seconds) / TICK_SECONDS)
        with self.lock:
            for _ in range(min(target - self._tick, MAX_CATCH_UP_TICKS)):
                self._tick += 1
                self._run_tick()
            skipped_ticks = target - self._tick
            if skipped_ticks > 0:
                self._origin_seconds += skipped_ticks * TICK_SECONDS

    def processes(self) -> tuple[SimulatedProcess, ...]:
        """Return the running processes."""
        return tuple(self._by_pid.values())

    def process(self, pid: int) -> SimulatedProcess | None:
        """Return the process with a pid; None if there is none."""
        return self._by_pid.get(pid)

    def _run_tick(self) -> None:
        for instance in self._instances:
            self._advance_instance(instance)
        self._measure_utilization()

    def _advance_instance(self, instance: _Instance) -> None:
        if instance.running is None and self._tick >= instance.starts_at_tick:
            self._launch(instance)
        process = instance.running
        if process is None or process.program is None:
            return
        try:
            next(process.program)
            process.loop.sampler.take()  # the reports fit the next reading of the driver
            process.loop.sampler.read()  # for the idle cache
        except StopIteration:
            self._end(instance, process, crashed=False)
        except SimulatedOutOfMemoryError:
            self._end(instance, process, crashed=True)

    def _launch(self, instance: _Instance) -> None:
        """Start a process; without memory for its CUDA context, it crashes and is started again later."""
        workload, index = instance.workload, instance.index
        instance.launches += 1
        rng = Random(f"{self._seed}:{workload.name}:{index}:{instance.launches}")  # noqa: S311
        pid = self._next_pid
        self._next_pid += self._rng.randint(1, 400)
        started_seconds = UPTIME_SECONDS + self._tick * TICK_SECONDS
        identity = ProcessIdentity(
            pid=pid,
            start_time_ticks=int(started_seconds * CLOCK_TICKS_PER_SECOND),
            pid_namespace=INITIAL_PID_NAMESPACE,
            session=f"{rng.getrandbits(64):016x}",
            session_started_seconds=started_seconds,
            workload=workload.name,
            rank=str(index) if workload.ranks else "",
            command=workload.command,
            torch_version=workload.torch_version,
            slurm_job_id=workload.slurm_job_id,
            client_version=__version__,
        )
        process = SimulatedProcess(
            identity,
            _facts(
                workload,
                index,
                identity,
                rng,
                self._origin_seconds + self._tick * TICK_SECONDS - workload.idle_before_seconds,
            ),
            [self.devices[number] for number in workload.placements[index]],
            reports=workload.reports,
            planned_bytes=workload.planned_bytes,
            scale=workload.scale,
            idle_before_seconds=workload.idle_before_seconds,
            rng=rng,
            clock=lambda: self._tick * TICK_SECONDS,
        )
        process.program = workload.program(process)
        instance.running = process
        self._by_pid[pid] = process
        try:
            for device in range(len(workload.placements[index])):
                process.load_libraries(workload.context_bytes, device=device)
                if workload.nccl_bytes is not None:
                    process.slots[device].nccl_bytes = int(workload.nccl_bytes * workload.scale)
        except SimulatedOutOfMemoryError:
            self._end(instance, process, crashed=True)

    def _end(self, instance: _Instance, process: SimulatedProcess, *, crashed: bool) -> None:
        process.end(crashed=crashed)
        del self._by_pid[process.pid]
        instance.running = None
        instance.starts_at_tick = self._tick + instance.workload.restart_ticks

    def _measure_utilization(self) -> None:
        for device in self.devices:
            busy_ratio = sum(
                process.busy_ratio
                for process in self._by_pid.values()
                if any(slot.device is device for slot in process.slots)
            )
            target_ratio = min(busy_ratio * self._rng.uniform(0.9, 1.05), 1.0)
            smoothed = device.utilization_ratio + SMOOTHING * (target_ratio - device.utilization_ratio)
            device.utilization_ratio = round(smoothed, 2)


def _facts(
    workload: Workload, index: int, identity: ProcessIdentity, rng: Random, started_seconds: float
) -> ProcessFacts:
    namespace, _, pod = workload.k8s_pod.partition("/")
    return ProcessFacts(
        identity.pid,
        identity.start_time_ticks,
        command=workload.command,
        user=workload.user,
        container_id=f"{rng.getrandbits(256):064x}" if pod else "",
        k8s_namespace=namespace,
        k8s_pod=f"{pod}-{index}" if pod else "",
        k8s_container="main" if pod else "",
        started_seconds=started_seconds,
    )


def _devices(rng: Random) -> tuple[SimulatedDevice, ...]:
    """Create the eight devices of the node: seven of one model, and one of another model."""
    devices = []
    for index in range(DEVICES):
        digits = f"{rng.getrandbits(128):032x}"
        uuid = f"GPU-{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"
        bus_id = f"00000000:{0x1A + 0x11 * index:02X}:00.0"
        name, total_mib, reserved_mib = ("A100 80GB PCIe", 81920, 626) if index == 7 else ("H100 80GB HBM3", 81559, 551)
        identity = DeviceIdentity(str(index), uuid, f"NVIDIA {name} (demo)", bus_id)
        devices.append(SimulatedDevice(identity, total_bytes=total_mib * MIB, reserved_bytes=reserved_mib * MIB))
    return tuple(devices)
