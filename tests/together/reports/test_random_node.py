"""A random run of allocations, exits, restarts and failures on a node: every value on the page is correct.

    GPUMEM_RANDOM_STEPS=10000 python -m pytest -s tests/together/reports/test_random_node.py

The default is 200 steps. The run prints its seed. `GPUMEM_RANDOM_SEED` repeats its choices, but not the times at which
reports and polls arrive.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.claims.place import COMPARED
from tests.conftest import StartExporter
from tests.emulation.fixtures import MakeNode
from tests.emulation.node import GIB, MIB, EmulatedNode
from tests.emulation.programs import Program
from tests.emulation.torch_process import RemoteError, TorchProcess
from tests.support.device_truth import scrape, shown, truth
from tests.support.exporter_process import UNLIMITED, ExporterProcess, Metrics
from tests.support.waiting import wait_until_equal

STEPS = int(os.environ.get("GPUMEM_RANDOM_STEPS", "200"))
QUIET_EVERY = 25
DEVICES = (0, 1)
TORCH_PROCESSES, PROGRAMS = 3, 6
SETTLE_SECONDS = 90.0
"""Longer than the longest pause between two attempts to read a lost device."""

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


class World:
    """The node, the exporter and the processes of the run."""

    def __init__(self, node: EmulatedNode, exporter: ExporterProcess) -> None:
        self.node = node
        self.exporter = exporter
        self.steps = 0
        self.lost: set[int] = set()
        self.torches: dict[TorchProcess, list[int]] = {}
        self.starting: list[TorchProcess] = []
        self.programs: list[Program] = []
        self.ending: set[int] = set()
        """Processes that ended and may still be on the page."""
        self.non_torch: dict[tuple[str, str], set[int]] = {}
        """The true values of each process on each device, by pid and uuid."""

    def close(self) -> None:
        for process in (*self.torches, *self.starting, *self.programs):
            process.__exit__()

    # Processes

    def start_torch(self) -> None:
        self.starting.append(TorchProcess(self.node, {"GPUMEM_EXPORTER_URL": self.exporter.url}))

    def adopt_started(self) -> None:
        """Wait for the processes that import torch."""
        while self.starting:
            process = self.starting[-1]
            process.call("start_client", workload=f"job-{self.steps % 3}")
            self.torches[self.starting.pop()] = [process.call("alloc", nbytes=MIB)]
            self._started(process.pid)

    def start_program(self, rng: random.Random) -> None:
        self.programs.append(Program(self.node, PROGRAM.format(seed=rng.getrandbits(32))))
        self.programs[-1].heard()
        self._started(self.programs[-1].pid)

    def _started(self, pid: int) -> None:
        """Forget an earlier process with the same pid."""
        self.ending.discard(pid)
        self.non_torch = {key: values for key, values in self.non_torch.items() if key[0] != str(pid)}

    def ended(self, process: TorchProcess | Program) -> None:
        pid = process.pid
        process.__exit__()
        self.ending.add(pid)

    def alive(self) -> set[int]:
        return {process.pid for process in self.torches} | {process.pid for process in self.programs}

    # Invariants

    def check(self) -> None:
        """Check what is true in every scrape, before reports and readings have followed the last step."""
        metrics = scrape(self.exporter)
        on_page = {pid for pid in _labels(metrics, "pid") if pid.isdecimal()}
        assert on_page <= {str(pid) for pid in self.alive() | self.ending}, "a process that is not on the node"
        self.ending = {pid for pid in self.ending if str(pid) in on_page}
        assert {uuid for uuid in _labels(metrics, "uuid") if uuid} <= {self.node.uuid(i) for i in DEVICES}
        for labels, up in metrics.samples.get("gpumem_device_up", {}).items():
            uuid = dict(labels)["uuid"]
            if up or not uuid:
                continue
            values = shown(metrics, uuid)
            assert not any(values[name] for name in values if name != "allocated"), "values of a device that is down"
        self.check_non_torch(metrics)

    def check_non_torch(self, metrics: Metrics) -> None:
        """Check that non-torch memory has only values that it really had, whatever the allocator did meanwhile."""
        books = self.node.books()
        for process in self.torches:
            for device in DEVICES:
                used = books[device].processes.get(process.pid)
                if used is not None:
                    reserved = process.call("stats", device=device)["reserved_bytes.all.current"]
                    key = str(process.pid), self.node.uuid(device)
                    self.non_torch.setdefault(key, set()).add(used - reserved)
        for labels, value in metrics.samples.get("gpumem_torch_non_torch_bytes", {}).items():
            key = dict(labels)["pid"], dict(labels)["uuid"]
            assert value in self.non_torch[key], f"non-torch memory of {key}"

    def check_quiet(self, rng: random.Random) -> None:
        """Check every value to the byte, once reports and readings have followed."""
        self.adopt_started()
        wanted = self._truth()
        found: dict[str, Any] = {}

        def read() -> dict[str, Any]:
            nonlocal found
            found = self._shown(scrape(self.exporter))
            return found

        wait_until_equal(read, wanted, "the correct values on the page", SETTLE_SECONDS)
        self.check()
        assert not self.ending, "still on the page"
        self.check_clear(rng.choice(list(self.torches)))

    def check_clear(self, process: TorchProcess) -> None:
        """Check that torch, the driver and the action agree on the bytes that a clear releases."""
        pid = str(process.pid)

        def reserved() -> int:
            return sum(process.call("stats", device=device)["reserved_bytes.all.current"] for device in DEVICES)

        before, books = reserved(), self._used()
        reclaimable = sum(scrape(self.exporter).values("gpumem_torch_reclaimable_bytes", pid=pid))
        action = self.exporter.act("empty_cache", target={"pid": process.pid})
        assert {row["outcome"] for row in action["results"]} == {"done"}, action
        assert {
            "reclaimable": reclaimable,
            "torch": before - reserved(),
            "driver": books - self._used(),
        } == dict.fromkeys(("reclaimable", "torch", "driver"), action["freed_bytes"])

    def _used(self) -> int:
        return sum(book.used_bytes for book in self.node.books().devices)

    def _truth(self) -> dict[str, Any]:
        books, whole = self.node.books(), {}
        series: dict[str, dict[str, float]] = {name: {} for name in COMPARED}
        for device in DEVICES:
            uuid = self.node.uuid(device)
            stats = {
                process.pid: process.call("stats", device=device)
                for process in self.torches
                if process.pid in books[device].processes
            }
            page = dict(truth(books[device], stats))
            if device in self.lost:
                page |= {"ledger": {}, "total": [], "used": [], "free": [], "reserved": [], "processes": {}}
            whole[uuid] = page
            for name, key in COMPARED.items():
                series[name] |= {f"{pid} on {uuid}": own[key] for pid, own in stats.items()}
        pids = {process.pid for process in self.torches} | {
            pid for device in set(DEVICES) - self.lost for pid in books[device].processes
        }
        return {"devices": whole, "series": series, "pids": {str(pid) for pid in pids}}

    def _shown(self, metrics: Metrics) -> dict[str, Any]:
        series = {
            name: {
                f"{dict(labels)['pid']} on {dict(labels)['uuid']}": value
                for labels, value in metrics.samples.get(name, {}).items()
            }
            for name in COMPARED
        }
        devices = {self.node.uuid(device): shown(metrics, self.node.uuid(device)) for device in DEVICES}
        return {"devices": devices, "series": series, "pids": _labels(metrics, "pid")}


def _labels(metrics: Metrics, name: str) -> set[str]:
    """Return the values of a label, except on the series of out-of-memory errors, which outlive their processes."""
    states = (samples for metric, samples in metrics.samples.items() if not metric.startswith("gpumem_last_oom_"))
    found = (dict(labels) for samples in states for labels in samples)
    return {labels[name] for labels in found if name in labels}


class Steps:
    """What can happen on the node. Each step returns what it did, for the log."""

    def __init__(self, world: World, rng: random.Random) -> None:
        self.world = world
        self.rng = rng
        self.last: dict[str, int] = {}
        """The number of the step that each kind was last taken in."""

    def take(self) -> None:
        """Take one of the possible steps."""
        world = self.world
        torches = len(world.torches) + len(world.starting)
        possible: dict[Callable[[], object], object] = {
            self.allocate: True,
            self.allocate_again: True,  # allocations and frees are fast, and the other steps depend on them
            self.free: True,
            self.free_all: True,
            self.clear: True,
            self.continue_program: world.programs,
            self.start_program: len(world.programs) < PROGRAMS,
            self.kill_program: world.programs,
            self.start_torch: torches < TORCH_PROCESSES,
            self.kill_torch: len(world.torches) > 1 and self.rested("kill_torch", 100),
            self.lose_device: not world.lost and self.rested("lose_device", 60),
            self.heal_device: world.lost,
            self.restart_exporter: self.rested("restart_exporter", 60),
            self.restart_driver: self.rested("restart_driver", 60),
        }
        step = self.rng.choice([step for step, may in possible.items() if may])
        world.steps += 1
        self.last[step.__name__] = world.steps
        print(f"{world.steps}: {step.__name__}: {step()}")

    def rested(self, name: str, steps: int) -> bool:
        """Return whether a slow step was last taken at least this number of steps ago."""
        return self.world.steps - self.last.get(name, -steps) >= steps

    def torch(self) -> TorchProcess:
        return self.rng.choice(list(self.world.torches))

    def allocate(self) -> str:
        process, device = self.torch(), self.rng.choice(DEVICES)
        nbytes = int(512 * (256 * MIB / 512) ** self.rng.random())
        try:
            self.world.torches[process].append(process.call("alloc", nbytes=nbytes, device=device))
        except RemoteError as error:
            if error.type != "OutOfMemoryError":
                raise
            return f"{process.pid} could not allocate {nbytes} bytes on {device}"
        return f"{process.pid} allocated {nbytes} bytes on {device}"

    def allocate_again(self) -> str:
        return self.allocate()

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

    def clear(self) -> str:
        process = self.torch()
        self.world.exporter.wait_for_processes(process.pid)
        before = self.world.node.books().used_by(process.pid)
        action = self.world.exporter.act("empty_cache", target={"pid": process.pid})
        assert {row["outcome"] for row in action["results"]} == {"done"}, action
        assert action["freed_bytes"] == before - self.world.node.books().used_by(process.pid)
        return f"{process.pid} released {action['freed_bytes']}"

    def continue_program(self) -> str:
        program = self.rng.choice(self.world.programs)
        program.go()
        return f"{program.pid} holds {program.heard()}"

    def start_program(self) -> None:
        self.world.start_program(self.rng)

    def kill_program(self) -> int:
        program = self.world.programs.pop(self.rng.randrange(len(self.world.programs)))
        self.world.ended(program)
        return program.pid

    def start_torch(self) -> None:
        self.world.start_torch()

    def kill_torch(self) -> int:
        process = self.torch()
        pid = process.pid
        del self.world.torches[process]
        self.world.ended(process)
        return pid

    def lose_device(self) -> int:
        device = self.rng.choice(DEVICES)
        self.world.lost.add(device)
        self.world.node.lose_device(device)
        return device

    def heal_device(self) -> int:
        device = self.world.lost.pop()
        self.world.node.heal_device(device)
        return device

    def restart_exporter(self) -> str:
        number = self.rng.choice([signal.SIGTERM, signal.SIGKILL])
        assert self.world.exporter.stop(number) == (0 if number == signal.SIGTERM else -number)
        self.world.exporter.start()
        return number.name

    def restart_driver(self) -> None:
        self.world.node.restart_driver()


@pytest.fixture
def world(make_node: MakeNode, start_exporter: StartExporter) -> Iterator[World]:
    node = make_node(devices=len(DEVICES), total_bytes=16 * GIB)
    folder = Path(node.path) / "events"
    flags = ("--report.interval", "0.1", "--collect.interval", "0.1", *UNLIMITED, "--storage.path", str(folder))
    world = World(node, start_exporter(node, *flags, "--log.level", "warning"))
    try:
        for _ in range(TORCH_PROCESSES):
            world.start_torch()
        world.adopt_started()
        yield world
    finally:
        world.close()


@pytest.mark.timeout(300 + STEPS)
def test_every_value_is_correct_in_a_random_run(world: World) -> None:
    seed = int(os.environ.get("GPUMEM_RANDOM_SEED") or random.SystemRandom().getrandbits(32))
    print(f"GPUMEM_RANDOM_SEED={seed} GPUMEM_RANDOM_STEPS={STEPS}")
    rng = random.Random(seed)
    steps = Steps(world, rng)
    world.check()  # a process that ends in the first step may stay on the page
    while world.steps < STEPS:
        steps.take()
        world.check()
        if world.steps % QUIET_EVERY == 0:
            world.check_quiet(rng)
