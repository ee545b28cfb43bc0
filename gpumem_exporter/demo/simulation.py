"""The simulated node: devices, processes and time.

The simulation has its own time, which advances in ticks and only in `advance`. The same seed and the same calls create
the same node. Callers must hold `lock` while they access processes or values of devices; `advance` acquires it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
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
RUN_UP_TICKS = 130
"""How long all programs run before the demo starts: idle cache is known after a minute."""
MAX_CATCH_UP_TICKS = 20
"""The most ticks in one call of `advance`; the rest of a longer pause (the machine slept) is skipped."""
UPTIME_SECONDS = 40 * 86400
"""The uptime of the simulated machine when the demo starts."""


@dataclass(slots=True)
class Instance:
    """One process slot of a workload, with its current process."""

    workload: Workload
    index: int
    due_tick: int
    """When its program continues, or its next process starts."""
    launches: int = 0
    running: SimulatedProcess | None = None
    states: list[tuple[int, Sequence[tuple[int, int, int, int]]]] = field(default_factory=list)
    """Until the demo starts: each tick in which its program ran, and the state of each slot; empty at its end."""


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
        self.instances = [
            Instance(workload, index, due_tick=-int(workload.age_seconds / TICK_SECONDS))
            for workload in workloads
            for index in range(len(workload.placements))
        ]
        # Until the run-up, most programs only count their steps.
        while (tick := min((each.due_tick for each in self.instances), default=0)) < -RUN_UP_TICKS:
            self._tick = tick
            self._run_programs()
        for tick in range(-RUN_UP_TICKS, 0):
            self._tick = tick
            self._run_programs()
            if tick % 20 == 0:  # idle cache is found in readings of its whole window
                for process in self.processes():
                    process.loop.next_report()  # without a receiver
        self._tick = 0

    def advance(self, now: float) -> None:
        """Advance the simulation to `now`."""
        target = int((now - self._origin_seconds) / TICK_SECONDS)
        with self.lock:
            for _ in range(min(target - self._tick, MAX_CATCH_UP_TICKS)):
                self._tick += 1
                self._run_programs()
            skipped_ticks = target - self._tick
            if skipped_ticks > 0:
                self._origin_seconds += skipped_ticks * TICK_SECONDS

    def processes(self) -> tuple[SimulatedProcess, ...]:
        """Return the running processes."""
        return tuple(self._by_pid.values())

    def process(self, pid: int) -> SimulatedProcess | None:
        """Return the process with a pid; None if there is none."""
        return self._by_pid.get(pid)

    def _run_programs(self) -> None:
        """Run the programs that are due until their next pause."""
        for instance in self.instances:
            if instance.due_tick <= self._tick:
                self._run_program(instance)

    def _run_program(self, instance: Instance) -> None:
        """Run a program. Without memory for its CUDA context, a process crashes and is started again later."""
        process = instance.running or self._launch(instance)
        try:
            if process.program is None:
                for device in range(len(process.slots)):
                    process.load_libraries(instance.workload.context_bytes, device=device)
                process.program = instance.workload.program(process)
            pause_ticks = next(process.program)
        except (StopIteration, SimulatedOutOfMemoryError) as end:
            process.end(crashed=isinstance(end, SimulatedOutOfMemoryError))
            del self._by_pid[process.pid]
            instance.running = None
            pause_ticks = instance.workload.restart_ticks
        else:
            process.loop.sampler.take()  # the reports fit the next reading of the driver
            process.loop.sampler.read()  # for the idle cache
            if self._tick < -RUN_UP_TICKS < self._tick + pause_ticks:
                process.loop.next_report()  # without a receiver: it shows that the process was active
        instance.due_tick = self._tick + pause_ticks
        if self._tick < 0:
            instance.states.append((self._tick, () if process.ended else [slot.state for slot in process.slots]))

    def _launch(self, instance: Instance) -> SimulatedProcess:
        workload, index = instance.workload, instance.index
        instance.launches += 1
        rng = Random(f"{self._seed}:{workload.name}:{index}:{instance.launches}")  # noqa: S311
        pid = self._next_pid
        self._next_pid += self._rng.randint(1, 400)
        started_seconds = UPTIME_SECONDS + self._tick * TICK_SECONDS
        ticks = int(started_seconds * 100)
        identity = ProcessIdentity(
            pid=pid,
            start_time_ticks=ticks,
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
        namespace, _, pod = workload.k8s_pod.partition("/")
        facts = ProcessFacts(
            *(pid, ticks, workload.command, workload.user),
            container_id=f"{rng.getrandbits(256):064x}" if pod else "",
            k8s_namespace=namespace,
            k8s_pod=f"{pod}-{index}" if pod else "",
            k8s_container="main" if pod else "",
            started_seconds=self._origin_seconds + self._tick * TICK_SECONDS,
        )
        process = self._by_pid[pid] = instance.running = SimulatedProcess(
            *(identity, facts, [self.devices[number] for number in workload.placements[index]]),
            reports=workload.reports,
            planned_bytes=workload.planned_bytes,
            scale=workload.scale,
            rng=rng,
            clock=lambda: UPTIME_SECONDS + self._tick * TICK_SECONDS,
            until_run_up=lambda: max(0, -RUN_UP_TICKS - self._tick),
        )
        if workload.nccl_bytes is not None:
            for slot in process.slots:
                slot.nccl_bytes = int(workload.nccl_bytes * workload.scale)
        return process


def _devices(rng: Random) -> tuple[SimulatedDevice, ...]:
    """Create the eight devices of the node: seven of one model, and one of another model."""
    devices = []
    for index in range(DEVICES):
        digits = f"{rng.getrandbits(128):032x}"
        uuid = f"GPU-{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"
        bus_id = f"00000000:{0x1A + 0x11 * index:02X}:00.0"
        name, total_mib, reserved_mib = ("A100 80GB PCIe", 81920, 626) if index == 7 else ("H100 80GB HBM3", 81559, 551)
        identity = DeviceIdentity(str(index), uuid, f"NVIDIA {name} (demo)", bus_id)
        usable_bytes = (total_mib - reserved_mib) * MIB
        devices.append(SimulatedDevice(identity, usable_bytes, usable_bytes, reserved_mib * MIB))
    return tuple(devices)
