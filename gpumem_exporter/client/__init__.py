"""The part that runs inside a PyTorch process.

    from gpumem_exporter import client as gpumem

    gpumem.start(workload="llm-pretrain")

From then on the process reports its allocator to the exporter on its node, once it has initialised CUDA, and clears
its cache when it is asked to. It needs the standard library alone, starts one thread, opens no port, initialises
nothing, resets nothing, and raises nothing into the program once `start` has returned.

What else the program may call works without `start` and without an exporter, and is imported on its first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gpumem_exporter.client._process import start, step, stop

if TYPE_CHECKING:
    from gpumem_exporter.client._allocator_advice import recommend_allocator_settings
    from gpumem_exporter.client._auto_clean import auto_clean
    from gpumem_exporter.client._cleaning import clear_cache, deep_clean, reset_peak, set_memory_fraction
    from gpumem_exporter.client._components import watch
    from gpumem_exporter.client._context import memory_context
    from gpumem_exporter.client._leaks import leak_detector
    from gpumem_exporter.client._lingering import lingering_tensors
    from gpumem_exporter.client._milestones import milestones
    from gpumem_exporter.client._oom_guard import oom_guard
    from gpumem_exporter.client._phases import phase
    from gpumem_exporter.client._releasing import release_model, to_cpu
    from gpumem_exporter.client._snapshots import snapshot
    from gpumem_exporter.client._summary import log_summary, summary

__all__ = [
    "auto_clean",
    "clear_cache",
    "deep_clean",
    "leak_detector",
    "lingering_tensors",
    "log_summary",
    "memory_context",
    "milestones",
    "oom_guard",
    "phase",
    "recommend_allocator_settings",
    "release_model",
    "reset_peak",
    "set_memory_fraction",
    "snapshot",
    "start",
    "step",
    "stop",
    "summary",
    "to_cpu",
    "watch",
]

_LAZY = {
    "auto_clean": "_auto_clean",
    "clear_cache": "_cleaning",
    "deep_clean": "_cleaning",
    "leak_detector": "_leaks",
    "lingering_tensors": "_lingering",
    "log_summary": "_summary",
    "memory_context": "_context",
    "milestones": "_milestones",
    "oom_guard": "_oom_guard",
    "phase": "_phases",
    "recommend_allocator_settings": "_allocator_advice",
    "release_model": "_releasing",
    "reset_peak": "_cleaning",
    "set_memory_fraction": "_cleaning",
    "snapshot": "_snapshots",
    "summary": "_summary",
    "to_cpu": "_releasing",
    "watch": "_components",
}
"""The module of each name that is imported on first use."""


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
