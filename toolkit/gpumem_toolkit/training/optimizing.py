"""Changes a model's weights so that it takes less memory or runs faster."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import nn

from gpumem_client.wire.errors import ConfigurationError
from gpumem_client.wire.units import ShownAsText, human_bytes
from gpumem_toolkit.measure.tensor_bytes import Storages

_log = logging.getLogger("gpumem_toolkit")


@dataclass(frozen=True, slots=True)
class ModelOptimization(ShownAsText):
    """The effect of `optimize_model` on the weights, on all devices. `str()` returns it as text."""

    model: str
    weights_before_bytes: int
    weights_after_bytes: int

    def __str__(self) -> str:
        before, after = human_bytes(self.weights_before_bytes), human_bytes(self.weights_after_bytes)
        return f"{self.model}: weights {before} -> {after}"


def optimize_model(
    model: nn.Module, *, dtype: torch.dtype | None = None, channels_last: bool = False
) -> ModelOptimization:
    """Change a model's weights in place, and log the effect on their bytes.

    Calls `model.to(dtype=…)` and `model.to(memory_format=torch.channels_last)`. The parameters stay the same objects.
    Raises ConfigurationError if neither `dtype`, a floating-point type, nor `channels_last` is given.
    """
    if not (dtype is not None and dtype.is_floating_point) and not channels_last:
        raise ConfigurationError(f"invalid dtype {dtype}: use dtype=torch.bfloat16, channels_last=True, or both")
    before = _weights_bytes(model)
    if dtype is not None:
        model.to(dtype=dtype)
    if channels_last:
        model.to(memory_format=torch.channels_last)
    optimization = ModelOptimization(type(model).__name__, before, _weights_bytes(model))
    _log.info("%s", optimization)
    return optimization


def _weights_bytes(model: nn.Module) -> int:
    return Storages(torch, [*model.parameters(), *model.buffers()]).total()
