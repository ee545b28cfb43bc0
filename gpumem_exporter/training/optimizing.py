"""Changing a model's weights so that it takes less or runs faster, and what that has really changed."""

from __future__ import annotations

import logging
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from gpumem_exporter.client.measure.measured import Measured
from gpumem_exporter.client.measure.tensor_bytes import Storages
from gpumem_exporter.client.sizes import human_bytes
from gpumem_exporter.errors import ConfigurationError
from gpumem_exporter.training.calling import call_model, evaluating
from gpumem_exporter.training.checkpointing.results import distance_ratio

__all__ = ["ForwardUse", "ModelOptimization", "optimize_model"]

_log = logging.getLogger("gpumem_exporter.training")

_RUNS = 5


@dataclass(frozen=True, slots=True)
class ForwardUse:
    """What a forward pass without gradients takes.

    Attributes:
        seconds: the median of five, after a first one.
        peak_bytes: allocated at most above the start; where not `exact`, the largest value that was seen. None without
            CUDA.
        exact: the peak is known, not only its lower bound.
    """

    seconds: float
    peak_bytes: int | None
    exact: bool

    def __str__(self) -> str:
        bound = "" if self.exact or self.peak_bytes is None else "at least "
        peak = "no CUDA" if self.peak_bytes is None else f"peak {bound}{human_bytes(self.peak_bytes)}"
        return f"{self.seconds * 1e3:.1f} ms, {peak}"


@dataclass(frozen=True, slots=True)
class ModelOptimization:
    """What `optimize_model` has changed. `str()` tells it in lines.

    Attributes:
        model: its class.
        done: what was done.
        weights_before_bytes: parameters and buffers, wherever they are.
        weights_after_bytes: the same afterwards.
        allocated_before_bytes: on the device of the first parameter; None without CUDA.
        allocated_after_bytes: the same afterwards.
        forward_before: None without an example, as for the next two.
        forward_after: of the same batch.
        output_difference_ratio: the largest distance of an output from what it was before, as a part of its norm.
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
    """Change a model's weights in place, measure what that did, and log it.

    It is `model.to(dtype=…, memory_format=torch.channels_last)`, and no more: what else makes a model smaller or faster
    (`torch.compile`, quantisation) gives another object. An optimizer that has the parameters keeps them.

    Args:
        model: where it is used.
        dtype: of every floating-point parameter and buffer (`torch.bfloat16`): half the weights' bytes, and coarser
            results. Running statistics and tables of frequencies become coarser, too; to compute in bf16 and keep the
            weights, use autocast. Whoever calls the model casts its inputs.
        channels_last: the layout in which cuDNN's convolutions on tensor cores run without transposing
            (pytorch.org/tutorials, "Channels Last Memory Format"). The same bytes.
        example: a batch (a tensor, positional arguments in a tuple or list, keywords in a mapping), in the inputs' type
            of before: the forward pass is measured before and after.
        reset_peaks: let the allocator's peaks begin anew before each measured forward pass: then its own is exact.

    Raises:
        ConfigurationError: nothing is asked for, or it would change nothing.
        Exception: what the model raises with the example. If it is the changed one that does, it stays changed: what
            its weights have lost cannot be given back.
    """
    _check(model, dtype, channels_last)
    if reset_peaks and example is None:
        raise ConfigurationError("reset_peaks makes the peak of a forward pass exact: give an example to run one")
    before, outputs = (None, None) if example is None else _forward(model, example, reset_peaks)
    weights = _weights_bytes(model)
    with Measured("optimize_model", kept=False) as use:
        if dtype is not None:
            model.to(dtype=dtype)
        if channels_last:
            model.to(memory_format=torch.channels_last)
    after, others = None, None
    if example is not None:
        after, others = _forward(model, _cast(example, dtype), reset_peaks)
    index = _device(model).index
    device = next((each for each in use.devices if each.index == index), None)
    told = ModelOptimization(
        model=type(model).__name__,
        done=" and ".join(
            [*([str(dtype)] if dtype is not None else []), *(["channels last"] if channels_last else [])]
        ),
        weights_before_bytes=weights,
        weights_after_bytes=_weights_bytes(model),
        allocated_before_bytes=None if device is None else device.before_bytes,
        allocated_after_bytes=None if device is None else device.after_bytes,
        forward_before=before,
        forward_after=after,
        output_difference_ratio=_difference(outputs, others),
    )
    for line in str(told).splitlines():
        _log.info("%s", line)
    return told


def _check(model: nn.Module, dtype: torch.dtype | None, channels_last: bool) -> None:
    if dtype is None and not channels_last:
        raise ConfigurationError("nothing is asked for: give dtype=torch.bfloat16, channels_last=True, or both")
    parameters = list(model.parameters())
    if not parameters:
        raise ConfigurationError(f"{type(model).__name__} has no parameters: there is nothing to change")
    if dtype is not None and not dtype.is_floating_point:
        raise ConfigurationError(f"dtype {dtype}; weights are floating-point numbers, as torch.bfloat16")
    tensors = [tensor for tensor in (*parameters, *model.buffers()) if tensor.is_floating_point()]
    if dtype is not None and all(tensor.dtype is dtype for tensor in tensors):
        raise ConfigurationError(f"dtype {dtype}; all of {type(model).__name__} has it already")
    if channels_last:
        images = [parameter for parameter in parameters if parameter.dim() == 4]
        if not images:
            raise ConfigurationError("channels_last is for convolutions in two dimensions, and the model has none")
        if all(image.is_contiguous(memory_format=torch.channels_last) for image in images):
            raise ConfigurationError(f"channels_last; all of {type(model).__name__} is that already")


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _forward(model: nn.Module, batch: Any, reset_peaks: bool) -> tuple[ForwardUse, list[Tensor]]:
    """What it takes, and its outputs in the host's memory."""
    device = _device(model)
    seconds: list[float] = []
    with evaluating(model), torch.no_grad(), Measured("forward", kept=False) as whole:
        outputs = [leaf.cpu() for leaf in tree_leaves(call_model(model, batch)) if isinstance(leaf, Tensor)]
        with Measured("forward", kept=False, reset_peaks=reset_peaks) as timed:
            for _ in range(_RUNS):
                _wait(device)
                started = time.perf_counter()
                call_model(model, batch)
                _wait(device)
                seconds.append(time.perf_counter() - started)
    inner, outer = (next((d for d in use.devices if d.index == device.index), None) for use in (timed, whole))
    if device.type != "cuda" or inner is None or outer is None:
        return ForwardUse(statistics.median(seconds), None, exact=False), outputs
    peak = inner if inner.exact else outer
    return ForwardUse(statistics.median(seconds), peak.peak_bytes - inner.before_bytes, exact=peak.exact), outputs


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _cast(batch: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None:
        return batch
    return tree_map(
        lambda leaf: leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf, batch
    )


def _difference(before: list[Tensor] | None, after: list[Tensor] | None) -> float | None:
    if before is None or after is None:
        return None
    pairs = [(one, other) for one, other in zip(before, after, strict=True) if one.shape == other.shape]
    return max((distance_ratio(one, other) for one, other in pairs), default=None)


def _weights_bytes(model: nn.Module) -> int:
    storages = Storages(torch)
    storages.add([*model.parameters(), *model.buffers()])
    return sum(storages.bytes().values())
