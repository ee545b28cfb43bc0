"""Finds the largest batch size that trains, by training with it; all ranks find the same one."""

from __future__ import annotations

import contextlib
import logging
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from gpumem_exporter.client import clear_cache, oom_guard
from gpumem_exporter.client.allocator.attached import no_cuda
from gpumem_exporter.client.hooks.steps import no_training
from gpumem_exporter.client.measure.measured import Measured, MemoryUse
from gpumem_exporter.client.oom.message import is_out_of_memory
from gpumem_exporter.errors import ConfigurationError, NoBatchSizeError, RankFailedError
from gpumem_exporter.training.bisection import Bisection
from gpumem_exporter.training.ranks import Ranks
from gpumem_exporter.units import human_bytes

__all__ = ["BatchSizeSearch", "BatchSizeTry", "find_batch_size"]

_log = logging.getLogger("gpumem_exporter.training")
_FITS, _OUT_OF_MEMORY, _FAILED = 0.0, 1.0, 2.0
_MAX_CAUSES = 8


@dataclass(frozen=True, slots=True)
class BatchSizeTry:
    """One batch size that was tried.

    Attributes:
        size: the batch size.
        fits: whether the size fits on every rank.
        peak_bytes: the peak on this rank; None if it did not raise the allocator's own peak, which is never reset.
        ranks_out_of_memory: the global ranks on which the size did not fit; empty in a process that trains alone.
    """

    size: int
    fits: bool
    peak_bytes: int | None = None
    ranks_out_of_memory: tuple[int, ...] = ()

    def __str__(self) -> str:
        outcome = "fits" if self.fits else "out of memory"
        if self.ranks_out_of_memory:
            outcome += f" on rank {_join(self.ranks_out_of_memory)}"
        return f"{self.size:>8}  {human_bytes(self.peak_bytes):>9}  {outcome}"


@dataclass(frozen=True, slots=True)
class BatchSizeSearch:
    """The batch size that was found. Converts to an integer with `int(found)`, and to a table with `str(found)`.

    Attributes:
        size: the batch size to train with.
        largest: the largest size that fits, before the margin; None without CUDA.
        tries: the sizes that were tried.
    """

    size: int
    largest: int | None = None
    tries: tuple[BatchSizeTry, ...] = ()

    def __int__(self) -> int:
        return self.size

    def __index__(self) -> int:
        return self.size

    def __str__(self) -> str:
        if not self.tries:
            return f"batch size {self.size}: no CUDA, nothing was tried"
        return "\n".join([f"{'size':>8}  {'peak':>9}", *map(str, self.tries), f"batch size {self.size}"])


def find_batch_size(
    step: Callable[[int], object],
    *,
    start: int = 32,
    maximum: int = 65536,
    multiple_of: int = 1,
    margin: float = 0.05,
    runs: int = 2,
    max_tries: int = 24,
    process_group: Any = None,
) -> BatchSizeSearch:
    """Find the largest batch size whose training step does not run out of GPU memory, by trying.

        def step(size):
            optimizer.zero_grad(set_to_none=True)
            x, y = make_batch(size)
            loss_function(model(x), y).backward()
            optimizer.step()

    Sizes double from `start` while they fit, halve while they do not, and are then bisected. The steps train the model,
    so load its weights afterwards. `step` metrics, `watch` and the leak detector ignore them. Failed tries raise the
    allocator's peaks and its number of errors. Without CUDA nothing is tried and the size is `start`.

    Under `torchrun` every rank calls this with the same arguments. **`step` must not contain a collective**: a rank
    without memory would leave the others waiting until the group's timeout. So call `ddp.module` instead of the
    wrapper; FSDP cannot be tried safely.

    Args:
        step: runs one training step with a batch of the given size.
        start: the first size.
        maximum: the largest size to try. Like `start`, it is rounded down.
        multiple_of: sizes are multiples of this number.
        margin: the part of the largest size to leave out, because a long training needs a little more memory.
        runs: calls of `step` in each try. The second one has the optimizer state of the first.
        max_tries: number of tries after which the search returns the largest size that fits so far.
        process_group: the ranks that agree on a size. Default: the default group, if it is initialized.

    Raises:
        ConfigurationError: an argument is invalid, or differs between ranks.
        NoBatchSizeError: no size that was tried fits. The cause is the last out-of-memory error with its diagnosis.
        RankFailedError: `step` raised another error on another rank, or a rank exited.
    """
    first, last, unit = map(operator.index, (start, maximum, multiple_of))
    limits = _Limits(first, last, unit, margin, runs, max_tries)
    ranks = Ranks.of(process_group)
    cuda = torch.cuda.is_available()
    _check_same_on_all(ranks, limits, cuda)
    if cuda:
        return _search(step, limits, ranks)
    no_cuda("find_batch_size")
    return BatchSizeSearch(limits.start // limits.multiple_of * limits.multiple_of)


@dataclass(frozen=True)
class _Limits:
    """The arguments of a search, which are the same on every rank."""

    start: int
    maximum: int
    multiple_of: int
    margin: float
    runs: int
    max_tries: int

    def __post_init__(self) -> None:
        for name in ("multiple_of", "runs", "max_tries"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"invalid {name} {getattr(self, name)}: it must be at least 1")
        if not self.multiple_of <= self.start <= self.maximum:
            raise ConfigurationError(
                f"invalid start {self.start}: it must be between multiple_of {self.multiple_of} "
                f"and maximum {self.maximum}"
            )
        if not 0 <= self.margin < 1:
            raise ConfigurationError(f"invalid margin {self.margin}: it must be at least 0 and below 1")


def _search(step: Callable[[int], object], limits: _Limits, ranks: Ranks) -> BatchSizeSearch:
    """Try sizes until the largest that fits is known."""
    torch.cuda.synchronize()  # creates the context, so that the first try is measured like the others
    bisection = Bisection(limits.start // limits.multiple_of, limits.maximum // limits.multiple_of)
    tries: list[BatchSizeTry] = []
    error: BaseException | None = None
    while len(tries) < limits.max_tries and (units := bisection.next()) is not None:
        error = None  # frees the frames of the last try
        clear_cache(collect_garbage=True)
        tried, error = _try(step, units * limits.multiple_of, limits.runs, ranks)
        _log.info("batch size %s", str(tried).strip())
        tries.append(tried)
        bisection.record(units, fits=tried.fits)
    if not bisection.fits:
        clear_cache(collect_garbage=True)
        on = f"; the last one on rank {_join(tries[-1].ranks_out_of_memory)}" if ranks.size > 1 else ""
        sizes = _join(tried.size for tried in tries)
        raise NoBatchSizeError(f"out of memory with every batch size that was tried: {sizes}{on}") from error
    error = None
    clear_cache(collect_garbage=True)
    largest = bisection.fits * limits.multiple_of
    units = max(1, int(bisection.fits * (1 - limits.margin)))
    return BatchSizeSearch(units * limits.multiple_of, largest, tuple(tries))


def _try(
    step: Callable[[int], object], size: int, runs: int, ranks: Ranks
) -> tuple[BatchSizeTry, BaseException | None]:
    """Run the step and exchange the outcome with the other ranks. Raises errors other than out of memory."""
    error: BaseException | None = None
    used: list[MemoryUse] = []
    with no_training(), Measured("batch size", kept=False, ended=used.append):
        try:
            with oom_guard(batch_size=size, free_frames=True, clean=False):  # frees memory for the next size
                for _ in range(runs):
                    step(size)
                torch.cuda.synchronize()  # raises asynchronous errors in this try
        except Exception as raised:
            if not _is_out_of_memory(raised):
                with contextlib.suppress(Exception):  # the error of the step is more important
                    ranks.gather(_FAILED)
                raise
            error = raised
    outcomes = ranks.gather(_FITS if error is None else _OUT_OF_MEMORY)
    failed = tuple(rank for rank, outcome in outcomes.items() if outcome == _FAILED)
    if failed:
        raise RankFailedError(
            f"the step with a batch of {size} failed on rank {_join(failed)}; see the error of that rank", failed
        )
    main = used[0].main if used else None
    tried = BatchSizeTry(
        size,
        fits=not any(outcomes.values()),
        peak_bytes=main.peak_bytes if main is not None and main.exact else None,
        ranks_out_of_memory=tuple(rank for rank, outcome in outcomes.items() if outcome) if ranks.size > 1 else (),
    )
    return tried, error


def _is_out_of_memory(error: BaseException) -> bool:
    """Whether the error or one of its causes is an out-of-memory error."""
    cause: BaseException | None = error
    for _ in range(_MAX_CAUSES):
        if cause is None or is_out_of_memory(cause):
            break
        cause = cause.__cause__
    return cause is not None and is_out_of_memory(cause)


def _check_same_on_all(ranks: Ranks, limits: _Limits, cuda: bool) -> None:
    """Check before the first try that all ranks will try the same sizes."""
    for name, value in {"CUDA": cuda, **vars(limits)}.items():
        values = ranks.gather(value)
        if len(set(values.values())) > 1:
            listed = ", ".join(f"{value:g} on rank {rank}" for rank, value in values.items())
            raise ConfigurationError(f"find_batch_size needs the same arguments on every rank; {name} is {listed}")


def _join(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))
