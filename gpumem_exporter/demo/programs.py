"""The programs of the demo's processes. Those that train name their phases and the components of their memory.

A program is a generator, and yields the ticks of the simulation until it continues. A program ends when it returns, and
crashes if it raises `SimulatedOutOfMemoryError`. Its process is its only source of data and random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TypeAlias

from gpumem_client.allocator.simulated import SimulatedOutOfMemoryError
from gpumem_client.engines.engine_state import CacheUse, EngineFacts
from gpumem_exporter.demo.process import SimulatedProcess, Tensor

Program: TypeAlias = Callable[[SimulatedProcess], Iterator[int]]

MIB = 1 << 20
GIB = 1 << 30

STEP_TICKS = 3
"""The ticks of a training step. Ticks are half seconds, so rows of each second show every phase in turn."""


def indexing_with_a_leak(process: SimulatedProcess) -> Iterator[int]:
    """Leaks the new items of each batch, until no memory is left.

    The leaked tensors are in reference cycles, and the program has disabled Python's garbage collector for speed. The
    action `collect_garbage` therefore frees them.
    """
    process.busy_ratio = 0.55
    process.keep(8, 512 * MIB)
    try:
        while True:
            batch = [process.tensor(640 * MIB) for _ in range(3)]
            # Of the batches that are only counted, the items of each minute are one tensor.
            process.garbage += [process.tensor(120 * 3 * MIB) for _ in range(process.until_run_up() // 120)]
            process.garbage.append(process.tensor(process.rng.randint(2 * MIB, 4 * MIB)))
            process.free(batch)
            yield process.end_step(1)
    except SimulatedOutOfMemoryError:
        process.busy_ratio = 0.0
        yield 12  # writing the traceback takes a while
        raise


def notebook(process: SimulatedProcess) -> Iterator[int]:
    """A notebook that rarely runs a cell and keeps gigabytes of unused cache in between."""
    process.keep(20, 96 * MIB)
    sizes = [process.rng.randint(900, 2000) * MIB for _ in range(18)]
    while True:
        process.busy_ratio = 0.6
        for _ in range(6):
            experiment: list[Tensor] = []
            try:
                experiment.extend(process.tensor(size_bytes) for size_bytes in sizes)
            except SimulatedOutOfMemoryError:
                process.busy_ratio = 0.0  # the cell shows its traceback, and the notebook continues
            yield 1
            # The result of each run is in a reference cycle: the last traceback, an output cell.
            process.garbage += experiment[-1:]
            process.free(experiment[:-1])
            process.free(process.garbage[:-3])
            del process.garbage[:-3]
        del sizes[12:]  # later runs are smaller
        process.busy_ratio = 0.0
        yield 8400


def forgotten_notebook(process: SimulatedProcess) -> Iterator[int]:
    """A notebook whose model stays in memory, though no cell has run for hours."""
    process.keep(17, 512 * MIB)
    yield 1 << 40


def language_model_server(process: SimulatedProcess) -> Iterator[int]:
    """A vLLM server whose key-value cache is much larger than its few requests need."""
    rng = process.rng
    process.keep(16, 480 * MIB, "weights")
    process.keep(32, 832 * MIB, "kv_cache")
    process.keep(1, 384 * MIB, "runtime")
    process.slots[0].capture_graph(int(process.scale * GIB), "cuda_graphs")
    used, prefixes = 0.02, 0.0
    while True:
        requests = 0 if process.asleep else rng.choice((0, 1, 1, 2, 3, 4))
        used = 0.02 * requests + rng.uniform(0.0, 0.02) * bool(requests)
        prefixes = min(0.3, prefixes + 0.1 * used)
        process.engine_facts = EngineFacts(
            "vllm", "0.33.0", "qwen3-8b", ready=True, requests=requests, cache=CacheUse(used, prefixes)
        )
        process.busy_ratio = 0.12 * requests
        yield process.until_run_up() + rng.randint(2, 8)


def sleeping_engine(process: SimulatedProcess) -> Iterator[int]:
    """An engine in sleep mode: between its requests it unmaps the memory of its weights and of its key-value cache."""
    (slot,) = process.slots
    process.keep(8, 512 * MIB, "weights")
    process.keep(16, 512 * MIB, "kv_cache")
    asleep = EngineFacts("vllm", "0.33.0", "llama-3.1-8b", ready=True, requests=0)
    while True:
        process.busy_ratio = 0.0
        process.engine_facts = asleep
        slot.sleep()
        yield process.rng.randint(300, 500)
        while not slot.wake():
            yield 1
        process.busy_ratio = 0.7
        for _ in range(process.rng.randint(10, 20)):
            if process.asleep:  # by a command with force
                break
            process.engine_facts = replace(asleep, requests=3, cache=CacheUse(process.rng.uniform(0.3, 0.8), 0.1))
            yield 2


def embedding_server(process: SimulatedProcess) -> Iterator[int]:
    """Holds models in another runtime, without torch and without a reporter."""
    process.load_libraries(16 * GIB)
    while True:
        process.busy_ratio = process.rng.uniform(0.02, 0.2)
        yield process.until_run_up() + 2


def evaluation(process: SimulatedProcess) -> Iterator[int]:
    """Runs for about a minute; a new process repeats the job."""
    rng = process.rng
    process.busy_ratio = 0.75
    process.keep(16, 180 * MIB)
    for _ in range(rng.randint(90, 130)):
        batch = [process.tensor(rng.randint(120, 440) * MIB) for _ in range(4)]
        yield 1
        process.free(batch)
        process.end_step(1)


def pretraining(process: SimulatedProcess) -> Iterator[int]:
    """Data-parallel training: the memory of each rank follows the same sawtooth, just below the device's limit."""
    process.free([process.tensor(96 * MIB) for _ in range(12)])  # a checkpoint's shards, whose cache stays idle
    return train(process, {0: 8}, 2080, 2080, lambda: 2160 if process.step % 5 == 4 else 2304)


def pipeline_training(process: SimulatedProcess) -> Iterator[int]:
    """One process on two devices."""
    return train(process, {0: 4, 1: 2}, 1120, 560, lambda: 730)


def train(
    process: SimulatedProcess, layers: Mapping[int, int], layer_mib: int, grad_mib: int, batch_mib: Callable[[], int]
) -> Iterator[int]:
    """Train a model; `layers` are the numbers of its layers by device."""
    devices = [device for device, count in layers.items() for _ in range(count)]
    process.busy_ratio = 0.9
    process.pinned_bytes = 512 * MIB
    for device, count in layers.items():
        process.keep(count, layer_mib * MIB, "parameters", device=device)
        process.keep(count, 2 * layer_mib * MIB, "optimizer_state", device=device)
    while True:
        with process.phase("forward"):
            activations = [process.tensor(batch_mib() * MIB, device=device) for device in devices]
            if len(layers) > 1:  # a copy between the devices
                process.free([process.tensor(192 * MIB)])
        yield 1
        gradients: list[Tensor] = []
        with process.phase("backward"):
            for device in reversed(devices):
                gradients.append(process.tensor(grad_mib * MIB, "gradients", device=device))
                process.free([activations.pop()])
        yield 1
        with process.phase("optimizer"):
            for device in layers:
                process.free([process.tensor(layer_mib // 2 * MIB, device=device)])
        process.free(gradients)
        yield process.end_step(STEP_TICKS)


def varying_length_training(process: SimulatedProcess) -> Iterator[int]:
    """Batches of varying length, and small results that outlive them, fragment the heap.

    The results are in reference cycles with the batches' outputs until Python's garbage collector reaches its oldest
    generation. A memory fraction limits the program to a part of the device.
    """
    rng = process.rng
    process.pinned_bytes = 96 * MIB
    process.slots[0].allocator.limit_bytes = int(process.scale * 0.58 * process.slots[0].device.usable_bytes)
    process.keep(6, 512 * MIB, "parameters")
    process.keep(6, 1024 * MIB, "optimizer_state")  # loaded from a checkpoint
    while True:
        # In each epoch, the longest recordings come first, and do not fit.
        sizes_mib = [min(rng.lognormvariate(6.4, 0.8), 2200.0) if process.step % 2400 else 4096.0 for _ in range(14)]
        batch: list[Tensor] = []
        gradients: list[Tensor] = []
        process.busy_ratio = 0.82
        try:
            with process.phase("forward"):
                for size_mib in sizes_mib:
                    batch.append(process.tensor(int(size_mib * MIB)))
                    process.garbage.append(process.tensor(rng.randint(2, 16) * MIB))
            with process.phase("backward"):
                gradients.extend(process.tensor(512 * MIB, "gradients") for _ in range(6))
            with process.phase("optimizer"):
                process.free([process.tensor(512 * MIB)])
        except SimulatedOutOfMemoryError:  # the batch is skipped, as many training loops do
            process.busy_ratio = 0.3
            process.free(batch)
            process.empty_cache()
        while len(process.garbage) > 500:
            process.free([process.garbage.pop(0)])
        yield 2
        rng.shuffle(batch)
        process.free(batch)
        process.free(gradients)
        step = process.step % 2400  # after 100 steps the heap is as fragmented as later
        yield process.end_step(STEP_TICKS, most_skipped=2399 - step if step > 100 else 0)


def mixture_of_experts(process: SimulatedProcess) -> Iterator[int]:
    """Rank 1 has twice the experts of rank 0, including the popular ones, which get most of the tokens.

    Each rank empties its cache after a validation. If the memory does not suffice for all shapes of the experts'
    batches, this causes retries until the cache has filled again.
    """
    rng = process.rng
    experts, most_mib = (6, 3100) if process.identity.rank == "1" else (3, 600)
    process.busy_ratio = 0.88
    process.keep(experts, 896 * MIB, "parameters")
    process.keep(experts, 1792 * MIB, "optimizer_state")
    while True:
        with process.phase("forward"):
            tokens = [process.tensor(rng.randint(most_mib // 4, most_mib) * MIB) for _ in range(8)]
        yield 1
        with process.phase("backward"):
            gradients = [process.tensor(896 * MIB, "gradients") for _ in range(experts)]
            rng.shuffle(tokens)
            process.free(tokens)
        with process.phase("optimizer"):
            process.free([process.tensor(896 * MIB)])
        process.free(gradients)
        pause_ticks = process.end_step(STEP_TICKS)
        if process.step % 40 == 0:  # after each validation
            process.empty_cache()
        yield 1 + pause_ticks
