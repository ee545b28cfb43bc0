"""The part of the package that runs in a PyTorch process.

    from gpumem_exporter import client as gpumem

    gpumem.start(workload="llm-pretrain")

As soon as CUDA is initialized, the process reports its allocator to the exporter on its node, and runs the exporter's
commands, such as clearing the cache. The client needs the standard library only, starts one thread, opens no port,
initializes no CUDA, resets no statistic, and raises nothing into the user's code after `start` has returned.

All other functions work without `start` and without an exporter. Each is imported on its first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gpumem_exporter.client.api import start, step, stop

if TYPE_CHECKING:
    from gpumem_exporter.client.allocator.settings_advice import recommend_allocator_settings
    from gpumem_exporter.client.allocator.snapshot_file import snapshot
    from gpumem_exporter.client.cleanup.auto_clean import auto_clean
    from gpumem_exporter.client.cleanup.clear import clear_cache, deep_clean, reset_peak, set_memory_fraction
    from gpumem_exporter.client.cleanup.release import release_model, to_cpu
    from gpumem_exporter.client.leaks.detector import leak_detector
    from gpumem_exporter.client.leaks.live_tensors import lingering_tensors
    from gpumem_exporter.client.measure.components import watch
    from gpumem_exporter.client.measure.measured import memory_context, phase
    from gpumem_exporter.client.measure.milestones import milestones
    from gpumem_exporter.client.measure.summary import log_summary, summary
    from gpumem_exporter.client.oom.guard import oom_guard

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
    "auto_clean": "cleanup.auto_clean",
    "clear_cache": "cleanup.clear",
    "deep_clean": "cleanup.clear",
    "leak_detector": "leaks.detector",
    "lingering_tensors": "leaks.live_tensors",
    "log_summary": "measure.summary",
    "memory_context": "measure.measured",
    "milestones": "measure.milestones",
    "oom_guard": "oom.guard",
    "phase": "measure.measured",
    "recommend_allocator_settings": "allocator.settings_advice",
    "release_model": "cleanup.release",
    "reset_peak": "cleanup.clear",
    "set_memory_fraction": "cleanup.clear",
    "snapshot": "allocator.snapshot_file",
    "summary": "measure.summary",
    "to_cpu": "cleanup.release",
    "watch": "measure.components",
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
