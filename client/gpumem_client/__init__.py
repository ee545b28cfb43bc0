"""The part of gpumem that runs in a PyTorch process.

    import gpumem_client as gpumem

    gpumem.start(workload="llm-pretrain")

As soon as CUDA is initialized, the process reports its allocator to the exporter on its node, and runs the exporter's
commands, such as clearing the cache. The client needs the standard library only, starts one thread, opens no port,
initializes no CUDA, resets no statistic, and raises nothing into the user's code after `start` has returned.

All other functions work without `start` and without an exporter. Each is imported on its first use.

Other folders import: `driver_memory`, `guest_safety`, `release`, `run`, `torch_access`, `uninterrupted`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gpumem_client.api import start, step, stop

if TYPE_CHECKING:
    from gpumem_client.allocator.snapshot_file import snapshot
    from gpumem_client.phases.measured_block import memory_context, phase
    from gpumem_client.release import clear_cache, reset_peak, set_memory_fraction
    from gpumem_client.summary import log_summary, memory_summary

__version__ = "0.3.0"

__all__ = [
    "clear_cache",
    "log_summary",
    "memory_context",
    "memory_summary",
    "phase",
    "reset_peak",
    "set_memory_fraction",
    "snapshot",
    "start",
    "step",
    "stop",
]

# The module of each name that is imported on first use.
_LAZY = {
    "clear_cache": "release",
    "log_summary": "summary",
    "memory_context": "phases.measured_block",
    "memory_summary": "summary",
    "phase": "phases.measured_block",
    "reset_peak": "release",
    "set_memory_fraction": "release",
    "snapshot": "allocator.snapshot_file",
}


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
