"""Tools for training scripts: plan memory, find batch sizes, make batches fit, save checkpoints.

Each name is imported on first use, so that importing the package does not import torch.
"""

from __future__ import annotations

import importlib
from typing import Any

_MODULES = {
    "BatchSizeSearch": "gpumem_exporter.training.batch_size",
    "BatchSizeTry": "gpumem_exporter.training.batch_size",
    "CheckpointingComparison": "gpumem_exporter.training.checkpointing.comparison",
    "CheckpointingRow": "gpumem_exporter.training.checkpointing.comparison",
    "GradientAccumulator": "gpumem_exporter.training.accumulation",
    "ModelOptimization": "gpumem_exporter.training.optimizing",
    "Plan": "gpumem_exporter.training.planning.plan",
    "SavedCheckpoint": "gpumem_exporter.training.saving",
    "compare_checkpointing": "gpumem_exporter.training.checkpointing.compare",
    "find_batch_size": "gpumem_exporter.training.batch_size",
    "inference_mode": "gpumem_exporter.training.inference",
    "optimize_model": "gpumem_exporter.training.optimizing",
    "plan": "gpumem_exporter.training.planning.planner",
    "plan_description": "gpumem_exporter.training.planning.planner",
    "save_checkpoint": "gpumem_exporter.training.saving",
}
"""The module of each public name."""

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
