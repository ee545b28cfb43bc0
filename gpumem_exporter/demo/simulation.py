"""The simulated node: devices, the processes on them, and time.

Time is the simulation's own. It passes in ticks, and only while `advance` is called; the same seed and the same calls
give the same node. Thread-safe through `lock`, which whoever asks or changes anything holds.
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
from gpumem_exporter.demo.roster import ROSTER, Workload
from gpumem_exporter.wire.protocol import ProcessIdentity

__all__ = ["TICK_SECONDS", "Simulation"]

TICK_SECONDS = 0.5
MAX_CATCH_UP_TICKS = 20
"""A simulation that was not advanced for longer (the machine slept) leaves the rest of that time out."""
CLOCK_TICKS_PER_SECOND = 100
UPTIME_SECONDS = 40 * 86400
"""How long the simulated machine had been up when the demo began."""
PID_NAMESPACE = 4026531836
"""The inode that Linux gives the first PID namespace."""
PID_MAX = 4_194_304
PID_MIN_LATER = 300
"""Where Linux goes on when it has given out its last pid."""
SMOOTHING = 0.5
"""How far a device's utilization moves towards its processes' in one tick."""


@dataclass(slots=True)
class _Place:
    """A place in the roster, and the process that fills it now."""

    workload: Workload
    index: int
    starts_at_tick: int
    launches: int = 0
    process: SimulatedProcess | None = None
    program: Iterator[None] | None = None


class Simulation:
    """The node.

    Args:
        seed: chooses UUIDs, pids and everything that happens by chance.
        now: the caller's clock, in seconds; `advance` takes the same.
        roster: what runs on the node.
    """

    def __init__(self, seed: int, now: float, roster: Sequence[Workload] = ROSTER) -> None:
        self.lock = threading.Lock()
        self._seed = seed
        self._rng = Random(f"{seed}:node")  # noqa: S311 - chance, not secrecy
        self.devices = build_devices(self._rng)
        self._by_uuid = {device.identity.uuid: device for device in self.devices}
        self._origin_seconds = now
        self._tick = 0
        self._next_pid = self._rng.randint(12_000, 60_000)
        self._by_pid: dict[int, SimulatedProcess] = {}
        self._places = [
            _Place(workload, index, starts_at_tick=-workload.warm_up_ticks)
            for workload in roster
            for index in range(len(workload.placements))
        ]
        self._warm_up()

    def advance(self, now: float) -> None:
        """Let time pass until `now`."""
        target = int((now - self._origin_seconds) / TICK_SECONDS)
        with self.lock:
            for _ in range(min(target - self._tick, MAX_CATCH_UP_TICKS)):
                self._tick += 1
                for place in self._places:
                    self._advance_place(place)
                self._measure_utilization()
            skipped_ticks = target - self._tick
            if skipped_ticks > 0:
                self._origin_seconds += skipped_ticks * TICK_SECONDS

    def processes(self) -> tuple[SimulatedProcess, ...]:
        """The processes that are there now; with the lock held."""
        return tuple(self._by_pid.values())

    def process(self, pid: int) -> SimulatedProcess | None:
        """The process with that pid; with the lock held."""
        return self._by_pid.get(pid)

    def device(self, uuid: str) -> SimulatedDevice | None:
        """The device with that UUID; with the lock held."""
        return self._by_uuid.get(uuid)

    def _warm_up(self) -> None:
        """Give every workload a past, so that the first look shows a node at work."""
        self._tick = min((place.starts_at_tick for place in self._places), default=0)
        while self._tick < 0:
            for place in self._places:
                self._advance_place(place)
            self._tick += 1
        for _ in range(8):
            self._measure_utilization()

    def _advance_place(self, place: _Place) -> None:
        if place.program is None:
            if self._tick < place.starts_at_tick:
                return
            self._launch(place)
        program, process = place.program, place.process
        if program is None or process is None:
            return
        try:
            next(program)
        except StopIteration:
            self._end(place, process, crashed=False)
        except SimulatedOutOfMemoryError:
            self._end(place, process, crashed=True)

    def _launch(self, place: _Place) -> None:
        """Start a process in a place; one that does not even get its CUDA context is tried again later."""
        workload, index = place.workload, place.index
        place.launches += 1
        rng = Random(f"{self._seed}:{workload.name}:{index}:{place.launches}")  # noqa: S311
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
        place.process, place.program = process, workload.program(process)
        self._by_pid[pid] = process
        try:
            for device in range(len(workload.placements[index])):
                process.load_libraries(workload.context_bytes, device=device)
        except SimulatedOutOfMemoryError:
            self._end(place, process, crashed=True)

    def _end(self, place: _Place, process: SimulatedProcess, *, crashed: bool) -> None:
        process.end(crashed=crashed)
        del self._by_pid[process.pid]
        place.process = place.program = None
        place.starts_at_tick = self._tick + place.workload.restart_ticks

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
            moved = device.utilization_ratio + SMOOTHING * (min(wanted, 1.0) - device.utilization_ratio)
            device.utilization_ratio = round(moved, 2)


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
