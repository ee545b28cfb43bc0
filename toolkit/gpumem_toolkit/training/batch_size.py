"""Finds the largest batch size that trains, by training with it; all ranks find the same one."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from gpumem_client import clear_cache
from gpumem_client.allocator.allocator import no_cuda
from gpumem_client.wire.errors import ConfigurationError
from gpumem_client.wire.units import ShownAsText
from gpumem_toolkit.errors import NoBatchSizeError
from gpumem_toolkit.planning.search import Bisection
from gpumem_toolkit.training.batch_trial import BatchSizeTry, Trial, join_numbers
from gpumem_toolkit.training.ranks import Ranks

_log = logging.getLogger("gpumem_toolkit")


@dataclass(frozen=True, slots=True)
class BatchSizeSearch(ShownAsText):
    """The batch size that was found. Converts to an integer with `int(found)`, and to a table with `str(found)`."""

    size: int
    largest: int | None = None
    """The largest size that fits, before the margin; None without CUDA."""
    tries: tuple[BatchSizeTry, ...] = ()

    def __int__(self) -> int:
        return self.size

    def __index__(self) -> int:
        return self.size

    def __str__(self) -> str:
        if not self.tries:
            return f"batch size {self.size}: no CUDA, nothing was tried"
        return "\n".join([f"{'size':>8}  {'peak':>9}  runs", *map(str, self.tries), f"batch size {self.size}"])


def find_batch_size(
    step: Callable[[int], object],
    *,
    start: int = 32,
    maximum: int = 65536,
    multiple_of: int = 1,
    margin: float = 0.05,
    runs: int = 2,
    max_runs: int = 200,
    max_tries: int = 24,
    process_group: Any = None,
) -> BatchSizeSearch:
    """Find the largest batch size whose training step does not run out of GPU memory, by trying.

        def step(size):
            optimizer.zero_grad(set_to_none=True)  # an error in backward leaves gradients, which would count
            x, y = make_batch(size)
            loss_function(model(x), y).backward()
            optimizer.step()

    Sizes double from `start` while they fit, halve while they do not, and are then bisected. The found size must also
    fit until its memory stops growing. The steps train the model, so load its weights afterwards. Metrics of steps,
    `watch` and the leak detector ignore them. Failed tries raise the allocator's peaks and its number of errors.
    Without CUDA nothing is tried and the size is `start`.

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
        max_runs: calls of `step` with the found size after which it counts as fitting although its memory still grows.
        max_tries: number of tries, first with few and then with many runs, after which the largest that fits counts.
        process_group: the ranks that agree on a size. Default: the default group, if it is initialized.

    Raises:
        ConfigurationError: an argument is invalid, or differs between ranks.
        NoBatchSizeError: no size that was tried fits. The cause is the last out-of-memory error with its diagnosis.
        RankFailedError: `step` raised another error on another rank, or a rank exited.
    """
    first, last, unit = map(operator.index, (start, maximum, multiple_of))
    limits = _Limits(first, last, unit, margin, runs, max_runs, max_tries)
    ranks, cuda = Ranks.of(process_group), torch.cuda.is_available()
    _check_same_on_all(ranks, limits, cuda)
    if cuda:
        return _SizeFinder(step, limits, ranks).run()
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
    max_runs: int
    max_tries: int

    def __post_init__(self) -> None:
        for name in ("multiple_of", "runs", "max_runs", "max_tries"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"invalid {name} {getattr(self, name)}: it must be at least 1")
        if not self.multiple_of <= self.start <= self.maximum:
            raise ConfigurationError(
                f"invalid start {self.start}: it must be between multiple_of {self.multiple_of} "
                f"and maximum {self.maximum}"
            )
        if not 0 <= self.margin < 1:
            raise ConfigurationError(f"invalid margin {self.margin}: it must be at least 0 and below 1")


class _SizeFinder:
    """Finds the size. Its parts run on all ranks in the same order."""

    def __init__(self, step: Callable[[int], object], limits: _Limits, ranks: Ranks) -> None:
        self._limits = limits
        self._alone = ranks.size == 1
        self._trial = Trial(step, limits.runs, ranks)
        self._tries: list[BatchSizeTry] = []

    def run(self) -> BatchSizeSearch:
        """Find a size with few runs of each. If it does not fit in many runs, find a smaller one with many runs."""
        # Creates the context, so that the first try is measured like the others.
        torch.cuda.synchronize()
        limits, unit = self._limits, self._limits.multiple_of
        largest = self._largest(Bisection(limits.start // unit, limits.maximum // unit), limits.runs)
        found = self._less_margin(largest)
        # A few runs do not show a buffer that fills over many steps, or a cache that fragments.
        if not self._fits(found, limits.max_runs):
            largest = self._largest(Bisection(max(1, found // 2), found - 1), limits.max_runs)
            found = self._less_margin(largest)
        clear_cache(collect_garbage=True)
        return BatchSizeSearch(found * unit, largest * unit, tuple(self._tries))

    def _less_margin(self, units: int) -> int:
        return max(1, int(units * (1 - self._limits.margin)))

    def _largest(self, bisection: Bisection, max_runs: int) -> int:
        """Return the largest size that fits, in units of `multiple_of`."""
        for _ in range(self._limits.max_tries):
            units = bisection.next()
            if units is None:
                break
            bisection.record(units, fits=self._fits(units, max_runs))
        if bisection.fits:
            return bisection.fits
        clear_cache(collect_garbage=True)
        ranks = self._tries[-1].ranks_out_of_memory
        on = "" if self._alone else f"; the last one on rank {join_numbers(ranks)}"
        sizes = join_numbers(dict.fromkeys(tried.size for tried in self._tries))
        message = f"out of memory with every batch size that was tried: {sizes}{on}"
        raise NoBatchSizeError(message) from self._trial.error

    def _fits(self, units: int, max_runs: int) -> bool:
        """Try a size with at most `max_runs` runs."""
        tried = self._trial.run(units * self._limits.multiple_of, max_runs)
        _log.info("batch size %s", str(tried).strip())
        self._tries.append(tried)
        return tried.fits


def _check_same_on_all(ranks: Ranks, limits: _Limits, cuda: bool) -> None:
    """Check before the first try that all ranks will try the same sizes."""
    for name, value in {"CUDA": cuda, **vars(limits)}.items():
        values = ranks.gather(value)
        if len(set(values.values())) > 1:
            listed = ", ".join(f"{value:g} on rank {rank}" for rank, value in values.items())
            raise ConfigurationError(f"find_batch_size needs the same arguments on every rank; {name} is {listed}")
