"""The training steps of a job, on fake tensors or on a device."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gpumem_client.wire.errors import ConfigurationError
from gpumem_toolkit.planning.job import Job, TensorSpec
from gpumem_toolkit.planning.model import DTYPES
from gpumem_toolkit.planning.optimizers import make_optimizer

__all__ = ["Watch", "train"]

_FP16_SCALE = 65536.0


class Watch:
    """Receives the progress of a step. `counts_on_device`: the optimizer's step counts are on the device."""

    def step(self) -> None:
        """Called before each step and after the last one."""

    def forward(self) -> None:
        """Called before the batch is created."""

    def backward(self) -> None:
        """Called after the forward pass."""

    def optimizer(self, counts_on_device: bool) -> None:
        """Called after the last backward pass of a step."""

    def stepped(self, optimizer: Any, counts_on_device: bool) -> None:
        """Called after the optimizer's step."""


def train(job: Job, model: nn.Module, batch: int, steps: int, device: str, watch: Watch) -> None:
    """Train for a few steps. As in a plain script, a tensor lives until its variable is reassigned.

    In the loop `script` this includes the model's output with its logits. The loop `trainer` drops the output before
    the backward pass, as transformers' Trainer does.
    """
    optimizer, counts_on_device = make_optimizer(job, model)
    autocast = job.precision in ("bf16", "fp16")
    for _ in range(steps):
        watch.step()
        for _ in range(job.accumulation):
            watch.forward()
            inputs = _make(job.inputs, batch, device)
            targets = _make(job.targets, batch, device)
            with torch.autocast(device, dtype=DTYPES[job.precision]) if autocast else nullcontext():
                output = _forward(job, model, inputs)
                loss = _loss(job, output, targets)
                if job.loop == "trainer":
                    del output
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
    watch.step()


def _make(specs: Sequence[TensorSpec], batch: int, device: str) -> list[Tensor]:
    # Zeros are valid class indices and token numbers. On fake tensors only the shape matters.
    return [torch.zeros(spec.at(batch), dtype=getattr(torch, spec.dtype), device=device) for spec in specs]


def _loss(job: Job, output: Any, targets: Sequence[Tensor]) -> Tensor:
    if callable(job.loss):
        return _number(job.loss(output, *targets))
    kind = job.loss
    if kind == "auto":
        if isinstance(getattr(output, "loss", None), Tensor):
            return _number(output.loss)
        if hasattr(output, "loss") and not targets:
            raise ConfigurationError(
                f"the model returns a {type(output).__name__} without a loss: add the input from which it computes the "
                "loss, such as --input labels=int64[B,512], or choose --loss mean"
            )
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
