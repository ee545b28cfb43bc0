"""How a batch is handed to a model, and a model put into evaluation mode for a while."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from gpumem_exporter.errors import ConfigurationError

__all__ = ["autocasting", "call_model", "check_autocast", "evaluating"]


def call_model(model: nn.Module, batch: Any) -> Any:
    """Call it with a tensor, with positional arguments in a tuple or list, or with keywords in a mapping."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, tuple | list):
        return model(*batch)
    return model(batch)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """In evaluation mode for as long as it is entered; then each part has the mode that it had."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, training in modes:
            module.training = training


def check_autocast(dtype: torch.dtype | None) -> None:
    """Torch itself warns of another dtype, and computes as if there were none.

    Raises:
        ConfigurationError: autocast does not know it.
    """
    if dtype not in (None, torch.bfloat16, torch.float16):
        raise ConfigurationError(f"autocast {dtype}; it computes in torch.bfloat16 or torch.float16")


def autocasting(model: nn.Module, dtype: torch.dtype | None) -> AbstractContextManager[object]:
    """`torch.autocast` on the model's device; nothing where no dtype is asked for."""
    if dtype is None:
        return nullcontext()
    tensor = next(itertools.chain(model.parameters(), model.buffers()), None)
    return torch.autocast("cpu" if tensor is None else tensor.device.type, dtype)
