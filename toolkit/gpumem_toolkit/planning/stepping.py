"""The training steps of a job, on fake tensors or on a device, and its optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gpumem_client.wire.errors import ConfigurationError
from gpumem_toolkit.planning.fake_model import DTYPES
from gpumem_toolkit.planning.job import Job, TensorSpec
from gpumem_toolkit.planning.sources import LightningStep

# The values that share a scale in bitsandbytes' 8-bit states. Smaller parameters than `_LEAST_8BIT` keep fp32.
_BLOCK = 256
_LEAST_8BIT = 4096
_FP16_SCALE = 65536.0  # the first scale of torch.amp.GradScaler


def make_optimizer(job: Job, model: nn.Module) -> tuple[Any, bool]:
    """Return the optimizer or None, and whether its step counts are on the device."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if isinstance(model, LightningStep):
        made = model.make_optimizer()
    elif job.optimizer == "none" or not parameters:
        return None, False
    elif callable(job.optimizer):
        made = job.optimizer(parameters, **job.optimizer_options)
    else:
        options = {**({"lr": 1e-3} if job.optimizer == "sgd" else {}), **job.optimizer_options}
        try:
            made = _MAKERS[job.optimizer](parameters, **options)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"optimizer {job.optimizer}: {error}") from error
    if made is None:  # a LightningModule without an optimizer
        return None, False
    counts_on_device = any(group.get("fused") or group.get("capturable") for group in made.param_groups)
    for group in made.param_groups:
        if "capturable" in group:
            group["capturable"] = False  # refused on the CPU; apart from the step counts it changes only scalars
        # CUDA parameters get the foreach implementation by default; CPU parameters, which these are, do not.
        if group.get("foreach", False) is None and not group.get("fused") and type(made) is not torch.optim.Adafactor:
            group["foreach"] = True
    return made, counts_on_device


class _Adam8bit(torch.optim.Optimizer):
    """Allocates the states of bitsandbytes' 8-bit Adam: two bytes per value, and two fp32 scales per block.

    Later steps update them in place, by one kernel without temporary memory.
    """

    def __init__(self, parameters: Any, **_: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002 - as in Optimizer
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and not self.state[parameter]:
                    values = parameter.numel()
                    dtype = torch.float32 if values < _LEAST_8BIT else torch.uint8
                    states = [torch.zeros_like(parameter, dtype=dtype) for _ in range(2)]
                    if values >= _LEAST_8BIT:
                        states += [torch.zeros(-(-values // _BLOCK), device=parameter.device) for _ in range(2)]
                    self.state[parameter] = {str(index): tensor for index, tensor in enumerate(states)}


_MAKERS: dict[str, Callable[..., Any]] = {
    **{name.lower(): made for name, made in vars(torch.optim).items() if isinstance(made, type)},
    **dict.fromkeys(("adam8bit", "adamw8bit"), _Adam8bit),
}


def train(job: Job, model: nn.Module, optimizer: Any, batch: int, steps: int, device: str) -> Iterator[str]:
    """Train for a few steps. As in a plain script, a tensor lives until its variable is reassigned.

    In the loop `script` this includes the model's output with its logits. The loop `trainer` drops the output before
    the backward pass, as transformers' Trainer does. The loop `lightning` also keeps the gradients during the next
    forward pass. Yields `step` before each step and after the last one, `forward` before the batch is created,
    `backward` after the forward pass, `optimizer` after the last backward pass of a step, and `stepped` after the
    optimizer's step.
    """
    autocast = job.precision in ("bf16", "fp16")
    for _ in range(steps):
        yield "step"
        for number in range(job.accumulation):
            yield "forward"
            inputs = _make(job.inputs, batch, device)
            targets = _make(job.targets, batch, device)
            with torch.autocast(device, dtype=DTYPES[job.precision]) if autocast else nullcontext():
                output = _forward(job, model, inputs)
                loss = _loss(job, output, targets)
                if job.loop != "script":
                    del output
                if job.accumulation > 1:
                    loss = loss / job.accumulation
            yield "backward"
            if job.loop == "lightning" and not number:
                model.zero_grad()
            (loss * _FP16_SCALE if job.precision == "fp16" else loss).backward()
        yield "optimizer"
        if optimizer is None:
            model.zero_grad()
            continue
        optimizer.step()
        yield "stepped"
        if job.loop != "lightning":
            optimizer.zero_grad()
    yield "step"


def _make(specs: Sequence[TensorSpec], batch: int, device: str) -> list[Tensor]:
    # Zeros are valid class indices and token numbers. On fake tensors only the shape matters.
    return [torch.zeros(spec.at(batch), dtype=getattr(torch, spec.dtype), device=device) for spec in specs]


def _forward(job: Job, model: nn.Module, inputs: Sequence[Tensor]) -> Any:
    pure = DTYPES[job.precision] if job.precision.startswith("pure-") else None
    cast = [each.to(pure) if pure and each.is_floating_point() else each for each in inputs]
    names = [spec.name for spec in job.inputs]
    named = {name: each for name, each in zip(names, cast, strict=True) if name}
    return model(*(each for name, each in zip(names, cast, strict=True) if not name), **named)


def _loss(job: Job, output: Any, targets: Sequence[Tensor]) -> Tensor:
    loss = job.loss(output, *targets) if callable(job.loss) else _loss_by_name(job.loss, output, targets)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise ConfigurationError("the loss is not a tensor with one element")
    return loss


def _loss_by_name(kind: str, output: Any, targets: Sequence[Tensor]) -> Any:
    if kind == "auto":
        if isinstance(getattr(output, "loss", None), Tensor):
            return output.loss
        if hasattr(output, "loss") and not targets:
            raise ConfigurationError(
                f"the model returns a {type(output).__name__} without a loss: add the input from which it computes the "
                "loss, such as --input labels=int64[B,512], or choose --loss mean"
            )
        if targets:
            kind = "mse" if targets[0].is_floating_point() else "cross_entropy"
        else:
            kind = "output" if isinstance(output, Tensor) and output.numel() == 1 else "mean"
    if kind == "output":
        return output
    logits = next((t for t in (getattr(output, "logits", None), output) if isinstance(t, Tensor)), None)
    if logits is None:
        raise ConfigurationError(f"the model returns {type(output).__name__}, not a tensor: choose a loss for it")
    if kind in ("mean", "sum"):
        return logits.mean() if kind == "mean" else logits.sum()
    if not targets:
        raise ConfigurationError(f"loss {kind} needs a target")
    if kind == "cross_entropy":
        return functional.cross_entropy(logits, targets[0])
    return functional.mse_loss(logits, targets[0].to(logits.dtype))
