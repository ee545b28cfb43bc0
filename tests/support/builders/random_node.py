"""A random life of a node: allocations, errors, starts, exits, restarts and pauses of the exporter, lost devices."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tests.emulation.node import GIB, MIB, Books, EmulatedNode
from tests.emulation.programs import Program
from tests.emulation.torch_process import RemoteError, TorchProcess
from tests.support.servers.exporter_process import ExporterProcess

DEVICES = (0, 1)
TOTAL_BYTES = 16 * GIB
# Readings of the idle cache count for up to five minutes.
_REMEMBERED_SECONDS = 330.0
_MAX_STEPS_IN_THE_DARK = 8

PROGRAM = """
import random
rng, held = random.Random({seed}), []
def step():
    cuda.cudaSetDevice(rng.randrange(2))
    if held and (len(held) > 5 or rng.random() < 0.4):
        free(held.pop(rng.randrange(len(held))))
    else:
        code, pointer = malloc(rng.randrange(1, 64 << 20))
        if not code: held.append(pointer)
while True:
    step()
    say(len(held))
    wait()
"""
"""A program without torch and without a reporter, which allocates or frees memory in each step."""

Stats = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Now:
    """What is true at one time, from the node's books and from torch in each process.

    `stats` has `memory_stats` by the number of the device and the pid, `workloads` the workload of each pid that
    reports.
    """

    books: Books
    stats: Mapping[int, Mapping[int, Stats]]
    workloads: Mapping[int, str]
    lost: frozenset[int]


class World:
    """The node, the exporter and the processes of the run.

    Args:
        torches: The highest number of processes with torch, which all report.
        programs: The highest number of processes without torch.
    """

    def __init__(self, node: EmulatedNode, exporter: ExporterProcess, *, torches: int, programs: int) -> None:
        self.node = node
        self.exporter = exporter
        self.max_torches, self.max_programs = torches, programs
        self.steps = 0
        self.lost: set[int] = set()
        self.unidentified: set[int] = set()
        """Lost devices whose uuid the exporter does not know, because it was started after their loss."""
        self.torches: dict[TorchProcess, list[int]] = {}
        """The numbers of the tensors of each process."""
        self.workloads: dict[TorchProcess, str] = {}
        self.starting: list[TorchProcess] = []
        self.programs: list[Program] = []
        self.ending: dict[int, float] = {}
        """Processes that ended and may still be on the page, with the times of their ends."""
        self.owing: set[TorchProcess] = set()
        """Processes with an error that no exporter has received yet. Such a process is not ended: its error would be
        known to nobody."""
        self.non_torch: dict[tuple[str, str], set[int]] = {}
        """The true values of each process on each device, by pid and uuid."""
        self.reclaimable: dict[tuple[int, int], list[tuple[float, int]]] = {}
        """The true values of each process on each device, by pid and number, with their times."""
        self.starts: Counter[int] = Counter()
        self.ends: Counter[int] = Counter()
        """The starts and ends of processes that report, by pid."""
        self.errors: Counter[tuple[int, int]] = Counter()
        """The out-of-memory errors by pid and device."""
        self.actions: set[str] = set()
        for _ in range(torches):
            self.start_torch()
        self.adopt_started()

    def close(self) -> None:
        """End all processes."""
        for process in (*self.torches, *self.starting, *self.programs):
            process.__exit__()

    # Processes

    def start_torch(self) -> None:
        """Start a process that imports torch."""
        self.starting.append(TorchProcess(self.node, {"GPUMEM_EXPORTER_URL": self.exporter.url}))

    def adopt_started(self) -> None:
        """Wait for the processes that import torch, and for their first reports."""
        while self.starting:
            process, workload = self.starting[-1], f"job-{self.starts.total() % 3}"
            process.call("start_client", workload=workload)
            self.torches[self.starting.pop()] = [process.call("alloc", nbytes=MIB)]
            self.workloads[process] = workload
            self.starts[process.pid] += 1
            self.started(process.pid)
        self.exporter.wait_for_processes(*[process.pid for process in self.torches])

    def started(self, pid: int) -> None:
        """Forget an earlier process with the same pid."""
        self.ending.pop(pid, None)
        self.non_torch = {key: values for key, values in self.non_torch.items() if key[0] != str(pid)}
        self.reclaimable = {key: values for key, values in self.reclaimable.items() if key[0] != pid}

    def end(self, process: TorchProcess | Program) -> int:
        """Kill a process if it still runs, and return its pid."""
        pid = process.pid
        process.__exit__()
        self.ending[pid] = time.monotonic()
        if isinstance(process, TorchProcess):
            del self.torches[process], self.workloads[process]
            self.ends[pid] += 1
        else:
            self.programs.remove(process)
        return pid

    def alive(self) -> set[int]:
        """Return the pids of all processes that use the node."""
        return {process.pid for process in self.torches} | {process.pid for process in self.programs}

    def heal_device(self) -> int:
        """Restore the lost device, and return its number."""
        device = self.lost.pop()
        self.unidentified.discard(device)
        self.node.heal_device(device)
        return device

    def act(self, action: str, process: TorchProcess) -> Any:
        """Request an action on a process, and return the document of its end."""
        document = self.exporter.act(action, target={"pid": process.pid})
        assert {row["outcome"] for row in document["results"]} == {"done"}, document
        self.actions.add(document["id"])
        return document

    # The truth

    def now(self) -> Now:
        """Read the books of the node and the statistics of each process, and remember what may be shown later."""
        books = self.node.books()
        stats = {
            device: {
                process.pid: process.call("stats", device=device)
                for process in self.torches
                if process.pid in books[device].processes
            }
            for device in DEVICES
        }
        seconds = time.monotonic()
        for device, of_device in stats.items():
            for pid, own in of_device.items():
                non_torch = books[device].processes[pid] - own["reserved_bytes.all.current"]
                self.non_torch.setdefault((str(pid), self.node.uuid(device)), set()).add(non_torch)
                known = self.reclaimable.setdefault((pid, device), [])
                known.append((seconds, reclaimable(own)))
                while known[0][0] < seconds - _REMEMBERED_SECONDS:
                    del known[0]
        workloads = {process.pid: workload for process, workload in self.workloads.items()}
        return Now(books, stats, workloads, frozenset(self.lost))


def reclaimable(stats: Stats) -> int:
    """Return the bytes that `torch.cuda.empty_cache()` would release, with classic segments."""
    reserved, active = stats["reserved_bytes.all.current"], stats["active_bytes.all.current"]
    return reserved - active - stats["inactive_split_bytes.all.current"]


class Steps:
    """What can happen on the node. Each step returns what it did, for the log.

    Args:
        pause_seconds: How long the exporter is paused; longer than its `--report.expiry`.
        rests: The number of steps before a step of this name is taken again; 0 without an entry.
        log: Receives a line for each step.
    """

    def __init__(
        self,
        world: World,
        rng: random.Random,
        *,
        pause_seconds: float,
        rests: Mapping[str, int],
        log: Callable[[str], object] = print,
    ) -> None:
        self.world = world
        self.rng = rng
        self._pause_seconds = pause_seconds
        self._rests = rests
        self._log = log
        self.taken: Counter[str] = Counter()
        self._last: dict[str, int] = {}
        """The number of the step that each kind was last taken in."""

    def take(self) -> None:
        """Take one of the possible steps."""
        world = self.world
        torches = len(world.torches) + len(world.starting)
        with_exporter: dict[Callable[[], object], object] = {
            self.allocate_again: True,  # allocations and frees are fast, and the other steps depend on them
            self.clear: True,
            self.reset_peak_by_action: True,
            self.start_torch: torches < world.max_torches,
            self.restart_exporter: True,
            self.pause_exporter: True,
        }
        self._take({**self._without_exporter(), **with_exporter})

    def _without_exporter(self) -> dict[Callable[[], object], object]:
        """Return the steps that need no exporter, and whether each is possible."""
        world = self.world
        may_end = len(world.torches) > 1 and self._endable()
        return {
            self.allocate: True,
            self.free: True,
            self.free_all: True,
            self.reset_peak: True,
            self.run_out_of_memory: True,
            self.continue_program: world.programs,
            self.start_program: len(world.programs) < world.max_programs,
            self.kill_program: world.programs,
            self.kill_torch: may_end,
            self.exit_torch: may_end,
            self.lose_device: not world.lost,
            self.heal_device: world.lost,
            self.restart_driver: True,
        }

    def _take(self, possible: Mapping[Callable[[], object], object]) -> None:
        world = self.world
        step = self.rng.choice([step for step, may in possible.items() if may and self._rested(step.__name__)])
        world.steps += 1
        self.taken[step.__name__] += 1
        self._last[step.__name__] = world.steps
        number, done = world.steps, step()
        self._log(f"{number}: {step.__name__}: {done}")

    def _rested(self, name: str) -> bool:
        return self.world.steps - self._last.get(name, -1_000_000) >= self._rests.get(name, 0)

    def torch(self) -> TorchProcess:
        return self.rng.choice(list(self.world.torches))

    def _endable(self) -> list[TorchProcess]:
        return [process for process in self.world.torches if process not in self.world.owing]

    def allocate(self) -> str:
        process, device = self.torch(), self.rng.choice(DEVICES)
        nbytes = int(512 * (256 * MIB / 512) ** self.rng.random())
        if number := self._allocated(process, device, nbytes):
            self.world.torches[process].append(number)
        return f"{process.pid} {'allocated' if number else 'could not allocate'} {nbytes} bytes on {device}"

    def allocate_again(self) -> str:
        return self.allocate()

    def run_out_of_memory(self) -> str:
        process, device = self.torch(), self.rng.choice(DEVICES)
        assert not self._allocated(process, device, TOTAL_BYTES)
        return f"{process.pid} on {device}"

    def _allocated(self, process: TorchProcess, device: int, nbytes: int) -> int | None:
        """Return the number of a new tensor; None after an out-of-memory error."""
        try:
            return int(process.call("alloc", nbytes=nbytes, device=device))
        except RemoteError as error:
            if error.type != "OutOfMemoryError":
                raise
        self.world.errors[process.pid, device] += 1
        self.world.owing.add(process)
        return None

    def free(self) -> str:
        process = self.torch()
        held = self.world.torches[process]
        numbers = [number for number in held if self.rng.random() < 0.3]
        self.world.torches[process] = [number for number in held if number not in numbers]
        return f"{process.pid} freed {process.call('free', numbers=numbers)}"

    def free_all(self) -> str:
        process = self.torch()
        self.world.torches[process] = []
        return f"{process.pid} freed {process.call('free')}"

    def reset_peak(self) -> str:
        process, device = self.torch(), self.rng.choice(DEVICES)
        process.call("reset_peak", device=device)
        return f"{process.pid} on {device}"

    def reset_peak_by_action(self) -> str:
        process = self.torch()
        self.world.exporter.wait_for_processes(process.pid)
        self.world.act("reset_peak", process)
        return f"{process.pid}"

    def clear(self) -> str:
        process, world = self.torch(), self.world
        world.exporter.wait_for_processes(process.pid)
        before = world.node.books().used_by(process.pid)
        action = world.act("empty_cache", process)
        assert action["freed_bytes"] == before - world.node.books().used_by(process.pid)
        return f"{process.pid} released {action['freed_bytes']}"

    def continue_program(self) -> str:
        program = self.rng.choice(self.world.programs)
        program.go()
        return f"{program.pid} holds {program.heard()}"

    def start_program(self) -> None:
        program = Program(self.world.node, PROGRAM.format(seed=self.rng.getrandbits(32)))
        self.world.programs.append(program)
        program.heard()
        self.world.started(program.pid)

    def kill_program(self) -> int:
        return self.world.end(self.rng.choice(self.world.programs))

    def start_torch(self) -> None:
        self.world.start_torch()

    def kill_torch(self) -> int:
        return self.world.end(self.rng.choice(self._endable()))

    def exit_torch(self) -> int:
        process = self.rng.choice(self._endable())
        assert process.finish() == 0
        return self.world.end(process)

    def lose_device(self) -> int:
        device = self.rng.choice(DEVICES)
        self.world.lost.add(device)
        self.world.node.lose_device(device)
        return device

    def heal_device(self) -> int:
        return self.world.heal_device()

    def restart_driver(self) -> None:
        self.world.node.restart_driver()

    def restart_exporter(self) -> str:
        number = self.rng.choice([signal.SIGTERM, signal.SIGKILL])
        assert self.world.exporter.stop(number) == (0 if number == signal.SIGTERM else -number)
        self._in_the_dark(self.rng.randrange(4))
        self.world.exporter.start()
        self.world.unidentified = set(self.world.lost)
        return number.name

    def pause_exporter(self) -> str:
        ends_seconds = time.monotonic() + self._pause_seconds
        self.world.exporter.signal(signal.SIGSTOP)
        try:
            self._in_the_dark(self.rng.randrange(_MAX_STEPS_IN_THE_DARK))
            time.sleep(max(0.0, ends_seconds - time.monotonic()))
        finally:
            self.world.exporter.signal(signal.SIGCONT)
        return f"{self._pause_seconds:g} s"

    def _in_the_dark(self, steps: int) -> None:
        """Take steps that the exporter does not see."""
        for _ in range(steps):
            self._take(self._without_exporter())
            self.world.now()
