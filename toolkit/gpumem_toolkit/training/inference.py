"""Runs a model for inference, and measures the memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from gpumem_client.phases.measured_block import MemoryUse, memory_context
from gpumem_toolkit.training.model_runs import autocasting, check_autocast, evaluating


def inference_mode(model: nn.Module, *, autocast: torch.dtype | None = None, reset_peaks: bool = False) -> Any:
    """Run a model for inference, in a `with` block or in each call of a decorated function.

        with inference_mode(model) as use:
            outputs = model(batch)
        use.peak_bytes

    Enters `torch.inference_mode()`, `model.eval()` and optionally `torch.autocast`, and afterwards restores the mode of
    each part of the model. Logs the memory use of the block as `gpumem_client.memory_context` does. `reset_peaks` makes
    the peak exact. No other thread may train the model or enter a block for it.

    Tensors created in the block cannot be saved for backward. Use `torch.no_grad()` instead for a model that keeps
    tensors from call to call and trains afterwards. Raises ConfigurationError if autocast is another dtype than
    `torch.bfloat16` and `torch.float16`. A generator or coroutine runs its body after the call: use `with` inside it.
    """
    check_autocast(autocast)
    return _inference(model, autocast, reset_peaks)


@contextmanager
def _inference(model: nn.Module, autocast: torch.dtype | None, reset_peaks: bool) -> Iterator[MemoryUse]:
    measured: AbstractContextManager[MemoryUse] = memory_context(
        f"inference of {type(model).__name__}", reset_peaks=reset_peaks
    )
    with measured as use, evaluating(model), torch.inference_mode(), autocasting(model, autocast):
        yield use
