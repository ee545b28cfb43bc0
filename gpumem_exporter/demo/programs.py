"""The programs of the demo's processes that do not train; see `trainings` for the others.

A program is a generator, and each `yield` ends one tick of the simulation. A program ends when it returns, and crashes
if it raises `SimulatedOutOfMemoryError`. It uses only its process as a source of data and random numbers, so the same
seed always creates the same node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

from gpumem_client.allocator.simulated import SimulatedOutOfMemoryError
from gpumem_exporter.demo.process import SimulatedProcess, Tensor

Program: TypeAlias = Callable[[SimulatedProcess], Iterator[None]]

MIB = 1 << 20
GIB = 1 << 30


def indexing_with_a_leak(process: SimulatedProcess) -> Iterator[None]:
    """Leaks the new items of each batch, which become fewer and fewer, until no memory is left.

    The leaked tensors are in reference cycles, and the program has disabled Python's garbage collector for speed. The
    action `collect_garbage` therefore frees them.
    """
    rng = process.rng
    process.busy_ratio = 0.55
    process.keep(8, 512 * MIB)
    try:
        while True:
            batch = [process.tensor(640 * MIB) for _ in range(3)]
            new_kib = 2800 + 7_400_000 // (600 + process.step)
            process.garbage.append(process.tensor(rng.randint(new_kib // 2, new_kib) * 1024))
            process.free(batch)
            process.end_step()
            yield
    except SimulatedOutOfMemoryError:
        process.busy_ratio = 0.0
        for _ in range(12):  # writing the traceback takes a while
            yield
        raise


def notebook(process: SimulatedProcess) -> Iterator[None]:
    """A notebook that rarely runs a cell and keeps gigabytes of unused cache in between."""
    rng = process.rng
    process.keep(20, 96 * MIB)
    sizes = [rng.randint(900, 2000) * MIB for _ in range(18)]
    left_out = 0
    while True:
        process.busy_ratio = 0.6
        for _ in range(6):
            experiment: list[Tensor] = []
            try:
                experiment.extend(process.tensor(size_bytes) for size_bytes in sizes[left_out:])
            except SimulatedOutOfMemoryError:
                process.busy_ratio = 0.0  # the cell shows its traceback, and the notebook continues
            yield
            # The result of each run is in a reference cycle: the last traceback, an output cell.
            process.garbage += experiment[-1:]
            process.free(experiment[:-1])
            process.free(process.garbage[:-3])
            del process.garbage[:-3]
        left_out = rng.randint(5, 7)  # later runs are smaller
        process.busy_ratio = 0.0
        for _ in range(rng.randint(2400, 4800)):
            yield


def inference_server(process: SimulatedProcess) -> Iterator[None]:
    """Answers a varying number of requests; each uses its own key-value cache while it runs."""
    rng = process.rng
    process.keep(24, 280 * MIB)
    running: list[tuple[int, list[Tensor]]] = []
    tick = 0
    while True:
        tick += 1
        burst = tick % 90 < 24
        for _ in range(rng.randint(2, 5) if burst else int(rng.random() < 0.25)):
            if len(running) < 32:
                try:
                    blocks = [process.tensor(rng.randint(32, 240) * MIB)]
                except SimulatedOutOfMemoryError:
                    break  # the request is rejected
                running.append((tick + rng.randint(3, 14), blocks))
        for entry in [entry for entry in running if entry[0] <= tick]:
            running.remove(entry)
            process.free(entry[1])
        process.busy_ratio = min(0.95, 0.03 + 0.04 * len(running))
        yield


def sleeping_engine(process: SimulatedProcess) -> Iterator[None]:
    """An engine in sleep mode: between its requests it unmaps the memory of its weights and of its key-value cache."""
    (slot,) = process.slots
    process.keep(24, 512 * MIB)
    while True:
        process.busy_ratio = 0.0
        slot.sleep()
        for _ in range(process.rng.randint(300, 500)):
            yield
        while not slot.wake():
            yield
        process.busy_ratio = 0.7
        for _ in range(process.rng.randint(20, 40)):
            yield


def embedding_server(process: SimulatedProcess) -> Iterator[None]:
    """Holds models in another runtime, without torch and without a reporter."""
    process.load_libraries(6 * GIB)
    while True:
        process.busy_ratio = process.rng.uniform(0.02, 0.2)
        yield


def evaluation(process: SimulatedProcess) -> Iterator[None]:
    """Runs for about a minute; a new process repeats the job."""
    rng = process.rng
    process.busy_ratio = 0.75
    process.keep(16, 180 * MIB)
    for _ in range(rng.randint(90, 130)):
        batch = [process.tensor(rng.randint(120, 440) * MIB) for _ in range(4)]
        yield
        process.free(batch)
        process.end_step()


def diffusion_server(process: SimulatedProcess) -> Iterator[None]:
    """Replays captured CUDA graphs, whose private pools cannot be released while the graphs exist."""
    rng = process.rng
    process.keep(24, 212 * MIB)
    for gigabytes in (1, 1, 2):
        process.slots[0].allocator.capture_graph(gigabytes * GIB - 300 * MIB)
    while True:
        process.busy_ratio = 0.9
        images = [process.tensor(rng.choice((96, 192)) * MIB) for _ in range(6)]
        for _ in range(rng.randint(3, 8)):
            yield
        process.free(images)
        process.busy_ratio = 0.0
        for _ in range(rng.randint(0, 10)):
            yield
