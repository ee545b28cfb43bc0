"""Calls a model with a batch, in evaluation mode or under autocast."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from gpumem_client.wire.errors import ConfigurationError

__all__ = ["autocasting", "call_model", "check_autocast", "evaluating"]


def call_model(model: nn.Module, batch: Any) -> Any:
    """Call a model with a tensor, positional arguments in a tuple or list, or keyword arguments in a mapping."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, tuple | list):
        return model(*batch)
    return model(batch)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode within the block, and restore the mode of each part."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, training in modes:
            module.training = training


def check_autocast(dtype: torch.dtype | None) -> None:
    """Reject dtypes that autocast does not support; torch only warns and disables autocast.

    Raises:
        ConfigurationError: the dtype is not None, torch.bfloat16 or torch.float16.
    """
    if dtype not in (None, torch.bfloat16, torch.float16):
        raise ConfigurationError(f"invalid autocast {dtype}: use torch.bfloat16, torch.float16 or None")


def autocasting(model: nn.Module, dtype: torch.dtype | None) -> AbstractContextManager[object]:
    """Return `torch.autocast` for the model's device; without a dtype, a context that does nothing."""
    if dtype is None:
        return nullcontext()
    tensor = next(itertools.chain(model.parameters(), model.buffers()), None)
    return torch.autocast("cpu" if tensor is None else tensor.device.type, dtype)
