"""The demo's workloads: the programs of their processes, their devices, names and users.

A program is a generator, and yields the ticks until it continues. A program ends when it returns, and crashes if it
raises `SimulatedOutOfMemoryError`. Its process is its only source of data and random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import cycle

from gpumem_client.allocator.simulated import SimulatedOutOfMemoryError
from gpumem_client.engines.engine_state import CacheUse, EngineFacts
from gpumem_exporter.demo.memory import Tensor
from gpumem_exporter.demo.process import GIB, MIB, SimulatedProcess, Workload

DEVICES = 8


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
            # The result of the last run is in a reference cycle: its traceback, an output cell.
            process.free(process.garbage)
            process.garbage += experiment[-1:]
            process.free(experiment[:-1])
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
    process.tensor(GIB, "cuda_graphs", in_graph=True)
    while True:
        requests = 0 if process.asleep else rng.choice((0, 1, 1, 2, 3, 4))
        used = 0.02 * requests + rng.uniform(0.0, 0.02) * bool(requests)
        process.engine_facts = EngineFacts(
            "vllm", "0.33.0", "qwen3-8b", ready=True, requests=requests, cache=CacheUse(used, 0.1)
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
        yield process.until_run_up() + process.rng.randint(300, 500)
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
    process.busy_ratio = 0.75
    process.keep(16, 180 * MIB)
    for _ in range(process.rng.randint(90, 130)):
        batch = [process.tensor(process.rng.randint(120, 440) * MIB) for _ in range(4)]
        yield 1
        process.free(batch)
        process.end_step(1)


def pretraining(process: SimulatedProcess) -> Iterator[int]:
    """Data-parallel training: the memory of each rank follows the same sawtooth, just below the device's limit."""
    process.load_libraries(1090 * MIB, nccl=True)
    process.free([process.tensor(96 * MIB) for _ in range(12)])  # a checkpoint's shards, whose cache stays idle
    return train(process, [0] * 8, 2080, lambda: [2160 if process.step % 5 == 4 else 2304] * 8)


def pipeline_training(process: SimulatedProcess) -> Iterator[int]:
    """One process on two devices."""
    return train(process, [0, 0, 0, 0, 1, 1], 1000, lambda: [1030] * 6)


def mixture_of_experts(process: SimulatedProcess) -> Iterator[int]:
    """Rank 1 has twice the experts of rank 0, including the popular ones, which get most of the tokens.

    Each rank empties its cache after a validation. If the memory does not suffice for all shapes of the experts'
    batches, this causes retries until the cache has filled again.
    """
    experts, most_mib = (6, 3500) if process.identity.rank == "1" else (3, 600)

    def batch_mib() -> list[int]:
        if process.step % 40 == 0:  # after each validation
            process.empty_cache()
        return process.rng.choices(range(most_mib // 4, most_mib), k=8)

    return train(process, [0] * experts, 896, batch_mib)


def varying_length_training(process: SimulatedProcess) -> Iterator[int]:
    """Batches of varying length, and small results that outlive them, fragment the heap.

    The results are in reference cycles with the batches' outputs until Python's garbage collector reaches its oldest
    generation. A memory fraction limits the program to a part of the device.
    """
    slot, rng = process.slots[0], process.rng
    slot.allocator.limit_bytes = int(process.workload.scale * 0.54 * slot.device.usable_bytes)

    def batch_mib() -> Iterator[int]:
        process.free(process.garbage[:-500])
        del process.garbage[:-500]
        for _ in range(14):
            # In each epoch, the longest recordings come first, and do not fit.
            yield int(min(rng.lognormvariate(6.4, 0.8), 2200.0)) if process.step % 2400 else 4096
            process.garbage.append(process.tensor(rng.randint(2, 16) * MIB))

    return train(process, [0] * 6, 512, batch_mib)


def train(
    process: SimulatedProcess, layers: Sequence[int], layer_mib: int, batch_mib: Callable[[], Iterable[int]]
) -> Iterator[int]:
    """Train a model; `layers` are the devices of its layers, and `batch_mib` returns its activations."""
    process.busy_ratio = 0.9
    for device in layers:
        process.keep(1, layer_mib * MIB, "parameters", device=device)
        process.keep(2, layer_mib * MIB, "optimizer_state", device=device)
    while True:
        activations: list[Tensor] = []
        gradients: list[Tensor] = []
        try:
            with process.phase("forward"):
                for size_mib, device in zip(batch_mib(), cycle(layers), strict=False):
                    activations.append(process.tensor(size_mib * MIB, device=device))
                if len(set(layers)) > 1:  # a copy between the devices
                    process.free([process.tensor(192 * MIB)])
            yield 1
            with process.phase("backward"):
                for device in reversed(layers):
                    gradients.append(process.tensor(layer_mib * MIB, "gradients", device=device))
                    process.free([activations.pop()])
                process.free(activations)
            yield 1
            with process.phase("optimizer"):
                for device in sorted(set(layers)):
                    process.free([process.tensor(layer_mib // 2 * MIB, device=device)])
        except SimulatedOutOfMemoryError:  # the batch is skipped, as many training loops do
            process.free(activations)
            process.empty_cache()
        process.free(gradients)
        # Three half seconds, so that rows of each second show every phase in turn. A heap takes time to fragment.
        yield process.end_step(3, skips=process.step >= 200 or not process.garbage)


DEMO_WORKLOADS = (
    Workload(
        *("demo-llm-pretrain", pretraining, "python pretrain.py", "ml-train", ((0,), (1,), (2,), (3,))),
        planned_bytes=72_000 * MIB,  # a good plan, slightly too high
        k8s_pod="training/llm-pretrain-worker",
    ),
    Workload(
        *("demo-rag-indexer-leak", indexing_with_a_leak, "python build_index.py", "search", ((4,),)),
        age_seconds=3720.0,
        leaks=True,
        k8s_pod="search/rag-indexer",
    ),
    Workload(
        *("", embedding_server, "tritonserver", "search", ((4,),)),
        k8s_pod="search/embeddings",
    ),
    Workload(
        *("demo-pipeline-finetune", pipeline_training, "python finetune_pipeline.py", "alice", ((4, 6),)),
        age_seconds=6001.0,
        slurm_job_id="4711",
    ),
    Workload(
        *("demo-asr-varlen", varying_length_training, "python train_asr.py", "speech", ((6,),)),
        age_seconds=7175.0,  # its next epoch starts in half a minute
        planned_bytes=24_000 * MIB,  # planned for batches of the mean length
        slurm_job_id="4708",
    ),
    Workload(
        *("demo-notebook", notebook, "python -m ipykernel_launcher", "carol", ((7,),)),
        age_seconds=4200.0 + 2400.0,  # its second run was 40 minutes ago
        k8s_pod="notebooks/jupyter-carol",
    ),
    Workload(
        *("demo-moe-finetune", mixture_of_experts, "python finetune_moe.py", "ml-train", ((6,), (7,))),
        age_seconds=4770.0,  # its last validation was half a minute ago
        slurm_job_id="4715",
    ),
    Workload(
        *("demo-nightly-eval", evaluation, "python evaluate.py", "ci", ((5,),)),
        age_seconds=110.0,  # the second run
        k8s_pod="ci/nightly-eval",
    ),
    Workload(
        *("demo-sleeping-engine", sleeping_engine, "vllm serve", "serving", ((5,),)),
        k8s_pod="serving/sleeping-engine",
    ),
    Workload(
        *("demo-llm-server", language_model_server, "vllm serve", "serving", ((5,),)),
        k8s_pod="serving/llm-server",
    ),
    Workload(
        *("demo-forgotten-notebook", forgotten_notebook, "python -m ipykernel_launcher", "dave", ((5,),)),
        k8s_pod="notebooks/jupyter-dave",
        age_seconds=9 * 3600.0,
    ),
)
"""Devices 0 to 3 are full without problems. On device 4, a leak takes the memory that another runtime leaves. On device
5, an engine has a much larger key-value cache than its requests need, and a notebook holds a model that nobody uses. On
device 6, a fragmented heap stays within its memory fraction. On device 7, the notebook's cache is the memory that the
larger rank of the mixture of experts lacks."""


def workloads_of(processes: int) -> tuple[Workload, ...]:
    """Return the demo's workloads with this number of processes.

    For more processes than the demo has, each copy of the workloads has its own names and is one device further, and
    all sizes are smaller by the number of copies.
    """
    found: list[Workload] = []
    copies = max(1, -(-processes // sum(len(workload.placements) for workload in DEMO_WORKLOADS)))
    for copy in range(copies):
        for workload in DEMO_WORKLOADS:
            placements = workload.placements[:processes]
            processes -= len(placements)
            if placements:
                moved = tuple(tuple((device + copy) % DEVICES for device in each) for each in placements)
                name = f"{workload.name}-{copy + 1}" if workload.name and copy else workload.name
                found.append(replace(workload, name=name, placements=moved, scale=1 / copies))
    return tuple(found)
