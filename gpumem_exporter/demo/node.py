"""The demo node: simulated devices and processes, their time and reports, and what driver and system show of them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from random import Random
from uuid import UUID

from gpumem_client.allocator.simulated import SimulatedOutOfMemoryError
from gpumem_client.guest_safety import ErrorLog
from gpumem_client.reporter.delivery import Delivery, Outcome, Wakeup
from gpumem_client.reporter.reporter_settings import ReporterSettings
from gpumem_client.wire.procfs import INITIAL_PID_NAMESPACE
from gpumem_client.wire.protocol import ProcessIdentity
from gpumem_exporter import __version__
from gpumem_exporter.core.container import HERE, Place
from gpumem_exporter.core.readings import DeviceMemory, DeviceReading, ProcessFacts, ProcessMemory
from gpumem_exporter.demo.heap import take_profiles
from gpumem_exporter.demo.memory import DeviceSlot, SimulatedDevice
from gpumem_exporter.demo.past import LastMinute, past_of
from gpumem_exporter.demo.process import MIB, SimulatedProcess, Workload
from gpumem_exporter.demo.workloads import DEMO_WORKLOADS, DEVICES
from gpumem_exporter.node.host import Host
from gpumem_exporter.node.provider import Provider

TICK_SECONDS = 0.5
RESTART_TICKS = 40
"""The time from the end of a process to the start of the next one."""
RUN_UP_TICKS = 130
"""How long all programs run before the demo starts: idle cache is known after a minute."""
UPTIME_SECONDS = 40 * 86400
"""The uptime of the simulated machine when the demo starts."""


class DemoNode:
    """A simulated node whose processes report to an exporter over HTTP. The same seed creates the same node.

    `provider` and `host` work immediately. The node has its own time, which passes between `start` and `stop`, or in
    `advance`. Callers must hold `lock` while they access values of processes or devices.
    """

    def __init__(
        self,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
        workloads: Sequence[Workload] = DEMO_WORKLOADS,
    ) -> None:
        self.lock = threading.Lock()
        self.provider = DemoProvider(self)  # type: ignore[abstract] # `open` and `close` do nothing
        self.host = DemoHost(self)  # type: ignore[abstract] # processes say their own Slurm job
        self._clock, self._origin_seconds = clock, clock()
        self._wakeup = Wakeup()
        self._thread: threading.Thread | None = None
        self._delivery: Delivery | None = None
        # What has ended without a crash since the last report.
        self._ended: list[SimulatedProcess] = []
        self._seed = seed
        self._rng = Random(f"{seed}:node")  # noqa: S311 - not for cryptography
        self.devices = tuple(_devices(self._rng))
        self._next_pid = self._rng.randint(12_000, 60_000)
        self.processes: dict[int, SimulatedProcess] = {}
        """The running processes by pid."""
        # The ticks at which the processes continue.
        self._due_ticks = {
            self._processes_of(workload, index): -int(workload.age_seconds / TICK_SECONDS)
            for workload in workloads
            for index in range(len(workload.placements))
        }
        last_minute: LastMinute = {}
        # Until the run-up, most programs only count their steps.
        while (tick := min(self._due_ticks.values(), default=0)) < -RUN_UP_TICKS:
            self._run_programs(tick)
        for tick in range(-RUN_UP_TICKS, 0):
            self._run_programs(tick)
            if tick % 20 == 0:  # idle cache is found in readings of its whole window
                for process in self.processes.values():
                    process.loop.next_report()  # without a receiver
            second = 60 + tick // 2
            for process in self.processes.values() if second >= 0 else ():
                for index, slot in enumerate(process.slots):
                    last_minute.setdefault((process, index), {})[second] = slot.use
        self._tick = 0
        self.past = partial(past_of, last_minute)
        """Yields the rows of the hour before the start, until a time in Unix seconds."""

    def start(self, exporter_url: str, *, report_token: str | None = None) -> None:
        """Let time pass in a thread, once, and let the processes report. The exporter may start later."""
        self.connect(exporter_url, report_token=report_token)
        self._thread = threading.Thread(target=self._run, name="gpumem-demo", daemon=True)
        self._thread.start()

    def stop(self, timeout_seconds: float = 5.0) -> None:
        """Stop the thread and wait at most `timeout_seconds`; may be called again."""
        if self._thread is not None:
            self._wakeup.stop()
            self._thread.join(timeout_seconds)

    def connect(self, exporter_url: str, *, report_token: str | None = None) -> None:
        """Let the processes report, over one connection and in the thread that calls `advance`."""
        settings = ReporterSettings.resolve(url=exporter_url, environ={"GPUMEM_REPORT_TOKEN": report_token or ""})
        self._delivery = Delivery(settings, self._wakeup, ErrorLog())

    def advance(self) -> None:
        """Let a tick pass. Each process reports once a second, whatever the exporter's report interval.

        A process with a command whose time ends earlier reports then: the exporter waits less than a second for it.
        """
        with self.lock:
            self._run_programs(self._tick + 1)
        if self._delivery is not None:
            self._report_all(self._delivery)

    def _run(self) -> None:
        next_seconds = self._clock()
        while self._wakeup.starts_round():
            self.advance()
            now = self._clock()
            next_seconds = max(next_seconds + TICK_SECONDS, now)
            self._wakeup.wait(next_seconds - now)
        if self._delivery is not None:
            self._delivery.close()

    def _report_all(self, delivery: Delivery) -> None:
        """Report each process, until a report is not answered."""
        while self._ended:
            delivery.deliver(self._ended.pop().loop.final_report())
        due = [each for each in self.processes.values() if each.reports and (self._tick % 2 or each.reports_soon)]
        for process in due:
            pause = 0.0
            while not pause:  # again at once if a command has run
                with self.lock:
                    report = process.loop.next_report()
                # Without the lock, because the poller reads the node meanwhile. Without a hold, because one thread
                # reports all processes.
                outcome, reply = delivery.deliver(replace(report, hold_seconds=0.0))
                if outcome is Outcome.FAILED:
                    return
                with self.lock:
                    pause = process.loop.answered(report, outcome, reply)
            process.reports_soon = pause < 2 * TICK_SECONDS

    def _run_programs(self, tick: int) -> None:
        """Run the programs that are due at a tick until their next pause."""
        self._tick = tick
        for processes, due_tick in self._due_ticks.items():
            if due_tick <= tick:
                self._due_ticks[processes] = tick + next(processes)

    def _processes_of(self, workload: Workload, index: int) -> Iterator[int]:
        """Run the processes of one rank of a workload, each after the end of the one before. Yields ticks to wait."""
        for launch in count(1):
            process = self._launch(workload, index, Random(f"{self._seed}:{workload.name}:{index}:{launch}"))  # noqa: S311
            take_profiles(process, lambda document: self._delivery.send_profile(document) if self._delivery else "")
            try:
                for pause_ticks in process.run():
                    process.loop.sampler.take()  # the reports fit the next reading of the driver
                    process.loop.sampler.read()  # for the idle cache
                    if self._tick < -RUN_UP_TICKS:
                        process.loop.next_report()  # without a receiver: it shows that the process was active
                    yield pause_ticks
                if self._delivery is not None:
                    self._ended.append(process)
            except SimulatedOutOfMemoryError:
                process.crashed = True
            process.end()
            del self.processes[process.pid]
            yield RESTART_TICKS

    def _launch(self, workload: Workload, index: int, rng: Random) -> SimulatedProcess:
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
            rank=str(index) if len(workload.placements) > 1 else "",
            command=workload.command,
            torch_version=SimulatedProcess.torch_version,
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
        process = self.processes[pid] = SimulatedProcess(
            *(identity, facts, workload, [self.devices[number] for number in workload.placements[index]]),
            rng=rng,
            clock=lambda: UPTIME_SECONDS + self._tick * TICK_SECONDS,
            until_run_up=lambda: max(0, -RUN_UP_TICKS - self._tick),
        )
        return process


def _devices(rng: Random) -> Iterator[SimulatedDevice]:
    """Create the eight devices of the node: seven of one model, and one of another model."""
    for index in range(DEVICES):
        uuid = f"GPU-{UUID(int=rng.getrandbits(128))}"
        bus_id = f"00000000:{0x1A + 0x11 * index:02X}:00.0"
        name, total_mib, reserved_mib = ("A100 80GB PCIe", 81920, 626) if index == 7 else ("H100 80GB HBM3", 81559, 551)
        identity = DeviceReading(str(index), uuid, f"NVIDIA {name} (demo)", bus_id)
        usable_bytes = (total_mib - reserved_mib) * MIB
        yield SimulatedDevice(identity, usable_bytes, usable_bytes, reserved_mib * MIB)


class DemoProvider(Provider):
    """The simulated driver. Thread-safe; calls never block for long."""

    source = "demo"

    def __init__(self, node: DemoNode) -> None:
        self._node = node

    def driver_version(self) -> str:
        return "580.95.05-demo"

    def devices(self) -> tuple[DeviceReading, ...]:
        return tuple(device.identity for device in self._node.devices)

    def read_memory(self, uuid: str) -> DeviceMemory:
        with self._node.lock:
            return next(device.memory for device in self._node.devices if device.identity.uuid == uuid)

    def read_processes(self, uuid: str) -> tuple[ProcessMemory, ...]:
        with self._node.lock:
            return tuple(ProcessMemory(process.pid, slot.use.used) for process, slot in self._slots(uuid))

    def read_utilization_ratio(self, uuid: str) -> float:
        with self._node.lock:
            return min(1.0, round(sum(process.busy_ratio for process, _ in self._slots(uuid)), 2))

    def read_active_pids(self, uuid: str) -> frozenset[int]:
        with self._node.lock:
            return frozenset(process.pid for process, _ in self._slots(uuid) if process.busy_ratio > 0)

    def _slots(self, uuid: str) -> Iterator[tuple[SimulatedProcess, DeviceSlot]]:
        for process in self._node.processes.values():
            for slot in process.slots:
                if slot.device.identity.uuid == uuid:
                    yield process, slot


class DemoHost(Host):
    """What the operating system of the simulated node shows. Thread-safe; calls never block."""

    def __init__(self, node: DemoNode) -> None:
        self._node = node

    def facts(self, pid: int) -> ProcessFacts | None:
        process = self._node.processes.get(pid)
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
