"""Runs a model for inference, and measures the memory."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import nn

from gpumem_client.phases.measured import MemoryUse, memory_context
from gpumem_toolkit.training.model_runs import autocasting, check_autocast, evaluating

_Function = TypeVar("_Function", bound=Callable[..., Any])


def inference_mode(
    model: nn.Module, *, autocast: torch.dtype | None = None, reset_peaks: bool = False
) -> InferenceMode:
    """Run a model for inference, in a `with` block or in each call of a decorated function.

        with inference_mode(model) as use:
            outputs = model(batch)
        use.peak_bytes

    Enters `torch.inference_mode()`, `model.eval()` and optionally `torch.autocast`, and afterwards restores the mode of
    each part of the model. Logs the memory use of the block as `gpumem_client.memory_context` does. `reset_peaks` makes
    the peak exact. No other thread may train the model or enter a block for it.

    Tensors created in the block cannot be saved for backward. Use `torch.no_grad()` instead for a model that keeps
    tensors from call to call and trains afterwards.

    Raises ConfigurationError if autocast is another dtype than `torch.bfloat16` and `torch.float16`, and TypeError for
    a decorated generator or coroutine, whose body runs after the block.
    """
    check_autocast(autocast)
    return InferenceMode(model, autocast, reset_peaks)


class InferenceMode(contextlib.ContextDecorator):
    """The context manager and decorator of `inference_mode`. Reentrant, but only for one thread at a time."""

    def __init__(self, model: nn.Module, autocast: torch.dtype | None, reset_peaks: bool) -> None:
        self._arguments = model, autocast, reset_peaks
        self._entered: list[contextlib.ExitStack] = []

    def __enter__(self) -> MemoryUse:
        model, autocast, reset_peaks = self._arguments
        with contextlib.ExitStack() as stack:
            name = f"inference of {type(model).__name__}"
            use = stack.enter_context(memory_context(name, reset_peaks=reset_peaks))
            stack.enter_context(evaluating(model))
            stack.enter_context(torch.inference_mode())
            stack.enter_context(autocasting(model, autocast))
            self._entered.append(stack.pop_all())
        return use

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._entered.pop().__exit__(kind, error, traceback)

    def __call__(self, function: _Function) -> _Function:
        """Run each call of a function in the block."""
        deferred = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
        if any(is_deferred(function) for is_deferred in deferred):
            raise TypeError(f"{function.__qualname__} runs its body after the call returns: use `with` inside it")
        return super().__call__(function)

    def _recreate_cm(self) -> InferenceMode:
        return InferenceMode(*self._arguments)  # calls may come from several threads
