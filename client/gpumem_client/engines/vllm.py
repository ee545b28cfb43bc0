"""Reads vLLM's engine in this process: versions 0.32 and 0.33, and others as far as they have the same names.

The core has the scheduler, and for one GPU the worker; with several GPUs each worker is a process of its own, whose
requests its model runner knows.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from gpumem_client import torch_access
from gpumem_client.engines.engine_state import CacheUse, EngineFacts, known, text
from gpumem_client.engines.live_objects import LiveObjects
from gpumem_client.engines.sleep import CoreMemory, sleep_segments

_WORKER = "vllm.v1.worker.gpu_worker", "Worker"
_CORE = "vllm.v1.engine.core", "EngineCore"
# The worker's methods run while it starts, the core's until the process ends.
_METHODS = {
    _WORKER: ("Worker.init_device", "Worker.load_model", "Worker.determine_available_memory"),
    _CORE: (
        *("EngineCore.__init__", "EngineCore.step", "EngineCore.step_with_batch_queue"),
        *("EngineCoreProc.run_busy_loop", "DPEngineCoreProc.run_busy_loop"),
    ),
}
# The component of each tag of vLLM's allocator of sleep mode; any other tag is `other`.
_COMPONENTS = {
    "weights": "weights",
    "kv_cache": "kv_cache",
    "cudagraph": "cuda_graphs",
    "runtime": "runtime",
    "workspace": "runtime",
}
# A count of the cached blocks is followed by a pause of this multiple of its CPU time: 0.1 % of a core.
_COUNT_SHARE = 1000
# Blocks that are counted without a pause for other threads: 0.1 ms.
_COUNT_SLICE = 2000
_BLOCKS_MAX = 300_000


class Vllm:
    """The engine. One thread calls `look`; any thread may call `read` and `segment_components`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._objects = LiveObjects(_METHODS, clock)
        self._evictable: int | None = None
        self._counted_state: tuple[int, int] | None = None
        self._next_count_seconds = 0.0

    def look(self) -> None:
        """Search the engine's objects, and count the blocks of the cache, as far as either is due."""
        worker, core = self._worker(), self.core()
        if worker is None or (core is None and _measures(worker)):
            self._objects.search()
        scheduler = getattr(self.core(), "scheduler", None)
        if scheduler is not None and self._clock() >= self._next_count_seconds:
            started = time.thread_time()
            self._count_evictable(scheduler.kv_cache_manager.block_pool)
            self._next_count_seconds = self._clock() + (time.thread_time() - started) * _COUNT_SHARE

    def read(self) -> EngineFacts | None:
        """Return what the engine's objects show; None if none was found."""
        worker, core = self._worker(), self.core()
        if worker is None and core is None:
            return None
        measures = None if worker is None else _measures(worker)
        scheduler = getattr(core, "scheduler", None)
        requests = (lambda: _requests(worker)) if scheduler is None else (lambda: len(scheduler.requests))
        return EngineFacts(
            "vllm",
            version=text(vars(sys.modules["vllm"]).get("__version__")),
            model=_model(getattr(core or worker, "vllm_config", None)),
            measures=measures,
            ready=scheduler is not None if core is not None else None if measures is None else not measures,
            held=known("the tensors of vLLM", lambda: _held(worker), {}),
            requests=known("the requests of vLLM", requests, None),
            cache=known("the key-value cache of vLLM", lambda: self._cache_use(scheduler), None),
        )

    def segment_components(self) -> Mapping[int, str]:
        """Return the component of each segment of sleep mode's allocator by its address."""
        return {address: _COMPONENTS.get(each.tag, "other") for address, each in sleep_segments().items()}

    def _worker(self) -> Any:
        worker = self._objects.get(_WORKER)
        if worker is None:
            executor = getattr(self.core(), "model_executor", None)
            worker = getattr(getattr(executor, "driver_worker", None), "worker", None)
        return worker

    def core(self) -> Any:
        """Return the engine core; None if it was not found or was deleted."""
        return self._objects.get(_CORE)

    def memory(self) -> CoreMemory | None:
        """Return the memory of the engine core if this process can release and resume it; otherwise None."""
        core = self.core()
        return CoreMemory(core) if core is not None and CoreMemory.is_supported(core) else None

    def _cache_use(self, scheduler: Any) -> CacheUse | None:
        if scheduler is None:
            return None
        pool = scheduler.kv_cache_manager.block_pool
        blocks, free = pool.num_gpu_blocks - 1, pool.free_block_queue.num_free_blocks  # one block is a placeholder
        if not 0 <= free <= blocks or blocks == 0:
            return None
        evictable = self._evictable if pool.enable_caching else 0
        return CacheUse((blocks - free) / blocks, None if evictable is None else min(evictable, free) / blocks)

    def _count_evictable(self, pool: Any) -> None:
        """Count the blocks that no request uses and that have the tokens of an earlier request."""
        # vLLM counts them nowhere: its dictionary of cached blocks has those in use, too.
        free = pool.free_block_queue.num_free_blocks
        state = free, len(pool.cached_block_hash_to_block)
        unchanged = state == self._counted_state and free == pool.num_gpu_blocks - 1  # while no block is in use
        if unchanged or not pool.enable_caching:
            return
        self._evictable = self._counted_state = None
        if pool.num_gpu_blocks > _BLOCKS_MAX:
            return
        evictable = 0
        for start in range(0, pool.num_gpu_blocks, _COUNT_SLICE):
            blocks = pool.blocks[start : start + _COUNT_SLICE]
            evictable += sum(1 for block in blocks if block.ref_cnt == 0 and block.block_hash is not None)
            time.sleep(0)  # lets a thread of the engine take the GIL
        self._evictable, self._counted_state = evictable, state


def _measures(worker: Any) -> bool:
    """Return whether the worker neither knows the size of its cache nor has the cache."""
    # From its first reading of the device's free memory until it has computed the size of its cache, a worker relies on
    # that reading: if this or another process releases memory on the device meanwhile, vLLM exits.
    if getattr(worker, "available_kv_cache_memory_bytes", None) is not None:
        return False
    caches = getattr(getattr(worker, "model_runner", None), "kv_caches", None)
    return not (isinstance(caches, (list, dict)) and len(caches) > 0)


def _held(worker: Any) -> Mapping[int, Mapping[str, int]]:
    """Return the bytes of the weights, which vLLM counts when it loads them, and of the cache."""
    runner, torch = getattr(worker, "model_runner", None), torch_access.initialized_torch()
    if runner is None or torch is None:
        return {}
    caches = torch_access.storage_bytes(torch, getattr(runner, "kv_caches", ()))
    held = {index: {"kv_cache": size} for index, size in caches.items()}
    weights, device = getattr(runner, "model_memory_usage", None), getattr(worker.device, "index", None)
    if isinstance(weights, int) and weights >= 0 and device is not None:
        held.setdefault(device, {})["weights"] = weights
    return held


def _requests(worker: Any) -> int | None:
    """Return the number of requests that the worker runs; None if another process knows them."""
    runner = getattr(worker, "model_runner", None)
    requests = getattr(runner, "requests", None)
    if requests is None:  # the second version of the model runner
        requests = getattr(getattr(runner, "req_states", None), "req_id_to_index", None)
    return None if requests is None else len(requests)


def _model(config: Any) -> str:
    """Return the model's name, as the engine's users call it."""
    model = getattr(config, "model_config", None)
    names = getattr(model, "served_model_name", None)
    name = names[0] if isinstance(names, list) and names else names
    return text(name) or text(getattr(model, "model", None))
