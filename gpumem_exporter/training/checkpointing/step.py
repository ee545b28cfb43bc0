"""One training step, forward and backward, that leaves nothing behind: gradients, buffers, random numbers, modes."""

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
        model: what is trained.
        batch: what it is called with: a tensor, positional arguments in a tuple or list, or keywords in a mapping.
        loss: of the model's output; None: the output's own `loss`, the output where it is one number, else its mean.
        autocast: what the forward pass computes in; None: as it comes.
    """

    model: nn.Module
    batch: Any
    loss: Callable[[Any], Any] | None
    autocast: torch.dtype | None

    def on(self, model: nn.Module, batch: Any) -> Step:
        """The same of another model."""
        return replace(self, model=model, batch=batch)

    @property
    def device(self) -> torch.device:
        """Where the model's first parameter is.

        Raises:
            ConfigurationError: it has none.
        """
        parameter = next(self.model.parameters(), None)
        if parameter is None:
            raise ConfigurationError(f"{type(self.model).__name__} has no parameters: there is nothing to train")
        return parameter.device

    def forward(self) -> Tensor:
        """The loss.

        Raises:
            ConfigurationError: it is none.
        """
        with autocasting(self.model, self.autocast):
            value = (self.loss or _loss)(call_model(self.model, self.batch))
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise ConfigurationError(
                f"the loss is {_told(value)}, no tensor of one number: give one with loss=lambda output: ..."
            )
        if not value.requires_grad:
            raise ConfigurationError("the loss depends on no parameter that is trained: there is nothing to measure")
        return value

    def leaves(self) -> list[Tensor]:
        """What backward may write gradients to."""
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


def _told(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


@contextmanager
def left_as_it_was(step: Step) -> Iterator[Callable[[], None]]:
    """The step may be run meanwhile; `with … as renew`: call that before each run, so that they all start alike.

    A model in evaluation mode trains meanwhile; one in training mode keeps the modes of its parts.

    Raises:
        ConfigurationError: a run would change the parameters, or the model cannot be trained here.
    """
    _check(step)
    modes = [(module, module.training) for module in step.model.modules()]
    gradients = [(leaf, leaf.grad) for leaf in step.leaves()]
    buffers = list(_buffers(step.model))
    devices = sorted({leaf.device.index for leaf in step.leaves() if leaf.is_cuda})
    numbers = _RandomNumbers.now(devices)

    def renew() -> None:
        numbers.restore()
        for leaf, _ in gradients:
            leaf.grad = None
        for buffer in buffers:
            buffer.restore()

    try:
        if not step.model.training:
            step.model.train()
        with torch.enable_grad():
            yield renew
    finally:
        renew()
        for leaf, gradient in gradients:
            leaf.grad = gradient
        for module, training in modes:
            module.training = training


def _check(step: Step) -> None:
    if torch.is_inference_mode_enabled():
        raise ConfigurationError("nothing can be trained in torch.inference_mode: call it outside")
    if any(isinstance(leaf, Tensor) and leaf.grad_fn is not None for leaf in tree_leaves(step.batch)):
        raise ConfigurationError(
            "the batch was computed from something that is trained, and each measured step would go back into that:"
            " give it detached"
        )
    views = any(getattr(module, "gradient_as_bucket_view", False) for module in step.model.modules())
    for name, parameter in step.model.named_parameters():
        if views and parameter.grad is not None:
            raise ConfigurationError(
                f"{name} has a gradient that lies in DistributedDataParallel's bucket, into which each step writes:"
                " call it after optimizer.zero_grad()"
            )
        if is_lazy(parameter):
            raise ConfigurationError(f"{name} is made in the first forward pass: run one before")
        if parameter.is_meta:
            raise ConfigurationError(f"{name} is on the meta device: it has no values; move the model to a device")
        if parameter._post_accumulate_grad_hooks:
            raise ConfigurationError(
                f"a hook runs as soon as {name} has its gradient (an optimizer that steps in backward?): it would run"
                " in each measured step; take it off first"
            )


@dataclass(frozen=True, slots=True)
class _RandomNumbers:
    """Where the generators of torch, of Python, and of numpy where the program uses it, were."""

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
    """One buffer, as it was, None where it is yet to be made; its copy is in the host's memory."""

    module: nn.Module
    name: str
    tensor: Tensor | None
    values: Tensor | None

    def restore(self) -> None:
        if getattr(self.module, self.name) is not self.tensor:
            setattr(self.module, self.name, self.tensor)
        # Not by its version: batch normalization writes without counting it up.
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
