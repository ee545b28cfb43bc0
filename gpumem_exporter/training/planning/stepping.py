"""The training steps of a job, on fake tensors or on a device."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gpumem_exporter.errors import ConfigurationError
from gpumem_exporter.training.planning.job import Job, TensorSpec
from gpumem_exporter.training.planning.model import DTYPES

__all__ = ["Watch", "train"]

_OPTIMIZERS = ("Adam", "AdamW", "SGD", "Adagrad", "RMSprop", "NAdam", "RAdam", "Adamax", "Adadelta")
_CLASSES = {name.lower(): name for name in _OPTIMIZERS}
_FP16_SCALE = 65536.0


class Watch:
    """Receives the progress of a step. `counts_on_device`: the optimizer's step counts are on the device."""

    def forward(self) -> None:
        """Called before the batch is created."""

    def backward(self) -> None:
        """Called after the forward pass."""

    def optimizer(self, counts_on_device: bool) -> None:
        """Called after the last backward pass of a step."""

    def stepped(self, optimizer: Any, counts_on_device: bool) -> None:
        """Called after the optimizer's step."""


def train(job: Job, model: nn.Module, batch: int, steps: int, device: str, watch: Watch) -> None:
    """Train for a few steps. As in a plain script, a tensor lives until its variable is reassigned."""
    optimizer, counts_on_device = _optimizer(job, model)
    autocast = job.precision in ("bf16", "fp16")
    for _ in range(steps):
        for _ in range(job.accumulation):
            watch.forward()
            inputs = _make(job.inputs, batch, device)
            targets = _make(job.targets, batch, device)
            with torch.autocast(device, dtype=DTYPES[job.precision]) if autocast else nullcontext():
                loss = _loss(job, model, inputs, targets)
                if job.accumulation > 1:
                    loss = loss / job.accumulation
            watch.backward()
            (loss * _FP16_SCALE if job.precision == "fp16" else loss).backward()
        watch.optimizer(counts_on_device)
        if optimizer is None:
            model.zero_grad()
            continue
        optimizer.step()
        watch.stepped(optimizer, counts_on_device)
        optimizer.zero_grad()


def _make(specs: Sequence[TensorSpec], batch: int, device: str) -> list[Tensor]:
    # Zeros are valid class indices and token numbers. On fake tensors only the shape matters.
    return [torch.zeros(spec.at(batch), dtype=getattr(torch, spec.dtype), device=device) for spec in specs]


def _loss(job: Job, model: nn.Module, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
    output = _forward(job, model, inputs)
    if callable(job.loss):
        return _number(job.loss(output, *targets))
    kind = job.loss
    if kind == "auto":
        if isinstance(getattr(output, "loss", None), Tensor):
            return _number(output.loss)
        kind = _default_loss(output, targets)
    if kind == "output":
        return _number(output)
    logits = next((t for t in (getattr(output, "logits", None), output) if isinstance(t, Tensor)), None)
    if logits is None:
        raise ConfigurationError(f"the model returns {type(output).__name__}, not a tensor: choose a loss for it")
    if kind == "mean":
        return logits.mean()
    if kind == "sum":
        return logits.sum()
    if not targets:
        raise ConfigurationError(f"loss {kind} needs a target")
    if kind == "cross_entropy":
        return functional.cross_entropy(logits, targets[0])
    return functional.mse_loss(logits, targets[0].to(logits.dtype))


def _forward(job: Job, model: nn.Module, inputs: Sequence[Tensor]) -> Any:
    positional: list[Tensor] = []
    named: dict[str, Tensor] = {}
    for spec, tensor in zip(job.inputs, inputs, strict=True):
        if job.precision.startswith("pure-") and tensor.is_floating_point():
            tensor = tensor.to(DTYPES[job.precision])
        if spec.name:
            named[spec.name] = tensor
        else:
            positional.append(tensor)
    return model(*positional, **named)


def _default_loss(output: Any, targets: Sequence[Tensor]) -> str:
    if targets:
        return "mse" if targets[0].is_floating_point() else "cross_entropy"
    return "output" if isinstance(output, Tensor) and output.numel() == 1 else "mean"


def _number(value: Any) -> Tensor:
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise ConfigurationError("the loss is not a tensor with one element")
    return value


def _optimizer(job: Job, model: nn.Module) -> tuple[Any, bool]:
    """Return the optimizer, and whether its step counts are on the device."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if job.optimizer == "none" or not parameters:
        return None, False
    options = dict(job.optimizer_options)
    if isinstance(job.optimizer, str):
        options = {**({"lr": 1e-3} if job.optimizer == "sgd" else {}), **options}
        try:
            made = getattr(torch.optim, _CLASSES[job.optimizer])(parameters, **options)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"optimizer {job.optimizer}: {error}") from error
    else:
        made = job.optimizer(parameters, **options)
    for group in made.param_groups:
        # CUDA parameters get the foreach implementation by default; CPU parameters, which these are, do not.
        if group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = True
    return made, any(group.get("fused") or group.get("capturable") for group in made.param_groups)
