"""Builds the job's model from fake tensors, and applies the job's options to it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from gpumem_exporter.errors import ConfigurationError
from gpumem_exporter.training.checkpointing.blocks import recomputed
from gpumem_exporter.training.planning.job import Job

__all__ = ["DTYPES", "checkpoint_blocks", "freeze", "in_moving_order", "make_fake_mode", "make_model"]

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "pure-bf16": torch.bfloat16, "pure-fp16": torch.float16}


def make_fake_mode() -> FakeTensorMode:
    """Return a mode in which tensors take no memory."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    # A deep copy of a fake tensor (nn.TransformerEncoder copies its layer) must keep the same mode.
    mode.__deepcopy__ = lambda _: mode  # type: ignore[attr-defined]
    return mode


def make_model(job: Job, mode: FakeTensorMode) -> nn.Module:
    """Build the module in training mode. `mode` must not be active.

    Raises:
        ConfigurationError: the factory does not return a module.
    """
    try:
        with mode:
            model = job.make_model()
    except DataDependentOutputException:
        # The factory reads values, for example with `.tolist()`: build the model in memory, then replace its tensors.
        model = job.make_model()
        if isinstance(model, nn.Module):
            _replace(model, mode.from_tensor)
    if not isinstance(model, nn.Module):
        raise ConfigurationError(f"the model factory returned {type(model).__name__}, not a torch.nn.Module")
    with mode:
        if job.precision.startswith("pure-"):
            _cast(model, DTYPES[job.precision])
        if job.frozen:
            freeze(model)
        if job.checkpointing:
            checkpoint_blocks(model)
    return model.train()


def in_moving_order(module: nn.Module) -> list[nn.Module]:
    """Return the modules in the order in which `Module.to` moves their tensors: children first."""
    return [m for child in module.children() for m in in_moving_order(child)] + [module]


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast a model. `Module.to(dtype)` refuses to swap fake parameters with other references."""
    _replace(model, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def _replace(model: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Replace every parameter and buffer; tied ones stay tied."""
    made: dict[int, Tensor] = {}
    kept: list[Tensor] = []  # keeps ids from being reused
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    kept.append(parameter)
                    made[id(parameter)] = nn.Parameter(change(parameter.detach()), parameter.requires_grad)
                module._parameters[name] = made[id(parameter)]  # type: ignore[assignment]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                kept.append(buffer)
                module._buffers[name] = made.setdefault(id(buffer), change(buffer))


def freeze(model: nn.Module) -> None:
    """Freeze all parameters except those of the last module that has parameters of its own."""
    last = [m for m in model.modules() if any(True for _ in m.parameters(recurse=False))][-1]
    kept = {id(p) for p in last.parameters(recurse=False)}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in kept)


def checkpoint_blocks(model: nn.Module) -> None:
    """Checkpoint each block of the model's longest list of modules with parameters."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList | nn.Sequential)]
    blocks = max(([c for c in m.children() if any(True for _ in c.parameters())] for m in lists), key=len, default=[])
    if not blocks:
        raise ConfigurationError("the model has no nn.ModuleList and no nn.Sequential of modules to recompute")
    for block in blocks:
        block.forward = recomputed(block.forward)
