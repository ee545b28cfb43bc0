"""One training step, forward and backward: its results, and how its changes are undone."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from gpumem_client.wire.errors import ConfigurationError
from gpumem_toolkit.training.model_runs import autocasting, call_model


@dataclass(frozen=True, slots=True)
class Step:
    """A forward pass and a backward pass. `compare_checkpointing` describes the attributes."""

    model: nn.Module
    batch: Any
    loss: Callable[[Any], Any] | None
    autocast: torch.dtype | None

    @property
    def device(self) -> torch.device:
        """The device of the model's first parameter. Raises ConfigurationError if the model has none."""
        parameter = next(self.model.parameters(), None)
        if parameter is None:
            raise ConfigurationError(f"{type(self.model).__name__} has no parameters: there is nothing to train")
        return parameter.device

    def forward(self) -> Tensor:
        """Run the forward pass and return the loss, which must have one element and require a gradient."""
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

    Yields a function that undoes the changes before each run. Within the context a model in evaluation mode is in
    training mode; a model in training mode keeps the modes of its parts. Raises ConfigurationError if a run would
    change the parameters, or if the model cannot be trained.
    """
    _check(step)
    modes = [(module, module.training) for module in step.model.modules()]
    gradients = [(leaf, leaf.grad) for leaf in step.leaves()]
    restore_buffers = _buffers(step.model)
    restore_random_numbers = _random_numbers({leaf.device.index for leaf in step.leaves() if leaf.is_cuda})

    def restore() -> None:
        restore_random_numbers()
        for leaf, _ in gradients:
            leaf.grad = None
        restore_buffers()

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
        if parameter.is_meta:
            raise ConfigurationError(f"{name} is on the meta device and has no values")
        if parameter._post_accumulate_grad_hooks:
            raise ConfigurationError(
                f"{name} has a hook that runs after its gradient is accumulated, such as an optimizer step in backward:"
                " remove the hook first"
            )


def _random_numbers(devices: Iterable[int]) -> Callable[[], None]:
    """Return a function that restores the generators of torch, Python, and numpy if it is imported."""
    host, python = torch.get_rng_state(), random.getstate()
    states = {device: torch.cuda.get_rng_state(device) for device in devices}
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy is not None else None

    def restore() -> None:
        torch.set_rng_state(host)
        for device, state in states.items():
            torch.cuda.set_rng_state(state, device)
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(numpy_state)

    return restore


def _buffers(model: nn.Module) -> Callable[[], None]:
    """Return a function that restores the buffers of all modules, also those that a module has not created yet."""
    buffers = [(module, name, buffer) for module in model.modules() for name, buffer in module._buffers.items()]
    values = [None if buffer is None else buffer.detach().to("cpu", copy=True) for _, _, buffer in buffers]

    def restore() -> None:
        for (module, name, buffer), value in zip(buffers, values, strict=True):
            if getattr(module, name) is not buffer:
                setattr(module, name, buffer)
            # The version counter does not help: batch normalization does not increment it.
            if buffer is not None and value is not None and not torch.equal(buffer.detach().cpu(), value):
                with torch.no_grad():
                    buffer.copy_(value)

    return restore


class Results:
    """The results of the run of a step that has just ended with a loss, in the host's memory."""

    def __init__(self, step: Step, loss: Tensor) -> None:
        self._tensors = dict(_results(step, loss))

    def differing(self, step: Step, loss: Tensor) -> tuple[str, ...]:
        """Return the names of the results of the run that has just ended that are neither equal to the bit nor NaN."""
        return tuple(name for name, tensor in _results(step, loss) if not _same(self._tensors[name], tensor))


def _results(step: Step, loss: Tensor) -> Iterator[tuple[str, Tensor | None]]:
    yield "loss", loss.detach().cpu()
    for name, parameter in step.model.named_parameters():
        yield f"gradient of {name}", _on_host(parameter.grad)
    for name, buffer in step.model.named_buffers():
        yield f"buffer {name}", _on_host(buffer)


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None or one.shape != other.shape:
        return one is other
    return bool(torch.isclose(one, other, rtol=0, atol=0, equal_nan=True).all())


def _on_host(tensor: Tensor | None) -> Tensor | None:
    if tensor is None:
        return None
    local = getattr(tensor, "to_local", None)  # the local part of a DTensor
    whole = (tensor if local is None else local()).detach().to("cpu", copy=True)
    return whole if whole.layout is torch.strided else whole.to_dense()
