"""Accumulates the gradients of micro batches into the gradient of one large batch."""

from __future__ import annotations

import logging
import math
import operator
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch

from gpumem_client import clear_cache
from gpumem_client.wire.errors import ConfigurationError
from gpumem_toolkit.training.model_runs import check_autocast
from gpumem_toolkit.training.ranks import GradientSync, device_type, is_fsdp1, ranks_of

_log = logging.getLogger("gpumem_toolkit")
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
    is the mean over all samples of the window on all ranks, also for a short last micro batch or window. BatchNorm
    still sees micro batches. Gradients are summed in the dtype of their parameters.

    Under DDP and FSDP the gradients are averaged once per window. Every rank needs the same number of micro batches.
    Not thread-safe. Raises ConfigurationError if an argument is invalid.

    Attributes:
        accumulation_steps: micro batches in a full window, on each rank.
        scaler: the gradient scaler for float16; save its `state_dict` in checkpoints. None without a scaler.
        steps: number of optimizer steps.
        skipped_steps: windows that were dropped because the scaler found infinite gradients.
        gradient_norm: the norm of the last window before clipping, as a tensor on the device. None without clipping.
        freed_bytes: bytes that clearing the cache has released.

    Args:
        model: the module that the forward pass calls, wrapped or not.
        optimizer: a `torch.optim.Optimizer` whose `step` needs no closure.
        effective_batch: samples in one optimizer step, over all ranks.
        micro_batch: samples in one forward and backward pass on one rank.
        autocast: the dtype of the forward pass under autocast: `torch.bfloat16` or `torch.float16`.
        scaler: the gradient scaler for float16. Default: `torch.amp.GradScaler`; under FSDP1 `ShardedGradScaler`.
        clip_norm: the largest norm of the gradient.
        sync_every_batch: average over the ranks after each micro batch: slower, but needs less memory under FSDP.
        clear_cache_every: call `gpumem_client.clear_cache()` each time after this number of optimizer steps.
        process_group: the ranks whose gradients are averaged. Default: DDP's group; under FSDP all ranks. Required with
            tensor parallelism.
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
        sync_every_batch: bool = False,
        clear_cache_every: int | None = None,
        process_group: Any = None,
    ) -> None:
        self._sync = GradientSync(model)
        self._ranks = ranks_of(model, process_group)
        self.accumulation_steps = _accumulation_steps(effective_batch, micro_batch, self._ranks.size)
        check_autocast(autocast)
        _check_clip_norm(clip_norm, only_parts=self._sync.any_fsdp1 and not is_fsdp1(model))
        if clear_cache_every is not None and clear_cache_every < 1:
            raise ConfigurationError(f"invalid clear_cache_every {clear_cache_every}: it must be at least 1")
        self._model, self._optimizer = model, optimizer
        self._device_type = device_type(model)
        self._autocast = autocast
        self.scaler = scaler
        if scaler is None and autocast is torch.float16:
            self.scaler = _scaler(self._sync, self._device_type, process_group)
        self._clip_norm = clip_norm
        self._sync_every_batch = sync_every_batch
        self._clear_cache_every = clear_cache_every
        self._micro_batch = int(micro_batch)
        self._full_window = self.accumulation_steps * self._micro_batch

        self.steps = self.skipped_steps = self.freed_bytes = 0
        self.gradient_norm: Any = None
        self._exhausted = False  # the loader has returned its last batch
        self._sizes: list[float] = []  # samples of the micro batches in this window
        self._warned_of_size = False
        # Whether the current micro batch is the last one of its window; None outside of `forward` to `backward`. It is
        # decided before the forward pass, because DDP prepares the averaging of gradients there.
        self._is_last: bool | None = None
        self._complete = self._averaged = False

    def batches(self, loader: Iterable[_Batch]) -> Iterator[_Batch]:
        """Yield the loader's batches, and end the last window of an epoch with the last batch. Loads one batch ahead.

        Drops all gradients at the start, including an unfinished window of an earlier loop.
        """
        # Only the batch after it shows that a batch is not the last one, and the last one ends its window.
        if self._sizes:
            _log.warning("an unfinished window of %d micro batches is dropped", len(self._sizes))
        self._drop_window(unfinished=bool(self._sizes))
        self._exhausted = False
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
        self._is_last = self._exhausted or len(self._sizes) + 1 >= self.accumulation_steps
        self._sync.start(average=self._is_last or self._sync_every_batch)
        try:
            with torch.autocast(self._device_type, self._autocast) if self._autocast is not None else nullcontext():
                yield
        except BaseException:
            self._is_last = None
            self._sync.end()
            raise

    def backward(self, loss: Any, *, samples: float) -> None:
        """Add the gradient of a micro batch's loss to the window. An error, such as out of memory, drops the window.

        The loss is a mean over `samples` samples; or tokens, if the batch sizes count tokens. Raises RuntimeError if
        `forward` was not called, and ValueError if samples is not above 0.
        """
        samples = float(samples)
        if not 0 < samples < math.inf:
            raise ValueError(f"invalid number of samples: a mean over {samples} samples; it must be above 0")
        if self._is_last is None:
            raise RuntimeError("backward() needs a loss that was computed under `with accumulator.forward():`")
        is_last, self._is_last = self._is_last, None
        # A share of a full window gives float16 gradients the magnitude of a full mean. `_prepare` corrects for the
        # real size of the window.
        share = loss * (samples / self._full_window)
        try:
            (share if self.scaler is None else self.scaler.scale(share)).backward()
        except BaseException:
            self._drop_window(unfinished=True)
            raise
        self._sync.end()
        self._sizes.append(samples)
        self._averaged = self._complete = is_last

    def step(self) -> bool:
        """If the window is complete, clip the gradients, run the optimizer and start the next window.

        Call it after each `backward`. A loop that skips batches must call it once more at its end, in case the last
        batch was skipped. Returns whether the optimizer changed the parameters: False while the window is unfinished,
        and False if the scaler found infinite gradients. Raises RuntimeError if there are several ranks and the last
        batch was skipped; the window is dropped. Raises RankFailedError if a rank exited.
        """
        if not self._complete:
            return False
        try:
            stepped = self._step()
        finally:
            self._drop_window(unfinished=not self._averaged)
        if not stepped:
            self.skipped_steps += 1
            return False
        self.steps += 1
        if self._clear_cache_every is not None and self.steps % self._clear_cache_every == 0:
            self.freed_bytes += clear_cache()
        return True

    def _step(self) -> bool:
        if self._ranks.size > 1 and not (self._averaged or self._sync_every_batch):
            raise RuntimeError(
                "the window's last batch was skipped, so that its gradients are not averaged over the ranks: "
                "under DDP and FSDP every batch needs its forward() and backward()"
            )
        self._warn_of_size()
        groups = self._optimizer.param_groups
        parameters = [each for group in groups for each in group["params"] if each.grad is not None]
        if self.scaler is None:
            self._prepare(parameters)
            self._optimizer.step()
            return True
        # The gradients are unscaled before they are clipped, by the norm of the real gradients.
        scale = self.scaler.get_scale()
        self.scaler.unscale_(self._optimizer)
        try:
            self._prepare(parameters)
            self.scaler.step(self._optimizer)
        finally:
            self.scaler.update()
        return bool(self.scaler.get_scale() >= scale)  # the scale falls if and only if the step was skipped

    def _prepare(self, parameters: list[Any]) -> None:
        # The gradients are shares of a full window, averaged over the ranks. Make them means over the real samples.
        _multiply(parameters, self._ranks.size * self._full_window / self._ranks.total(sum(self._sizes)))
        if self._clip_norm is not None:
            self.gradient_norm = self._clip(parameters, self._clip_norm)

    def _warn_of_size(self) -> None:
        """Warn once if the loader's batches do not have the size of `micro_batch`."""
        size = self._sizes[0]
        full = not self._exhausted and len(self._sizes) == self.accumulation_steps and set(self._sizes) == {size}
        if full and size != self._micro_batch and not self._warned_of_size:
            self._warned_of_size = True
            _log.warning("the loader returns micro batches of %g samples instead of %d", size, self._micro_batch)

    def _clip(self, parameters: list[Any], clip_norm: float) -> Any:
        if is_fsdp1(self._model):
            return self._model.clip_grad_norm_(clip_norm)
        norm = torch.nn.utils.clip_grad_norm_(parameters, clip_norm)
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm

    def _drop_window(self, *, unfinished: bool) -> None:
        self._sync.end()
        if unfinished:
            self._sync.drop()
        self._optimizer.zero_grad(set_to_none=True)
        self._sizes.clear()
        self._is_last = None
        self._complete = self._averaged = False


def _check_clip_norm(clip_norm: float | None, *, only_parts: bool) -> None:
    if clip_norm is None:
        return
    if not clip_norm > 0:
        raise ConfigurationError(f"invalid clip norm {clip_norm}: it must be above 0")
    if only_parts:
        raise ConfigurationError(
            "clip norm: only parts of the model are FullyShardedDataParallel, and no rank knows the total norm;"
            " wrap the whole model, or shard it with torch.distributed.fsdp.fully_shard"
        )


def _accumulation_steps(effective_batch: int, micro_batch: int, ranks: int) -> int:
    """Return the number of micro batches in a window."""
    effective, micro = operator.index(effective_batch), operator.index(micro_batch)
    for name, value in (("effective batch", effective), ("micro batch", micro)):
        if value < 1:
            raise ConfigurationError(f"invalid {name} {value}: it must be at least 1")
    at_once = micro * ranks
    steps, rest = divmod(effective, at_once)
    if rest:
        accepted = f"{steps * at_once} or {(steps + 1) * at_once}" if steps else f"{at_once}"
        raise ConfigurationError(
            f"invalid effective batch {effective}: it is not a multiple of {at_once} (micro batches of {micro} on "
            f"{ranks} {'rank' if ranks == 1 else 'ranks'}); use {accepted}"
        )
    return steps


def _scaler(sync: GradientSync, device: str, group: Any) -> Any:
    if not sync.any_fsdp1:
        return torch.amp.GradScaler(device)
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    return ShardedGradScaler(device=device, process_group=group or torch.distributed.group.WORLD)


def _multiply(parameters: list[Any], factor: Any) -> None:
    """Multiply gradients in place by a number or a tensor. Does not wait for the device."""
    if isinstance(factor, float) and factor == 1.0:
        return
    by_kind: dict[Any, list[Any]] = {}
    for parameter in parameters:
        gradient = parameter.grad.to_local() if hasattr(parameter.grad, "to_local") else parameter.grad
        if gradient.is_sparse:
            gradient.mul_(float(factor))
        else:
            by_kind.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    for (device, _), gradients in by_kind.items():
        torch._foreach_mul_(gradients, factor if isinstance(factor, float) else factor.to(device))
