"""Accumulates the gradients of micro batches into the gradient of one large batch."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from gpumem_client.wire.errors import ConfigurationError
from gpumem_toolkit.training.model_runs import autocasting, check_autocast
from gpumem_toolkit.training.ranks import Ranks

_Batch = TypeVar("_Batch")


class GradientAccumulator:
    """Trains with an effective batch that does not fit, by accumulating the gradients of micro batches.

        accumulator = gpumem_toolkit.GradientAccumulator(
            model, optimizer, effective_batch=512, micro_batch=32, autocast=torch.bfloat16, clip_norm=1.0
        )
        for x, y in accumulator.batches(loader):
            with accumulator.forward():
                loss = loss_function(model(x), y)
            accumulator.backward(loss, samples=len(x))
            if accumulator.step():
                scheduler.step()

    The micro batches between two steps are a window. If each loss is a mean over its samples, the gradient of the step
    is the mean over all samples of the window, also for a short last micro batch or window. BatchNorm still sees micro
    batches. Gradients are summed in the dtype of their parameters.

    It trains one process: trainers, and `accelerate.Accelerator.accumulate`, accumulate over ranks. Not thread-safe.
    Raises ConfigurationError if an argument is invalid, or if the model is wrapped for several ranks.

    Attributes:
        accumulation_steps: micro batches in a full window.
        scaler: the gradient scaler for float16; save its `state_dict` in checkpoints. None without a scaler.
        steps: number of optimizer steps.
        skipped_steps: windows that were dropped because the scaler found infinite gradients.
        gradient_norm: the norm of the last window before clipping, as a tensor on the device. None without clipping.

    Args:
        model: the module that the forward pass calls, wrapped or not.
        optimizer: a `torch.optim.Optimizer` whose `step` needs no closure.
        effective_batch: samples in one optimizer step.
        micro_batch: samples in one forward and backward pass.
        autocast: the dtype of the forward pass under autocast: `torch.bfloat16` or `torch.float16`.
        scaler: the gradient scaler for float16. Default: `torch.amp.GradScaler`.
        clip_norm: the largest norm of the gradient.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        *,
        effective_batch: int,
        micro_batch: int,
        autocast: Any = None,
        scaler: Any = None,
        clip_norm: float | None = None,
    ) -> None:
        wrapped = any(hasattr(model, name) for name in ("set_requires_gradient_sync", "no_sync"))
        if wrapped and Ranks.of(getattr(model, "process_group", None)).size > 1:
            raise ConfigurationError(
                "the model trains on several ranks, and GradientAccumulator on one: use"
                " accelerate.Accelerator.accumulate, or the trainer's own accumulation"
            )
        self.accumulation_steps = _accumulation_steps(effective_batch, micro_batch)
        check_autocast(autocast)
        if clip_norm is not None and not clip_norm > 0:
            raise ConfigurationError(f"invalid clip norm {clip_norm}: it must be above 0")
        self._model, self._optimizer, self._autocast, self._clip_norm = model, optimizer, autocast, clip_norm
        if scaler is None and autocast is torch.float16:
            scaler = torch.amp.GradScaler(next(model.parameters()).device.type)
        self.scaler = scaler
        self._full_window = self.accumulation_steps * int(micro_batch)
        self.steps = self.skipped_steps = 0
        self.gradient_norm: Any = None
        self._exhausted = False  # the loader has returned its last batch
        self._sizes: list[float] = []  # samples of the micro batches in this window
        self._complete = False

    def batches(self, loader: Iterable[_Batch]) -> Iterator[_Batch]:
        """Yield the loader's batches, and end the last window of an epoch with the last batch. Loads one batch ahead.

        Drops all gradients at the start, including an unfinished window of an earlier loop.
        """
        # Only the batch after it shows that a batch is not the last one, and the last one ends its window.
        self._drop_window()
        ahead: deque[_Batch] = deque()  # keeps no reference to batches that were yielded
        try:
            for batch in loader:
                ahead.append(batch)
                del batch
                if len(ahead) == 2:
                    yield ahead.popleft()
            self._exhausted = True
            if ahead:
                yield ahead.popleft()
            self._complete = bool(self._sizes)  # if the caller skipped the last batch
        finally:
            self._exhausted = False

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Run the forward pass of a micro batch and its loss in this block, but not the backward pass.

        Raises RuntimeError if the window is complete and `step` was not called.
        """
        if self._complete:
            raise RuntimeError(
                f"the window of {len(self._sizes)} micro batches is complete: call step() before the next forward()"
            )
        with autocasting(self._model, self._autocast):
            yield

    def backward(self, loss: Any, *, samples: float) -> None:
        """Add the gradient of a micro batch's loss to the window. An error, such as out of memory, drops the window.

        The loss is a mean over `samples` samples; or tokens, if the batch sizes count tokens. Raises ValueError if
        samples is not above 0.
        """
        if not samples > 0:
            raise ValueError(f"invalid number of samples: a mean over {samples} samples; it must be above 0")
        # A share of a full window gives float16 gradients the magnitude of a full mean. `step` corrects for the real
        # size of the window.
        share = loss * (samples / self._full_window)
        try:
            (share if self.scaler is None else self.scaler.scale(share)).backward()
        except BaseException:
            self._drop_window()
            raise
        self._sizes.append(samples)
        self._complete = self._exhausted or len(self._sizes) >= self.accumulation_steps

    def step(self) -> bool:
        """If the window is complete, clip the gradients, run the optimizer and start the next window.

        Call it after each `backward`. A loop that skips batches must call it once more at its end, in case the last
        batch was skipped. Returns whether the optimizer changed the parameters: False while the window is unfinished,
        and False if the scaler found infinite gradients.
        """
        if not self._complete:
            return False
        try:
            stepped = self._step()
        finally:
            self._drop_window()
        self.steps += stepped
        self.skipped_steps += not stepped
        return stepped

    def _step(self) -> bool:
        groups = self._optimizer.param_groups
        parameters = [each for group in groups for each in group["params"] if each.grad is not None]
        scale = None
        if self.scaler is not None:  # the gradients are clipped by the norm of the real gradients
            scale = self.scaler.get_scale()
            self.scaler.unscale_(self._optimizer)
        # The gradients are shares of a full window. Make them means over the real samples.
        factor = self._full_window / sum(self._sizes)
        for parameter in parameters if factor != 1 else ():
            parameter.grad.mul_(factor)
        if self._clip_norm is not None:
            self.gradient_norm = torch.nn.utils.clip_grad_norm_(parameters, self._clip_norm)
        if self.scaler is None:
            self._optimizer.step()
            return True
        self.scaler.step(self._optimizer)
        self.scaler.update()
        return bool(self.scaler.get_scale() >= scale)  # the scale falls if and only if the step was skipped

    def _drop_window(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        self._sizes.clear()
        self._complete = False


def _accumulation_steps(effective_batch: int, micro_batch: int) -> int:
    """Return the number of micro batches in a window."""
    effective, micro = operator.index(effective_batch), operator.index(micro_batch)
    if min(effective, micro) < 1 or effective % micro:
        raise ConfigurationError(f"invalid effective batch {effective}: use a multiple of the micro batch, {micro}")
    return effective // micro
