"""Changes a model's weights so that it takes less memory or runs faster, and measures the effect."""

from __future__ import annotations

import logging
import statistics
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from gpumem_client.phases.measured import Measured
from gpumem_client.wire.errors import ConfigurationError
from gpumem_client.wire.units import ShownAsText, human_bytes
from gpumem_toolkit.measure.tensor_bytes import Storages
from gpumem_toolkit.training.model_runs import call_model, distance_ratio, evaluating, measure_peak, run_seconds, use_on

_log = logging.getLogger("gpumem_toolkit")

_RUNS = 5


@dataclass(frozen=True, slots=True)
class ForwardUse(ShownAsText):
    """The time and peak memory of a forward pass without gradients: the median of five runs after a warm-up."""

    seconds: float
    peak_bytes: int | None
    """The peak above the start, or its lower bound if it is not `exact`. None without CUDA."""
    peak_at_most_bytes: int | None
    """The upper bound of the peak; None if it is unknown."""

    @property
    def exact(self) -> bool:
        """Whether the bounds of the peak are equal."""
        return self.peak_bytes is not None and self.peak_bytes == self.peak_at_most_bytes

    def __str__(self) -> str:
        most = "" if self.exact else f" to {human_bytes(self.peak_at_most_bytes)} (reset_peaks=True makes it exact)"
        peak = "no CUDA" if self.peak_bytes is None else f"peak {human_bytes(self.peak_bytes)}{most}"
        return f"{self.seconds * 1e3:.1f} ms, {peak}"


@dataclass(frozen=True, slots=True)
class ModelOptimization(ShownAsText):
    """The effect of `optimize_model`. `str()` returns it as text. The weights are on all devices.

    The allocated bytes are on the device of the first parameter, and None without CUDA. The forward passes are None
    without an example, as is the largest distance of an output from its value before, divided by the norm of that
    value.
    """

    model: str
    done: str
    weights_before_bytes: int
    weights_after_bytes: int
    allocated_before_bytes: int | None
    allocated_after_bytes: int | None
    forward_before: ForwardUse | None
    forward_after: ForwardUse | None
    output_difference_ratio: float | None

    def __str__(self) -> str:
        weights = f"{human_bytes(self.weights_before_bytes)} -> {human_bytes(self.weights_after_bytes)}"
        allocated = "no CUDA"
        if self.allocated_before_bytes is not None:
            before, after = human_bytes(self.allocated_before_bytes), human_bytes(self.allocated_after_bytes)
            allocated = f"allocated {before} -> {after}"
        lines = [f"{self.model}, {self.done}: weights {weights}, {allocated}"]
        if self.forward_before is not None:
            lines.append(f"forward {self.forward_before} -> {self.forward_after}")
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
    so optimizers still refer to them. If the model fails with the example, the change stays, because it cannot be
    undone. Raises ConfigurationError if the arguments would change nothing.

    Args:
        model: the model, on the device where it runs.
        dtype: the new dtype of all floating-point parameters and buffers. `torch.bfloat16` halves the bytes of float32
            weights, and makes results less precise. The caller casts the inputs.
        channels_last: change to the layout in which cuDNN's convolutions need no transposition on tensor cores.
        example: a batch with which to measure the forward pass before and after: a tensor, positional arguments in a
            tuple or list, or keyword arguments in a mapping.
        reset_peaks: reset the allocator's peaks, so that the measured peak of a forward pass is exact. By default the
            peak comes from the allocator's history, recorded for one forward pass, and nothing is reset.
    """
    _check(model, dtype, channels_last)
    if reset_peaks and example is None:
        raise ConfigurationError("reset_peaks needs an example: it makes the peak of its forward pass exact")
    weights = _weights_bytes(model)
    before, outputs = (None, []) if example is None else _measure_forward(model, example, reset_peaks)
    with Measured("optimize_model", kept=False) as use:
        if dtype is not None:
            model.to(dtype=dtype)
        if channels_last:
            model.to(memory_format=torch.channels_last)
    after, changed = (None, []) if example is None else _measure_forward(model, _cast(example, dtype), reset_peaks)
    device = use_on(use, next(model.parameters()).device)
    optimization = ModelOptimization(
        model=type(model).__name__,
        done=" and ".join([*([str(dtype)] if dtype else []), *(["channels last"] if channels_last else [])]),
        weights_before_bytes=weights,
        weights_after_bytes=_weights_bytes(model),
        allocated_before_bytes=None if device is None else device.before_bytes,
        allocated_after_bytes=None if device is None else device.after_bytes,
        forward_before=before,
        forward_after=after,
        output_difference_ratio=_difference(outputs, changed),
    )
    for line in str(optimization).splitlines():
        _log.info("%s", line)
    return optimization


def _check(model: nn.Module, dtype: torch.dtype | None, channels_last: bool) -> None:
    name = type(model).__name__
    if dtype is None and not channels_last:
        raise ConfigurationError("nothing to change: use dtype=torch.bfloat16, channels_last=True, or both")
    parameters = list(model.parameters())
    if not parameters:
        raise ConfigurationError(f"{name} has no parameters to change")
    if dtype is not None and not dtype.is_floating_point:
        raise ConfigurationError(f"invalid dtype {dtype}: use a floating-point type, such as torch.bfloat16")
    tensors = [tensor for tensor in (*parameters, *model.buffers()) if tensor.is_floating_point()]
    if dtype is not None and all(tensor.dtype is dtype for tensor in tensors):
        raise ConfigurationError(f"dtype {dtype} changes nothing: {name} has it already")
    if channels_last:
        images = [parameter for parameter in parameters if parameter.dim() == 4]
        if not images:
            raise ConfigurationError(f"channels_last is for two-dimensional convolutions, and {name} has none")
        if all(image.is_contiguous(memory_format=torch.channels_last) for image in images):
            raise ConfigurationError(f"channels_last changes nothing: {name} has that layout already")


def _measure_forward(model: nn.Module, batch: Any, reset_peaks: bool) -> tuple[ForwardUse, list[Tensor]]:
    """Return a measured forward pass, and its outputs on the CPU."""
    device = next(model.parameters()).device
    with evaluating(model), torch.no_grad():
        outputs = [leaf.cpu() for leaf in tree_leaves(call_model(model, batch)) if isinstance(leaf, Tensor)]
        peak, most = measure_peak(lambda: call_model(model, batch), device, reset_peaks=reset_peaks)
        seconds = [run_seconds(lambda: call_model(model, batch), device) for _ in range(_RUNS)]
    return ForwardUse(statistics.median(seconds), peak, most), outputs


def _cast(batch: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None:
        return batch
    return tree_map(
        lambda leaf: leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf, batch
    )


def _difference(before: list[Tensor], after: list[Tensor]) -> float | None:
    pairs = [(one, other) for one, other in zip(before, after, strict=True) if one.shape == other.shape]
    return max((distance_ratio(one, other) for one, other in pairs), default=None)


def _weights_bytes(model: nn.Module) -> int:
    return Storages(torch, [*model.parameters(), *model.buffers()]).total()
