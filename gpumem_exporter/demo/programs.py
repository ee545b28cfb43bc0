"""What the demo's processes do: one generator a program, and each `yield` lets one tick of the simulation pass.

A program ends by returning; one that lets `SimulatedOutOfMemoryError` out has crashed. Whatever it needs to know of the
world it gets from its process, so that the same seed always gives the same node.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import TypeAlias

from gpumem_exporter.demo.allocator import SimulatedOutOfMemoryError
from gpumem_exporter.demo.process import SimulatedProcess, Tensor

__all__ = [
    "Program",
    "diffusion_server",
    "embedding_server",
    "evaluation",
    "graph_network_training",
    "indexing_with_a_leak",
    "inference_server",
    "mixture_of_experts_training",
    "notebook",
    "pipeline_training",
    "pretraining",
    "small_trial",
    "varying_length_training",
]

Program: TypeAlias = Callable[[SimulatedProcess], Iterator[None]]

MIB = 1 << 20
GIB = 1 << 30


def pretraining(process: SimulatedProcess) -> Iterator[None]:
    """Data-parallel training: the same sawtooth in each rank, close to the device's limit and never over it."""
    layers = 16
    rng = process.rng
    process.pinned_host_bytes = 512 * MIB
    process.hold(layers, 832 * MIB, "parameters")
    process.step = 0
    while True:
        process.busy_ratio = 0.97
        sequences = rng.choice((15, 16))
        with process.phase("forward"):
            activations = [process.tensor(sequences * 68 * MIB) for _ in range(layers)]
        yield
        gradients = []
        with process.phase("backward"):
            for _ in range(layers):
                gradients.append(process.tensor(832 * MIB, "gradients"))
                scratch = [process.tensor(sequences * 9 * MIB)]
                process.free([activations.pop()])
                process.free(scratch)
        yield
        with process.phase("optimizer"):
            if process.step == 0:  # optimizers make their state at the first step
                process.hold(layers, 1664 * MIB, "optimizer_state")
            process.free([process.tensor(832 * MIB)])
        process.free(gradients)
        process.step += 1
        yield
        if process.step % 120 == 0:  # a checkpoint is written, on the host's side
            process.busy_ratio = 0.08
            for _ in range(6):
                yield


def indexing_with_a_leak(process: SimulatedProcess) -> Iterator[None]:
    """Keeps a tensor of each batch until the device is full: retries first, then the out-of-memory error."""
    rng = process.rng
    process.busy_ratio = 0.55
    process.hold(24, 256 * MIB)
    process.step = 0
    try:
        while True:
            batch = [process.tensor(rng.randint(24, 512) * MIB) for _ in range(6)]
            process.hold(1, rng.randint(20, 72) * MIB)
            process.free(batch)
            process.step += 1
            yield
    except SimulatedOutOfMemoryError:
        process.busy_ratio = 0.0
        for _ in range(12):  # its traceback is written, which takes a while
            yield
        raise


def varying_length_training(process: SimulatedProcess) -> Iterator[None]:
    """Batches of every length, and small results that outlive them: the heap breaks into pieces."""
    rng = process.rng
    process.busy_ratio = 0.82
    process.pinned_host_bytes = 96 * MIB
    process.hold(12, 256 * MIB, "parameters")
    process.hold(12, 512 * MIB, "optimizer_state")
    kept: deque[list[Tensor]] = deque()
    process.step = 0
    while True:
        batch: list[Tensor] = []
        try:
            with process.phase("forward"):
                for _ in range(14):
                    batch.append(process.tensor(int(rng.lognormvariate(6.9, 0.9)) * MIB + rng.randrange(MIB)))
                    if rng.random() < 0.3:
                        kept.append([process.tensor(rng.randint(2, 90) * MIB)])
        except SimulatedOutOfMemoryError:  # the batch is skipped, as many training loops do
            process.busy_ratio = 0.3
        else:
            process.busy_ratio = 0.82
            process.step += 1
        while len(kept) > 70:
            process.free(kept.popleft())
        yield
        rng.shuffle(batch)
        process.free(batch)
        yield


def notebook(process: SimulatedProcess) -> Iterator[None]:
    """Somebody's notebook: a cell now and then, and gigabytes of cache in between that nobody uses."""
    rng = process.rng
    process.hold(20, 96 * MIB)
    while True:
        process.busy_ratio = 0.6
        for _ in range(6):
            experiment = [process.tensor(rng.randint(300, 900) * MIB) for _ in range(rng.randint(24, 36))]
            yield
            process.free(experiment)
        # Each run's result hangs in a reference cycle: the last traceback, an output cell.
        process.garbage.append(process.tensor(700 * MIB))
        if len(process.garbage) > 3:
            process.free([process.garbage.pop(0)])
        process.busy_ratio = 0.0
        for _ in range(rng.randint(360, 720)):
            yield


def inference_server(process: SimulatedProcess) -> Iterator[None]:
    """Answers requests, few or many: each holds its own key-value cache for as long as it takes."""
    rng = process.rng
    process.hold(32, 480 * MIB)
    running: list[tuple[int, list[Tensor]]] = []
    tick = 0
    while True:
        tick += 1
        burst = tick % 90 < 24
        for _ in range(rng.randint(2, 5) if burst else int(rng.random() < 0.25)):
            if len(running) < 48:
                try:
                    blocks = [process.tensor(rng.randint(32, 320) * MIB)]
                except SimulatedOutOfMemoryError:
                    break  # the request is turned away
                running.append((tick + rng.randint(3, 14), blocks))
        for entry in [entry for entry in running if entry[0] <= tick]:
            running.remove(entry)
            process.free(entry[1])
        process.busy_ratio = min(0.95, 0.03 + 0.04 * len(running))
        yield


def pipeline_training(process: SimulatedProcess) -> Iterator[None]:
    """One process on two devices; what it sends from one to the other stays active until the copy is done."""
    process.busy_ratio = 0.7
    process.pinned_host_bytes = 256 * MIB
    for device, layers in ((0, 10), (1, 8)):
        process.hold(layers, 640 * MIB, "parameters", device=device)
        process.hold(layers, 1280 * MIB, "optimizer_state", device=device)
    process.step = 0
    while True:
        with process.phase("forward"):
            first = [process.tensor(420 * MIB, device=0) for _ in range(10)]
            sent = [process.tensor(192 * MIB, device=0)]
            second = [process.tensor(420 * MIB, device=1) for _ in range(8)]
            process.free(sent, used_elsewhere=True)
        yield
        with process.phase("backward"):
            for device, activations in ((1, second), (0, first)):
                gradients = []
                while activations:
                    gradients.append(process.tensor(320 * MIB, "gradients", device=device))
                    process.free([activations.pop()])
                process.free(gradients)
        process.step += 1
        yield


def mixture_of_experts_training(process: SimulatedProcess) -> Iterator[None]:
    """Experts get a different share of the tokens each time; expandable segments take it without fragmenting."""
    rng = process.rng
    process.busy_ratio = 0.88
    process.hold(8, 448 * MIB, "parameters")
    process.hold(8, 896 * MIB, "optimizer_state")
    process.step = 0
    while True:
        with process.phase("forward"):
            experts = [process.tensor(rng.randint(40, 480) * MIB + rng.randrange(MIB)) for _ in range(16)]
        yield
        with process.phase("backward"):
            gradients = [process.tensor(448 * MIB, "gradients") for _ in range(8)]
        rng.shuffle(experts)
        process.free(experts)
        process.free(gradients)
        process.step += 1
        yield


def embedding_server(process: SimulatedProcess) -> Iterator[None]:
    """No torch and no reporter: a runtime of its own that loads and unloads models."""
    rng = process.rng
    process.load_libraries(5 * GIB)
    while True:
        process.busy_ratio = rng.uniform(0.02, 0.2)
        loaded_bytes = rng.choice((1, 2, 3)) * 900 * MIB
        try:
            process.load_libraries(loaded_bytes)
        except SimulatedOutOfMemoryError:
            loaded_bytes = 0
        for _ in range(rng.randint(60, 120)):
            yield
        process.unload_libraries(loaded_bytes)


def evaluation(process: SimulatedProcess) -> Iterator[None]:
    """A job of a minute, over and over: each time another process."""
    rng = process.rng
    process.busy_ratio = 0.75
    process.hold(16, 180 * MIB)
    process.step = 0
    for _ in range(rng.randint(90, 130)):
        batch = [process.tensor(rng.randint(60, 220) * MIB) for _ in range(8)]
        yield
        process.free(batch)
        process.step += 1


def diffusion_server(process: SimulatedProcess) -> Iterator[None]:
    """Replays captured CUDA graphs: what their private pools hold cannot be given back while they live."""
    rng = process.rng
    process.hold(24, 212 * MIB)
    for gigabytes in (1, 1, 2):
        process.capture_graph(gigabytes * GIB - 300 * MIB)
    while True:
        process.busy_ratio = 0.9
        images = [process.tensor(rng.choice((96, 192)) * MIB) for _ in range(6)]
        for _ in range(rng.randint(3, 8)):
            yield
        process.free(images)
        process.busy_ratio = 0.0
        for _ in range(rng.randint(0, 10)):
            yield


def graph_network_training(process: SimulatedProcess) -> Iterator[None]:
    """Calls `torch.cuda.empty_cache()` every few steps: flushes without retries, segments that come and go."""
    rng = process.rng
    process.busy_ratio = 0.35
    process.hold(8, 40 * MIB, "parameters")
    process.step = 0
    while True:
        with process.phase("forward"):
            neighbours = [process.tensor(rng.randint(40, 420) * MIB) for _ in range(10)]
        yield
        process.free(neighbours)
        process.step += 1
        if process.step % 4 == 0:
            process.empty_cache()


def small_trial(process: SimulatedProcess) -> Iterator[None]:
    """One of several small trials that share a device: hundreds of blocks in the pool of small ones."""
    rng = process.rng
    process.busy_ratio = 0.4
    for _ in range(160):
        process.hold(1, rng.randint(1, 900) * 1024)
    process.hold(24, 17 * MIB)
    process.step = 0
    while True:
        batch = [process.tensor(rng.randint(8, 120) * MIB) for _ in range(12)]
        yield
        process.free(batch)
        process.step += 3
