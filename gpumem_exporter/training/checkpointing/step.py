"""One training step, forward and backward. Its changes are undone afterwards."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from gpumem_exporter.errors import ConfigurationError
from gpumem_exporter.training.calling import autocasting, call_model

__all__ = ["Step", "left_as_it_was"]


@dataclass(frozen=True, slots=True)
class Step:
    """A forward pass and a backward pass.

    Attributes:
        model: the model to train.
        batch: a tensor, positional arguments in a tuple or list, or keyword arguments in a mapping.
        loss: returns the loss of the model's output; None means the output's `loss`, the output if it has one element,
            else its mean.
        autocast: the dtype of the forward pass; None disables autocast.
    """

    model: nn.Module
    batch: Any
    loss: Callable[[Any], Any] | None
    autocast: torch.dtype | None

    def on(self, model: nn.Module, batch: Any) -> Step:
        """Return the step with another model and batch."""
        return replace(self, model=model, batch=batch)

    @property
    def device(self) -> torch.device:
        """The device of the model's first parameter.

        Raises:
            ConfigurationError: the model has no parameters.
        """
        parameter = next(self.model.parameters(), None)
        if parameter is None:
            raise ConfigurationError(f"{type(self.model).__name__} has no parameters: there is nothing to train")
        return parameter.device

    def forward(self) -> Tensor:
        """Run the forward pass and return the loss.

        Raises:
            ConfigurationError: the loss is not a tensor with one element that requires a gradient.
        """
        with autocasting(self.model, self.autocast):
            value = (self.loss or _loss)(call_model(self.model, self.batch))
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise ConfigurationError(
                f"the loss is {_describe(value)}, not a tensor with one element: use loss=lambda output: ..."
            )
        if not value.requires_grad:
            raise ConfigurationError("the loss depends on no parameter that requires a gradient")
        return value

    def leaves(self) -> list[Tensor]:
        """Return the tensors that backward may write gradients to."""
        tensors = [leaf for leaf in tree_leaves(self.batch) if isinstance(leaf, Tensor)]
        return [*self.model.parameters(), *(tensor for tensor in tensors if tensor.requires_grad and tensor.is_leaf)]


def _loss(output: Any) -> Any:
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    logits = next((each for each in (getattr(output, "logits", None), output) if isinstance(each, Tensor)), None)
    if logits is None:
        return output
    return logits if logits.numel() == 1 else logits.float().mean()


def _describe(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


@contextmanager
def left_as_it_was(step: Step) -> Iterator[Callable[[], None]]:
    """Undo what runs of the step change: gradients, buffers, random number generators and modes.

    Yields a function that undoes the changes before each run, so that all runs start from the same state. Within the
    context a model in evaluation mode is in training mode; a model in training mode keeps the modes of its parts.

    Raises:
        ConfigurationError: a run would change the parameters, or the model cannot be trained.
    """
    _check(step)
    modes = [(module, module.training) for module in step.model.modules()]
    gradients = [(leaf, leaf.grad) for leaf in step.leaves()]
    buffers = list(_buffers(step.model))
    devices = sorted({leaf.device.index for leaf in step.leaves() if leaf.is_cuda})
    numbers = _RandomNumbers.now(devices)

    def restore() -> None:
        numbers.restore()
        for leaf, _ in gradients:
            leaf.grad = None
        for buffer in buffers:
            buffer.restore()

    try:
        if not step.model.training:
            step.model.train()
        with torch.enable_grad():
            yield restore
    finally:
        restore()
        for leaf, gradient in gradients:
            leaf.grad = gradient
        for module, training in modes:
            module.training = training


def _check(step: Step) -> None:
    if torch.is_inference_mode_enabled():
        raise ConfigurationError("a model cannot be trained in torch.inference_mode: call this function outside of it")
    if any(isinstance(leaf, Tensor) and leaf.grad_fn is not None for leaf in tree_leaves(step.batch)):
        raise ConfigurationError(
            "the batch has a gradient function, so backward would continue into its computation: pass a detached batch"
        )
    views = any(getattr(module, "gradient_as_bucket_view", False) for module in step.model.modules())
    for name, parameter in step.model.named_parameters():
        if views and parameter.grad is not None:
            raise ConfigurationError(
                f"the gradient of {name} is in DistributedDataParallel's bucket, which each run overwrites:"
                " call this function after optimizer.zero_grad()"
            )
        if is_lazy(parameter):
            raise ConfigurationError(f"{name} is lazy: run a forward pass first")
        if parameter.is_meta:
            raise ConfigurationError(
                f"{name} is on the meta device and has no values: move the model to another device"
            )
        if parameter._post_accumulate_grad_hooks:
            raise ConfigurationError(
                f"{name} has a hook that runs after its gradient is accumulated, such as an optimizer step in backward:"
                " remove the hook first"
            )


@dataclass(frozen=True, slots=True)
class _RandomNumbers:
    """The states of the generators of torch, Python, and numpy if it is imported."""

    host: Tensor
    devices: Mapping[int, Tensor]
    python: Any
    numpy: Any

    @classmethod
    def now(cls, devices: Iterable[int]) -> _RandomNumbers:
        numpy = sys.modules.get("numpy")
        return cls(
            torch.get_rng_state(),
            {device: torch.cuda.get_rng_state(device) for device in devices},
            random.getstate(),
            numpy.random.get_state() if numpy is not None else None,
        )

    def restore(self) -> None:
        torch.set_rng_state(self.host)
        for device, state in self.devices.items():
            torch.cuda.set_rng_state(state, device)
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)


@dataclass(frozen=True, slots=True)
class _Buffer:
    """One buffer and a copy of its values on the CPU; None if the module has not created it."""

    module: nn.Module
    name: str
    tensor: Tensor | None
    values: Tensor | None

    def restore(self) -> None:
        if getattr(self.module, self.name) is not self.tensor:
            setattr(self.module, self.name, self.tensor)
        # The version counter does not help: batch normalization does not increment it.
        if (
            self.tensor is not None
            and self.values is not None
            and not torch.equal(self.tensor.detach().cpu(), self.values)
        ):
            with torch.no_grad():
                self.tensor.copy_(self.values)


def _buffers(model: nn.Module) -> Iterator[_Buffer]:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            yield _Buffer(module, name, buffer, None if buffer is None else buffer.detach().to("cpu", copy=True))
