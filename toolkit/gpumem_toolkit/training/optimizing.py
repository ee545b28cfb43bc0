"""Changes a model's weights so that it takes less memory or runs faster, and measures the effect."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from gpumem_client.phases.measured import Measured, MemoryUse
from gpumem_client.wire.errors import ConfigurationError
from gpumem_client.wire.units import ShownAsText, human_bytes
from gpumem_toolkit.measure.tensor_bytes import Storages
from gpumem_toolkit.training.model_runs import call_model, distance_ratio, evaluating, synchronize

_log = logging.getLogger("gpumem_toolkit")


@dataclass(frozen=True, slots=True)
class ModelOptimization(ShownAsText):
    """The effect of `optimize_model`. `str()` returns it as text. The weights are on all devices.

    The forward passes are None without an example, as is the largest distance of an output from its value before,
    divided by the norm of that value.
    """

    model: str
    weights_before_bytes: int
    weights_after_bytes: int
    forward_before: MemoryUse | None
    forward_after: MemoryUse | None
    output_difference_ratio: float | None

    def __str__(self) -> str:
        weights = f"{human_bytes(self.weights_before_bytes)} -> {human_bytes(self.weights_after_bytes)}"
        lines = [f"{self.model}: weights {weights}"]
        uses = filter(None, (self.forward_before, self.forward_after))
        lines += [f"{use}, {(use.duration_seconds or 0) * 1e3:.1f} ms" for use in uses]
        if self.output_difference_ratio is not None:
            lines.append(f"outputs differ by up to {self.output_difference_ratio:.2g} of their norm")
        return "\n".join(lines)


def optimize_model(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    channels_last: bool = False,
    example: Any = None,
    reset_peaks: bool = False,
) -> ModelOptimization:
    """Change a model's weights in place, and measure and log the effect.

    Calls `model.to(dtype=…)` and `model.to(memory_format=torch.channels_last)`. The parameters stay the same objects,
    so optimizers still refer to them. With an `example` (a tensor, positional arguments in a tuple or list, or keyword
    arguments in a mapping), measures a forward pass before and after; `reset_peaks` makes its peak exact. If the model
    fails with the example, the change stays, because it cannot be undone. Raises ConfigurationError if neither `dtype`,
    a floating-point type, nor `channels_last` is given.
    """
    if not (dtype is not None and dtype.is_floating_point) and not channels_last:
        raise ConfigurationError(f"invalid dtype {dtype}: use dtype=torch.bfloat16, channels_last=True, or both")
    weights, (before, outputs) = _weights_bytes(model), _forward(model, example, "forward before", reset_peaks)
    if dtype is not None:
        model.to(dtype=dtype)
    if channels_last:
        model.to(memory_format=torch.channels_last)
    cast = tree_map(
        lambda leaf: leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf, example
    )
    after, changed = _forward(model, cast, "forward after", reset_peaks)
    ratios = [distance_ratio(*pair) for pair in zip(outputs, changed, strict=True)]
    optimization = ModelOptimization(
        type(model).__name__, weights, _weights_bytes(model), before, after, max(ratios, default=None)
    )
    for line in str(optimization).splitlines():
        _log.info("%s", line)
    return optimization


def _forward(model: nn.Module, batch: Any, name: str, reset_peaks: bool) -> tuple[MemoryUse | None, list[Tensor]]:
    """Return a measured forward pass after a first one, and its outputs on the CPU."""
    if batch is None:
        return None, []
    with evaluating(model), torch.no_grad():
        outputs = [leaf.cpu() for leaf in tree_leaves(call_model(model, batch)) if isinstance(leaf, Tensor)]
        with Measured(name, kept=False, reset_peaks=reset_peaks) as use:
            call_model(model, batch)
            synchronize(next(model.parameters()).device)
    return use, outputs


def _weights_bytes(model: nn.Module) -> int:
    return Storages(torch, [*model.parameters(), *model.buffers()]).total()
