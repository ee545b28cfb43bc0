"""Finds what in this process does not work together with expandable segments, so that no advice proposes them.

Some allocators map and unmap the memory of a pool themselves, which expandable segments prevent: torch_memory_saver,
which SGLang uses, then releases nothing, and vLLM's sleep mode refused to start before 0.33. Since then vLLM turns them
off around its pools.
"""

from __future__ import annotations

import sys
import time

from gpumem_toolkit.leaks.interpreter_objects import GENERATIONS, find_frozen, tracked_of_types

_LIBRARIES = {"vllm": "vLLM", "sglang": "SGLang", "torch_memory_saver": "torch_memory_saver"}
_FROZEN_SECONDS, _FROZEN_MAX = 1.0, 5_000_000


def expandable_segments_conflict() -> str:
    """Return why expandable segments are no option in this process, such as `vLLM is loaded`; empty if they are one.

    A `torch.cuda.MemPool` is found among the objects of the garbage collector, because the allocator's state does not
    distinguish it from the pool of CUDA graphs. The search keeps the GIL for about 0.05 s per million objects.
    """
    for module, name in _LIBRARIES.items():
        if module in sys.modules and not (module == "vllm" and _version_of(sys.modules[module]) >= (0, 33)):
            return f"{name} is loaded"
    pool_class = getattr(sys.modules.get("torch.cuda.memory"), "MemPool", None)  # torch 2.5 and later
    if pool_class is not None and (
        any(tracked_of_types(generation, (pool_class,)) for generation in GENERATIONS)
        or any(
            type(each) is pool_class for each in find_frozen(time.thread_time() + _FROZEN_SECONDS, _FROZEN_MAX).objects
        )
    ):
        return "the program uses a torch.cuda.MemPool"
    return ""


def _version_of(module: object) -> tuple[int, ...]:
    """Return the first two numbers of a module's version; empty if it has none, as a build from its sources."""
    numbers = str(getattr(module, "__version__", "")).split(".")[:2]
    return tuple(int(number) for number in numbers) if all(number.isdecimal() for number in numbers) else ()
