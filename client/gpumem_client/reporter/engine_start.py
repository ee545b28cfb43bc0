"""Knows whether a vLLM worker in this process starts, from what vLLM has loaded. Imports nothing of vLLM.

A worker starts from its first reading of the device's free memory until it has computed the size of its cache. If this
or another process releases memory on the device in that time, vLLM exits.
"""

from __future__ import annotations

import inspect
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any

_MODULE = "vllm.v1.worker.gpu_worker"
_STARTING = ("init_device", "load_model", "determine_available_memory")
_SEARCH_SHARE = 2000
"""A search of the stacks is followed by a pause of this multiple of its CPU time: 0.05 % of a core. A search takes
0.7 µs a frame and keeps the GIL; if the start was over before the first search, the searches never end."""


class EngineStart:
    """The start of vLLM's worker in this process. Used in the reporter's thread only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._worker: weakref.ref[Any] | None = None
        self._next_search_seconds = 0.0

    def is_starting(self) -> bool | None:
        """Return whether a worker starts; False once it has started, None if there is no worker.

        It is also None if the start was over before the first call, or if this version of vLLM is too different.
        """
        # The worker is found once, while it is in one of its starting functions: vLLM has no list of its workers. From
        # then on its attributes show whether it has started.
        worker_class = getattr(sys.modules.get(_MODULE), "Worker", None)
        if not isinstance(worker_class, type):
            return None
        worker = None if self._worker is None else self._worker()
        if worker is None and self._clock() >= self._next_search_seconds:
            started = time.thread_time()
            worker = _starting_worker(worker_class)
            self._next_search_seconds = self._clock() + (time.thread_time() - started) * _SEARCH_SHARE
            self._worker = None if worker is None else weakref.ref(worker)
        return None if worker is None else not _has_started(worker)


def _starting_worker(worker_class: type) -> Any:
    """Return the worker whose starting function is on the stack of a thread; None if there is none."""
    functions = (inspect.unwrap(getattr(worker_class, name, None)) for name in _STARTING)  # type: ignore[arg-type]
    codes = {code for function in functions if (code := getattr(function, "__code__", None)) is not None}
    for innermost in sys._current_frames().values():  # noqa: SLF001
        frame = innermost
        while frame is not None:
            # Only these frames: reading the local variables of a frame keeps them alive until it returns.
            worker = frame.f_locals.get("self") if frame.f_code in codes else None
            if isinstance(worker, worker_class):
                return worker
            frame = frame.f_back  # type: ignore[assignment]
    return None


def _has_started(worker: Any) -> bool:
    """Return whether the worker knows the size of its cache, or has the cache."""
    if getattr(worker, "available_kv_cache_memory_bytes", None) is not None:
        return True
    caches = getattr(getattr(worker, "model_runner", None), "kv_caches", None)
    return isinstance(caches, (list, dict)) and len(caches) > 0
