"""An engine that serves, as the client sees it: objects with the names of vLLM 0.32.0, and real tensors and graphs."""

from __future__ import annotations

import sys
import threading
import time
import types
from types import SimpleNamespace
from typing import Any

import torch

from gpumem_client.allocator.allocator import Allocator

WORKER, CORE = "vllm.v1.worker.gpu_worker", "vllm.v1.engine.core"


class Worker:
    available_kv_cache_memory_bytes = 1
    vllm_config = SimpleNamespace(model_config=SimpleNamespace(served_model_name="chat"))
    device: torch.device
    model_runner: SimpleNamespace


class EngineCore:
    scheduler: SimpleNamespace
    model_executor: SimpleNamespace

    def __init__(self) -> None:
        self.stopped = threading.Event()

    def run_busy_loop(self) -> None:
        self.stopped.wait()


def module(name: str, **names: Any) -> None:
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(names)


def empty(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cuda")


_kept: list[Any] = []


def serve(weights_bytes: int, cache_bytes: list[int], activations_bytes: int, blocks: list[int]) -> None:
    """Allocate weights, a cache in several tensors and activations, and serve in a thread.

    Of the blocks of the cache, 1 is in use, 0 is evictable, and -1 is free. The allocator rounds one more byte up.
    """
    module("vllm", __version__="0.32.0")
    module(WORKER, Worker=Worker)
    module(CORE, EngineCore=EngineCore, EngineCoreProc=EngineCore)
    core, worker = EngineCore(), Worker()
    cache = [empty(size) for size in cache_bytes]
    worker.model_runner = SimpleNamespace(model_memory_usage=weights_bytes, kv_caches=[*cache, cache[0].view(2, -1)])
    worker.device = torch.device("cuda", 0)
    placeholder = SimpleNamespace(ref_cnt=0, block_hash=None)
    pool = SimpleNamespace(
        blocks=[placeholder, *(SimpleNamespace(ref_cnt=max(0, b), block_hash=None if b < 0 else b"") for b in blocks)],
        num_gpu_blocks=1 + len(blocks),
        enable_caching=True,
        cached_block_hash_to_block={},
        free_block_queue=SimpleNamespace(num_free_blocks=sum(each < 1 for each in blocks)),
    )
    core.scheduler = SimpleNamespace(requests={}, kv_cache_manager=SimpleNamespace(block_pool=pool))
    core.model_executor = SimpleNamespace(driver_worker=SimpleNamespace(worker=worker))
    threading.Thread(target=core.run_busy_loop, daemon=True).start()
    _kept[:] = [core, empty(weights_bytes + 1), empty(activations_bytes)]


def capture(nbytes: int) -> None:
    """Capture a graph with a live output, in a pool of the program's own."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=torch.cuda.graph_pool_handle()):
        output = empty(nbytes)
    _kept.extend((graph, output))


def end() -> None:
    """End the engine, and keep the tensors of its weights."""
    _kept.pop(0).stopped.set()


def costs(rounds: int) -> dict[str, list[float]]:
    """Return CPU times in µs of a sample with the engine, and of `torch.cuda.memory_stats()`, taken in turns."""
    allocator = Allocator.attach()
    assert allocator is not None

    def sample() -> None:
        assert allocator is not None
        allocator.engine()
        assert allocator.samples()[0].kv_cache_bytes

    found: dict[str, list[float]] = {"sample": [], "memory_stats": []}
    for _ in range(rounds):
        for name, work in (("sample", sample), ("memory_stats", torch.cuda.memory_stats)):
            started = time.thread_time_ns()
            for _ in range(20):
                work()
            found[name].append((time.thread_time_ns() - started) / 20e3)
    allocator.detach()
    return found
