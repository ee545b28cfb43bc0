"""The programs of the demo's processes. Those that train name their phases and the components of their memory.

A program is a generator, and each `yield` ends one tick of the simulation. A program ends when it returns, and crashes
if it raises `SimulatedOutOfMemoryError`. Its process is its only source of data and random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeAlias

from gpumem_client.allocator.simulated import SimulatedOutOfMemoryError
from gpumem_client.engines.engine_state import CacheUse, EngineFacts
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


def forgotten_notebook(process: SimulatedProcess) -> Iterator[None]:
    """A notebook whose model stays in memory, though no cell has run for hours."""
    process.keep(17, 512 * MIB)
    while True:
        yield


def language_model_server(process: SimulatedProcess) -> Iterator[None]:
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
        for _ in range(rng.randint(2, 8)):
            yield


def sleeping_engine(process: SimulatedProcess) -> Iterator[None]:
    """An engine in sleep mode: between its requests it unmaps the memory of its weights and of its key-value cache."""
    (slot,) = process.slots
    process.keep(8, 512 * MIB, "weights")
    process.keep(16, 512 * MIB, "kv_cache")
    asleep = EngineFacts("vllm", "0.33.0", "llama-3.1-8b", ready=True, requests=0)
    while True:
        process.busy_ratio = 0.0
        process.engine_facts = asleep
        slot.sleep()
        for _ in range(process.rng.randint(300, 500)):
            yield
        while not slot.wake():
            yield
        process.busy_ratio = 0.7
        for _ in range(process.rng.randint(20, 40)):
            if process.asleep:  # by a command with force
                break
            process.engine_facts = replace(asleep, requests=3, cache=CacheUse(process.rng.uniform(0.3, 0.8), 0.1))
            yield


def embedding_server(process: SimulatedProcess) -> Iterator[None]:
    """Holds models in another runtime, without torch and without a reporter."""
    process.load_libraries(16 * GIB)
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


def pretraining(process: SimulatedProcess) -> Iterator[None]:
    """Data-parallel training: the memory of each rank follows the same sawtooth, just below the device's limit."""
    layers = 8
    process.pinned_bytes = 512 * MIB
    process.free([process.tensor(96 * MIB) for _ in range(12)])  # a checkpoint's shards, whose cache stays idle
    process.keep(layers, 2080 * MIB, "parameters")
    while True:
        process.busy_ratio = 0.97
        sequences = 15 if process.step % 5 == 4 else 16
        with process.phase("forward"):
            activations = [process.tensor(sequences * 144 * MIB) for _ in range(layers)]
        yield
        gradients = []
        with process.phase("backward"):
            for _ in range(layers):
                gradients.append(process.tensor(2080 * MIB, "gradients"))
                scratch = [process.tensor(sequences * 12 * MIB)]
                process.free([activations.pop()])
                process.free(scratch)
        yield
        with process.phase("optimizer"):
            if process.step == 0:  # optimizers create their state in the first step
                process.keep(layers, 4160 * MIB, "optimizer_state")
            process.free([process.tensor(1040 * MIB)])
        process.free(gradients)
        process.end_step()
        yield
        if process.step % 120 == 0:  # the process writes a checkpoint, which uses the CPU only
            process.busy_ratio = 0.08
            for _ in range(6):
                yield


def varying_length_training(process: SimulatedProcess) -> Iterator[None]:
    """Batches of varying length, and small results that outlive them, fragment the heap.

    The results are in reference cycles with the batches' outputs until Python's garbage collector reaches its oldest
    generation. A memory fraction limits the program to a part of the device.
    """
    rng = process.rng
    process.pinned_bytes = 96 * MIB
    process.slots[0].allocator.limit_bytes = int(process.scale * 0.58 * process.slots[0].device.usable_bytes)
    process.keep(6, 512 * MIB, "parameters")
    process.keep(6, 1024 * MIB, "optimizer_state")  # loaded from a checkpoint
    sizes_mib = [4096.0] * 14  # the longest recordings come first, and do not fit
    while True:
        batch: list[Tensor] = []
        gradients: list[Tensor] = []
        try:
            with process.phase("forward"):
                for size_mib in sizes_mib:
                    batch.append(process.tensor(int(size_mib * MIB)))
                    process.garbage.append(process.tensor(rng.randint(2, 16) * MIB))
            with process.phase("backward"):
                gradients.extend(process.tensor(512 * MIB, "gradients") for _ in range(6))
            with process.phase("optimizer"):
                process.free([process.tensor(512 * MIB)])
        except SimulatedOutOfMemoryError:
            process.busy_ratio = 0.3
        else:
            process.busy_ratio = 0.82
            process.end_step()
        while len(process.garbage) > 500:
            process.free([process.garbage.pop(0)])
        yield
        rng.shuffle(batch)
        process.free(batch)
        process.free(gradients)
        if process.busy_ratio < 0.5:  # the batch is skipped, as many training loops do
            process.empty_cache()
        sizes_mib = [min(rng.lognormvariate(6.4, 0.8), 2200.0) for _ in range(14)]
        yield


def pipeline_training(process: SimulatedProcess) -> Iterator[None]:
    """One process on two devices."""
    process.busy_ratio = 0.7
    process.pinned_bytes = 256 * MIB
    stages = ((0, 4), (1, 2))
    for device, layers in stages:
        process.keep(layers, 1120 * MIB, "parameters", device=device)
    while True:
        with process.phase("forward"):
            first = [process.tensor(730 * MIB, device=0) for _ in range(4)]
            process.free([process.tensor(192 * MIB, device=0)])  # a copy between the devices
            second = [process.tensor(730 * MIB, device=1) for _ in range(2)]
        yield
        gradients: list[Tensor] = []
        with process.phase("backward"):
            for device, activations in ((1, second), (0, first)):
                while activations:
                    gradients.append(process.tensor(560 * MIB, "gradients", device=device))
                    process.free([activations.pop()])
        with process.phase("optimizer"):
            for device, layers in stages:
                if process.step == 0:
                    process.keep(layers, 2240 * MIB, "optimizer_state", device=device)
                process.free([process.tensor(560 * MIB, device=device)])
        process.free(gradients)
        process.end_step()
        yield


def mixture_of_experts_training(process: SimulatedProcess) -> Iterator[None]:
    """Rank 1 has twice the experts of rank 0, including the popular ones, which get most of the tokens.

    Each rank empties its cache after a validation. If the memory does not suffice for all shapes of the experts'
    batches, this causes retries until the cache has filled again.
    """
    rng = process.rng
    experts, most_mib = (6, 3100) if process.identity.rank == "1" else (3, 600)
    process.busy_ratio = 0.88
    process.keep(experts, 896 * MIB, "parameters")
    while True:
        with process.phase("forward"):
            tokens = [process.tensor(rng.randint(most_mib // 4, most_mib) * MIB) for _ in range(8)]
        yield
        with process.phase("backward"):
            gradients = [process.tensor(896 * MIB, "gradients") for _ in range(experts)]
            rng.shuffle(tokens)
            process.free(tokens)
        with process.phase("optimizer"):
            if process.step == 0:
                process.keep(experts, 1792 * MIB, "optimizer_state")
            process.free([process.tensor(896 * MIB)])
        process.free(gradients)
        process.end_step()
        if process.step % 60 == 0:  # after each validation
            process.empty_cache()
        yield
