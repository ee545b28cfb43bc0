"""Tools for training scripts: plan memory, find batch sizes, find leaks, explain OOMs, save checkpoints.

    import gpumem_toolkit as toolkit

The toolkit needs the user's torch. Each name is imported on first use, so that importing the package imports no torch.

Other folders import: `errors`.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.3.0"

_MODULES = {
    "BatchSizeSearch": "gpumem_toolkit.training.batch_size",
    "BatchSizeTry": "gpumem_toolkit.training.batch_size",
    "CheckpointingComparison": "gpumem_toolkit.checkpointing.comparison",
    "CheckpointingRow": "gpumem_toolkit.checkpointing.comparison",
    "GradientAccumulator": "gpumem_toolkit.training.accumulation",
    "ModelOptimization": "gpumem_toolkit.training.optimizing",
    "Plan": "gpumem_toolkit.planning.plan",
    "SavedCheckpoint": "gpumem_toolkit.training.saving",
    "auto_clean": "gpumem_toolkit.cleanup.auto_clean",
    "compare_checkpointing": "gpumem_toolkit.checkpointing.variants",
    "debug_handlers": "gpumem_toolkit.debug_page",
    # The client's: `start(clean_start=True)` needs it.
    "deep_clean": "gpumem_client.release",
    "find_batch_size": "gpumem_toolkit.training.batch_size",
    "inference_mode": "gpumem_toolkit.training.inference",
    "leak_detector": "gpumem_toolkit.leaks.detector",
    "lingering_tensors": "gpumem_toolkit.leaks.live_tensors",
    "milestones": "gpumem_toolkit.measure.milestones",
    "oom_guard": "gpumem_toolkit.oom.guard",
    "optimize_model": "gpumem_toolkit.training.optimizing",
    "plan": "gpumem_toolkit.planning.planner",
    "plan_description": "gpumem_toolkit.planning.planner",
    "recommend_allocator_settings": "gpumem_toolkit.oom.settings_advice",
    "release_model": "gpumem_toolkit.cleanup.release",
    "save_checkpoint": "gpumem_toolkit.training.saving",
    "to_cpu": "gpumem_toolkit.cleanup.release",
    "watch": "gpumem_toolkit.measure.components",
}
"""The module of each public name."""

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
