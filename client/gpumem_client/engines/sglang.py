"""Reads SGLang's scheduler in this process: version 0.5.23, and others as far as they have the same names.

Each rank is a process with a scheduler, the model and its share of the key-value cache.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from gpumem_client import torch_access
from gpumem_client.engines.engine_state import CacheUse, EngineFacts, known, text
from gpumem_client.engines.live_objects import LiveObjects

_SCHEDULER = "sglang.srt.managers.scheduler", "Scheduler"
# The event loops themselves are left out: their local variables are the tensors of a step.
_METHODS = {_SCHEDULER: ("Scheduler.__init__", "Scheduler.run_event_loop")}
# A count of the model's weights is followed by a pause of this multiple of its CPU time: 0.05 % of a core.
_COUNT_SHARE = 2000
_GIB = 1 << 30


class Sglang:
    """The engine. One thread calls `look`; any thread may call `read`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._objects = LiveObjects(_METHODS, clock)
        self._weights: Mapping[int, int] = {}
        self._next_count_seconds = 0.0

    def look(self) -> None:
        """Search the scheduler, and count the model's weights, as far as either is due."""
        if self._objects.get(_SCHEDULER) is None:
            self._objects.search()
        scheduler, torch = self._objects.get(_SCHEDULER), torch_access.initialized_torch()
        if torch is not None and _ready(scheduler) and self._clock() >= self._next_count_seconds:
            started = time.thread_time()
            # SGLang's own value is a difference of the device's free memory, which other processes change too.
            self._weights = torch_access.module_bytes(torch, scheduler.tp_worker.model_runner.model)
            self._next_count_seconds = self._clock() + (time.thread_time() - started) * _COUNT_SHARE

    def read(self) -> EngineFacts | None:
        """Return what the scheduler shows; None if there is none."""
        scheduler = self._objects.get(_SCHEDULER)
        if scheduler is None:
            return None
        arguments = getattr(scheduler, "server_args", None)
        ready = _ready(scheduler)
        cache = known("the key-value cache of SGLang", lambda: _cache_use(scheduler), None) if ready else None
        return EngineFacts(
            "sglang",
            version=text(vars(sys.modules["sglang"]).get("__version__")),
            model=text(getattr(arguments, "served_model_name", None)) or text(getattr(arguments, "model_path", None)),
            measures=not ready,
            ready=ready,
            held=known("the tensors of SGLang", lambda: self._held(scheduler), {}) if ready else {},
            requests=known("the requests of SGLang", lambda: _requests(scheduler, cache), None) if ready else None,
            cache=cache,
        )

    def _held(self, scheduler: Any) -> Mapping[int, Mapping[str, int]]:
        held = {index: {"weights": size} for index, size in self._weights.items()}
        pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
        if not getattr(pool, "post_capture_active", False):  # otherwise it is an upper bound
            # In GiB, and computed from whole bytes: the product is exact.
            held.setdefault(scheduler.tp_worker.model_runner.gpu_id, {})["kv_cache"] = int(pool.mem_usage * _GIB)
        return held


def _ready(scheduler: Any) -> bool:
    """Return whether the scheduler has started."""
    # It makes its queues after the model, the cache and the graphs.
    return hasattr(scheduler, "running_batch") and hasattr(scheduler, "waiting_queue")


def _requests(scheduler: Any, cache: CacheUse | None) -> int:
    """Return the number of requests; at least 1 while any is under way."""
    waiting = len(scheduler.waiting_queue) + len(scheduler.grammar_manager.grammar_queue)
    # A prompt in chunks, and a prompt whose batch runs, are in no queue. The latter has tokens of the cache.
    known = waiting + len(scheduler.running_batch.reqs) + (scheduler.chunked_req is not None)
    return known or int(cache is not None and cache.used > 0)


def _cache_use(scheduler: Any) -> CacheUse | None:
    """Return the shares of tokens; None for caches of several kinds, whose tokens differ in size."""
    if any(getattr(scheduler, name, False) for name in ("is_hybrid_swa", "is_hybrid_ssm", "enable_hisparse")):
        return None
    # The allocator counts the tokens of all ranks between which a page is interleaved.
    tokens = scheduler.max_total_num_tokens * getattr(scheduler, "kv_shard_widening", 1)
    evictable = scheduler.tree_cache.evictable_size()
    available = scheduler.token_to_kv_pool_allocator.available_size()
    if available > tokens:
        return None
    used = tokens - available - evictable
    # The scheduler's thread moves tokens between two of these readings.
    used, evictable = max(0, used), max(0, min(evictable, tokens))
    return CacheUse(used / tokens, evictable / tokens) if used + evictable <= tokens else None
