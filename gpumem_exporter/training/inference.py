"""Running a model without training it, and how much memory that took."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import nn

from gpumem_exporter.client.measure.context import memory_context
from gpumem_exporter.client.measure.measured import MemoryUse
from gpumem_exporter.training.calling import autocasting, check_autocast, evaluating

__all__ = ["inference_mode"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def inference_mode(
    model: nn.Module, *, autocast: torch.dtype | None = None, reset_peaks: bool = False
) -> InferenceMode:
    """Run a model for its outputs, in a `with` block or in each call of a function.

        with inference_mode(model) as use:
            outputs = model(batch)
        use.peak_bytes

    It is `torch.inference_mode()` and `model.eval()`, with `torch.autocast` where asked for. Afterwards each part of
    the model has the mode that it had. What the block took of each device is logged as by `client.memory_context`:
    before, after, growth and peak, or that there is no CUDA.

    Its tensors have no part in training, ever: torch refuses to save them for backward. A model that keeps tensors from
    one call to the next (a cache) should be run under `torch.no_grad()` if it trains on afterwards.

    Args:
        model: is in evaluation mode for all threads meanwhile; no other may train it, or be in such a block of it.
        autocast: `torch.bfloat16` or `torch.float16`.
        reset_peaks: let the allocator's peaks begin anew at the block's begin, so that its own is exact.

    Raises:
        ConfigurationError: autocast does not know that dtype.
        TypeError: it decorates a generator or a coroutine, whose body would run after the block; use `with` in it.
    """
    check_autocast(autocast)
    return InferenceMode(model, autocast, reset_peaks)


class InferenceMode(contextlib.ContextDecorator):
    """What `inference_mode` returns. May be entered again, inside itself too; by one thread at a time."""

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
        """Run each call of a function so."""
        later = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
        if any(is_later(function) for is_later in later):
            raise TypeError(f"{function.__qualname__} runs its body later than it is called: use `with` inside of it")
        return super().__call__(function)

    def _recreate_cm(self) -> InferenceMode:
        return InferenceMode(*self._arguments)  # calls may come from several threads
