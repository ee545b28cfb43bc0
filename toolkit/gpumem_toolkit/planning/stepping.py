"""The training steps of a job, on fake tensors or on a device, and its optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gpumem_client.wire.errors import ConfigurationError
from gpumem_toolkit.planning.job import Job, TensorSpec
from gpumem_toolkit.planning.model import DTYPES
from gpumem_toolkit.planning.sources import LightningStep

# The values that share a scale in bitsandbytes' 8-bit states. Smaller parameters than `_LEAST_8BIT` keep fp32.
_BLOCK = 256
_LEAST_8BIT = 4096


def _make_optimizer(job: Job, model: nn.Module) -> tuple[Any, bool]:
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


class _Described(torch.optim.Optimizer):
    """Allocates states in the first step. Later steps update them in place, by one kernel without temporary memory."""

    def __init__(self, parameters: Any, make_state: Callable[[Tensor], list[Tensor]]) -> None:
        super().__init__(parameters, {})
        self._make_state = make_state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002 - as in Optimizer
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and not self.state[parameter]:
                    made = self._make_state(parameter)
                    self.state[parameter] = {str(index): tensor for index, tensor in enumerate(made)}


def _adam_8bit(parameters: Any, **_: Any) -> _Described:
    """The states of bitsandbytes' 8-bit Adam: two of one byte per value, with one fp32 scale per block."""

    def states(parameter: Tensor) -> list[Tensor]:
        device, values = parameter.device, parameter.numel()
        if values < _LEAST_8BIT:
            return [torch.zeros_like(parameter, dtype=torch.float32) for _ in range(2)]
        blocks = -(-values // _BLOCK)
        bytes_ = [torch.zeros_like(parameter, dtype=torch.uint8) for _ in range(2)]
        return bytes_ + [torch.zeros(blocks, device=device) for _ in range(2)]

    return _Described(parameters, states)


def _described(parameters: Any, **options: Any) -> _Described:
    """States of `bytes` bytes for each value of a parameter."""
    size = options.pop("bytes", None)
    if options or not isinstance(size, int | float) or size < 0:
        raise ValueError("give the bytes of state per trainable parameter alone: --optimizer-option bytes=2.06")
    return _Described(parameters, lambda p: [torch.zeros(int(p.numel() * size), dtype=torch.uint8, device=p.device)])


def _lbfgs(parameters: Any, **options: Any) -> _Described:
    """The states of L-BFGS after `history_size` steps."""
    # L-BFGS keeps a vector or not by its values, which a plan does not have: so the plan has all of them.
    history = torch.optim.LBFGS(parameters, **options).param_groups[0]["history_size"]
    vectors = 2 * history + 3  # directions, steps, the current direction, the previous gradient, the flat gradient
    return _Described(parameters, lambda p: [torch.zeros_like(p) for _ in range(vectors)])


_MAKERS: dict[str, Callable[..., Any]] = {
    **{
        made.__name__.lower(): made
        for made in vars(torch.optim).values()
        if isinstance(made, type) and issubclass(made, torch.optim.Optimizer)
    },
    "lbfgs": _lbfgs,
    "adam8bit": _adam_8bit,
    "adamw8bit": _adam_8bit,
    "described": _described,
}


_FP16_SCALE = 65536.0  # the first scale of torch.amp.GradScaler


class Event(Enum):
    """A point of a training step."""

    STEP = "before each step, and after the last one"
    FORWARD = "before the batch is created"
    BACKWARD = "after the forward pass"
    OPTIMIZER = "after the last backward pass of a step"
    STEPPED = "after the optimizer's step"


def train(
    job: Job, model: nn.Module, batch: int, steps: int, device: str
) -> Iterator[tuple[Event, torch.optim.Optimizer | None, bool]]:
    """Train for a few steps. As in a plain script, a tensor lives until its variable is reassigned.

    In the loop `script` this includes the model's output with its logits. The loop `trainer` drops the output before
    the backward pass, as transformers' Trainer does. The loop `lightning` also keeps the gradients during the next
    forward pass. Yields each event with the optimizer, and whether the optimizer's
    step counts are on the device.
    """
    optimizer, counts_on_device = _make_optimizer(job, model)
    autocast = job.precision in ("bf16", "fp16")
    for _ in range(steps):
        yield Event.STEP, optimizer, counts_on_device
        for number in range(job.accumulation):
            yield Event.FORWARD, optimizer, counts_on_device
            inputs = _make(job.inputs, batch, device)
            targets = _make(job.targets, batch, device)
            with torch.autocast(device, dtype=DTYPES[job.precision]) if autocast else nullcontext():
                output = _forward(job, model, inputs)
                loss = _loss(job, output, targets)
                if job.loop != "script":
                    del output
                if job.accumulation > 1:
                    loss = loss / job.accumulation
            yield Event.BACKWARD, optimizer, counts_on_device
            if job.loop == "lightning" and not number:
                model.zero_grad()
            (loss * _FP16_SCALE if job.precision == "fp16" else loss).backward()
        yield Event.OPTIMIZER, optimizer, counts_on_device
        if optimizer is None:
            model.zero_grad()
            continue
        optimizer.step()
        yield Event.STEPPED, optimizer, counts_on_device
        if job.loop != "lightning":
            optimizer.zero_grad()
    yield Event.STEP, optimizer, counts_on_device


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
