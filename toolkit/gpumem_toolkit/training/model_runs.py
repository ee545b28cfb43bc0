"""Calls a model, and measures a run: its time, its results and its peak."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from gpumem_client.phases.measured_block import Measured
from gpumem_client.wire.errors import ConfigurationError


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
    """Reject dtypes that autocast does not support."""
    # Torch only warns and disables autocast.
    if dtype not in (None, torch.bfloat16, torch.float16):
        raise ConfigurationError(f"invalid autocast {dtype}: use torch.bfloat16, torch.float16 or None")


def autocasting(model: nn.Module, dtype: torch.dtype | None) -> AbstractContextManager[object]:
    """Return `torch.autocast` for the model's device; without a dtype, a context that does nothing."""
    if dtype is None:
        return nullcontext()
    tensor = next(itertools.chain(model.parameters(), model.buffers()), None)
    return torch.autocast("cpu" if tensor is None else tensor.device.type, dtype)


def run_seconds(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of one run, including the device's work."""
    synchronize(device)
    started = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - started


def synchronize(device: torch.device) -> None:
    """Wait for a CUDA device; do nothing for another one."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_peak(run: Callable[[], object], device: torch.device) -> int | None:
    """Run once, reset the allocator's peaks for that, and return the peak above the allocated bytes before.

    Returns None without CUDA, where it does not run.
    """
    if device.type != "cuda":
        return None
    with Measured("peak", kept=False, reset_peaks=True) as use:
        run()
    index = torch.cuda.current_device() if device.index is None else device.index
    return next((each.peak_bytes - each.before_bytes for each in use.devices if each.index == index), None)
