"""One optimizer step of many micro batches, with the gradient that one large batch would have given."""

from __future__ import annotations

import logging
import math
import operator
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch

from gpumem_exporter.client import clear_cache
from gpumem_exporter.errors import ConfigurationError
from gpumem_exporter.training.gradient_sync import GradientSync, device_type, is_fsdp1, ranks_of

__all__ = ["GradientAccumulator"]

_log = logging.getLogger("gpumem_exporter.training")
_Batch = TypeVar("_Batch")


class GradientAccumulator:
    """Trains with an effective batch that does not fit: its gradient comes from micro batches that do.

        accumulator = training.GradientAccumulator(
            model, optimizer, effective_batch=512, micro_batch=32, autocast=torch.bfloat16, clip_norm=1.0
        )
        for x, y in accumulator.batches(loader):
            with accumulator.forward():
                loss = loss_function(model(x), y)
            accumulator.backward(loss, samples=len(x))
            if accumulator.step():
                scheduler.step()

    The micro batches between two steps are a window. Where each loss is a mean over its samples, the step's gradient
    is the mean over all samples of the window, on all ranks, whatever the sizes: a short last micro batch and a short
    last window count as what they are. (What a model takes from its batch as a whole, as BatchNorm does, it takes from
    the micro batch. Gradients add up in their parameters' type, which for bfloat16 parameters is coarse.)

    Under DDP and FSDP gradients are averaged once in a window, in its last backward pass, and every rank has to come
    by as many micro batches. Steps are the optimizer's own, so that the reporter counts each once (a skipped one too
    where the optimizer is fused: PyTorch leaves the skipping to it).

    Not thread-safe.

    Attributes:
        accumulation_steps: micro batches in a full window, on each rank.
        scaler: of the loss, for float16; its `state_dict` belongs into checkpoints. None: there is none.
        steps: that the optimizer has made.
        skipped_steps: windows that were thrown away because the scaler found infinite gradients; it skips some at the
            beginning, until it has found its scale.
        gradient_norm: of the last window, before clipping; a tensor that nobody has waited for. None without clipping.
        freed_bytes: what clearing the cache has given back so far.

    Args:
        model: as it is called in the forward pass, wrapped or not.
        optimizer: a `torch.optim.Optimizer` that needs no closure.
        effective_batch: samples in one optimizer step, over all ranks.
        micro_batch: samples in one forward and backward pass on one rank.
        autocast: the type that the forward pass computes in where that is safe, `torch.bfloat16` or `torch.float16`.
        scaler: for float16, instead of a `torch.amp.GradScaler` (under FSDP1 a `ShardedGradScaler`) with its defaults.
        clip_norm: the largest norm of the gradient that the optimizer is given.
        sync_every_batch: average over the ranks after each micro batch. Slower, and under FSDP it saves what else
            holds the whole gradient on every rank until the window ends.
        clear_cache_every: after so many optimizer steps `client.clear_cache()` is called, on each rank at the same
            step. What it gives back is allocated anew in the next step, which takes time.
        process_group: the ranks whose gradients are averaged, where these are not DDP's or, under FSDP, all (as with
            tensor parallelism beside it).

    Raises:
        ConfigurationError: an argument is wrong; it says what would be right.
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
        if autocast not in (None, torch.bfloat16, torch.float16):
            raise ConfigurationError(f"autocast to {autocast}; torch.bfloat16, torch.float16 or None would be right")
        if clip_norm is not None and not clip_norm > 0:
            raise ConfigurationError(f"clip norm {clip_norm}; it must be above 0")
        if clip_norm is not None and self._sync.any_fsdp1 and not is_fsdp1(model):
            raise ConfigurationError(
                "clip norm: only parts of the model are FullyShardedDataParallel, and no rank knows the norm of all;"
                " wrap the model itself, or shard it by torch.distributed.fsdp.fully_shard"
            )
        if clear_cache_every is not None and clear_cache_every < 1:
            raise ConfigurationError(f"clear the cache every {clear_cache_every} steps; it must be at least 1")
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
        self._loop: object = None  # over the batches, the latest
        self._no_more = False  # the loader has given its last batch
        self._sizes: list[float] = []  # of this window's micro batches so far
        self._told_of_sizes = False
        self._closes: bool | None = None  # the micro batch whose forward pass has begun is the window's last
        self._complete = self._averaged = False

    def batches(self, loader: Iterable[_Batch]) -> Iterator[_Batch]:
        """The loader's own batches, one after the other, so that the last window of an epoch is known as such.

        For that it takes each batch one earlier than it gives it: where the loader puts batches onto the device, one
        more lies there.

        What an earlier loop has left of an unfinished window is dropped, as is any other gradient.
        """
        if self._sizes:
            _log.warning("an unfinished window of %d micro batches is dropped", len(self._sizes))
        self._drop_window(unfinished=bool(self._sizes))
        self._loop = loop = object()
        self._no_more = False
        ahead: deque[_Batch] = deque()  # which holds none that the program has been given
        try:
            for batch in loader:
                ahead.append(batch)
                del batch
                if len(ahead) == 2:
                    yield ahead.popleft()
            self._no_more = True
            if ahead:
                yield ahead.popleft()
            self._complete = bool(self._sizes)  # the program has left out the last batch
        finally:
            if self._loop is loop:  # else this is an earlier one, which somebody still held
                self._no_more = False

    @contextmanager
    def forward(self) -> Iterator[None]:
        """The forward pass of a micro batch, loss included, goes under this `with`; its backward pass does not.

        Raises:
            RuntimeError: the window is complete, and `step` was not called.
        """
        if self._complete:
            raise RuntimeError(
                f"the window of {len(self._sizes)} micro batches is complete: call step() before the next forward()"
            )
        self._closes = self._no_more or len(self._sizes) + 1 >= self.accumulation_steps
        self._sync.begin(average=self._closes or self._sync_every_batch)
        try:
            with torch.autocast(self._device_type, self._autocast) if self._autocast is not None else nullcontext():
                yield
        except BaseException:
            self._closes = None
            self._sync.end()
            raise

    def backward(self, loss: Any, *, samples: float) -> None:
        """Add the gradient of a micro batch's loss to its window.

        Where this raises (out of memory, as a rule), the window's gradient is incomplete: it is dropped, and another
        one begins.

        Args:
            loss: a mean over the micro batch.
            samples: what that is a mean over: `len(x)`; or tokens, or a sum of weights, if the effective and the micro
                batch are given in these, too.

        Raises:
            RuntimeError: there was no `forward`.
            ValueError: the samples are not above 0.
        """
        samples = float(samples)
        if not 0 < samples < math.inf:
            raise ValueError(f"a mean over {samples} samples; there must be more than 0")
        if self._closes is None:
            raise RuntimeError("backward() comes after the loss was computed under `with accumulator.forward():`")
        closes, self._closes = self._closes, None
        # As a share of a full window, so that float16 sees gradients as large as those of a mean over that. What the
        # window really had is made up for at the step.
        share = loss * (samples / self._full_window)
        try:
            (share if self.scaler is None else self.scaler.scale(share)).backward()
        except BaseException:
            self._drop_window(unfinished=True)
            raise
        self._sync.end()
        self._sizes.append(samples)
        self._averaged = self._complete = closes

    def step(self) -> bool:
        """Where the window is complete: clip, let the optimizer step, and begin another window. Else do nothing.

        Call it after each `backward`. A loop that leaves out batches calls it once more when it has ended: the last
        batch of the loader may have been one of them.

        Returns:
            Whether the optimizer has stepped. Not where the scaler has found infinite gradients.

        Raises:
            RuntimeError: the gradients of the window are not averaged over the ranks, since its last batch was left
                out; the window is dropped.
            RankFailedError: a rank has gone.
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
                "the window's last batch was left out, so that its gradients are not averaged over the ranks: "
                "under DDP and FSDP every batch needs its forward() and backward()"
            )
        self._tell_of_sizes()
        groups = self._optimizer.param_groups
        parameters = [each for group in groups for each in group["params"] if each.grad is not None]
        if self.scaler is None:
            self._prepare(parameters)
            self._optimizer.step()
            return True
        scale = self.scaler.get_scale()
        self.scaler.unscale_(self._optimizer)
        try:
            self._prepare(parameters)
            self.scaler.step(self._optimizer)
        finally:
            self.scaler.update()
        return bool(self.scaler.get_scale() >= scale)  # it falls where, and only where, the step was skipped

    def _prepare(self, parameters: list[Any]) -> None:
        # The mean over the ranks of what are shares of a full window, made the mean over the samples that there were.
        _multiply(parameters, self._ranks.size * self._full_window / self._ranks.total(sum(self._sizes)))
        if self._clip_norm is not None:
            self.gradient_norm = self._clip(parameters, self._clip_norm)

    def _tell_of_sizes(self) -> None:
        """Warn once where the loader's batches are plainly not those that the effective batch was reckoned with."""
        size = self._sizes[0]
        full = not self._no_more and len(self._sizes) == self.accumulation_steps and set(self._sizes) == {size}
        if full and size != self._micro_batch and not self._told_of_sizes:
            self._told_of_sizes = True
            _log.warning("the loader gives micro batches of %g samples, not of %d", size, self._micro_batch)

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
        self._closes = None
        self._complete = self._averaged = False


def _accumulation_steps(effective_batch: int, micro_batch: int, ranks: int) -> int:
    """Micro batches in a window.

    Raises:
        ConfigurationError: they do not add up to the effective batch.
    """
    effective, micro = operator.index(effective_batch), operator.index(micro_batch)
    for name, value in (("effective batch", effective), ("micro batch", micro)):
        if value < 1:
            raise ConfigurationError(f"{name} {value}; it must be at least 1")
    at_once = micro * ranks
    steps, rest = divmod(effective, at_once)
    if rest:
        right = f"{steps * at_once} or {(steps + 1) * at_once}" if steps else f"{at_once}"
        raise ConfigurationError(
            f"effective batch {effective} is no multiple of {at_once} (micro batches of {micro} on {ranks} "
            f"{'rank' if ranks == 1 else 'ranks'}); {right} would be"
        )
    return steps


def _scaler(sync: GradientSync, device: str, group: Any) -> Any:
    if not sync.any_fsdp1:
        return torch.amp.GradScaler(device)
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    return ShardedGradScaler(device=device, process_group=group or torch.distributed.group.WORLD)


def _multiply(parameters: list[Any], factor: Any) -> None:
    """Multiply gradients in place by a number, or by a tensor without waiting for it."""
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
