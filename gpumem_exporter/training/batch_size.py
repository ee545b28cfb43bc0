"""Finds the largest batch size that trains, by training with it; the same one on every rank."""

from __future__ import annotations

import contextlib
import logging
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gpumem_exporter.client import clear_cache, oom_guard
from gpumem_exporter.client.allocator.attached import no_cuda
from gpumem_exporter.client.hooks.steps import no_training
from gpumem_exporter.client.measure.measured import Measured, MemoryUse
from gpumem_exporter.client.oom.message import is_out_of_memory
from gpumem_exporter.client.sizes import human_bytes
from gpumem_exporter.errors import ConfigurationError, NoBatchSizeError, RankFailedError
from gpumem_exporter.training.bisection import Bisection
from gpumem_exporter.training.ranks import Ranks

__all__ = ["BatchSizeSearch", "BatchSizeTry", "find_batch_size"]

_log = logging.getLogger("gpumem_exporter.training")
_FITS, _OUT_OF_MEMORY, _FAILED = 0.0, 1.0, 2.0


@dataclass(frozen=True, slots=True)
class BatchSizeTry:
    """One batch size that was tried."""

    size: int
    fits: bool
    """It ran, on every rank."""
    peak_bytes: int | None = None
    """The most that this rank had allocated meanwhile. None where that was not above PyTorch's own peak so far, which
    nobody resets for this."""
    ranks_out_of_memory: tuple[int, ...] = ()
    """The global ranks on which it did not fit; empty in a process that trains alone."""

    def __str__(self) -> str:
        outcome = "fits" if self.fits else "out of memory"
        if self.ranks_out_of_memory:
            outcome += f" on rank {_listed(self.ranks_out_of_memory)}"
        return f"{self.size:>8}  {human_bytes(self.peak_bytes):>9}  {outcome}"


@dataclass(frozen=True, slots=True)
class BatchSizeSearch:
    """The batch size that was found, as an integer wherever Python asks for one (`int(found)`). Prints as a table."""

    size: int
    largest: int | None = None
    """The largest that was tried and fits, before the margin; None where nothing was tried, without CUDA."""
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

        found = training.find_batch_size(step, start=64, multiple_of=8)
        loader = DataLoader(data, batch_size=int(found))

    Sizes double from `start` while they fit, halve while they do not, and are then bisected. Each try begins with an
    empty cache, freed of what a failed one has left; so does what follows. The steps are real ones: they train the
    model, so load its weights afterwards. Nobody counts them: `step` metrics, `watch` and the leak detector know of the
    training alone. Where CUDA is not there nothing is tried, and the size is `start`.

    Under `torchrun` every rank calls this with the same arguments, and a size fits where it fits on every rank: after
    each try the ranks tell each other what became of it, in an all-reduce on the process group. **No collective may
    happen within `step`**: a rank that runs out of memory before one leaves the others waiting in it, until the
    group's timeout ends them. So call `ddp.module`, not the wrapper (whose buckets count, once it is made). FSDP
    gathers parameters in every forward pass, and cannot be tried without that risk. The ranks wait for each other's
    outcome as long as the group's timeout says: for less, and without NCCL, pass a group of your own, such as
    `new_group(backend="gloo", timeout=timedelta(minutes=2))`.

    No statistic is reset for this. But PyTorch counts what happens: failed tries raise its peaks and its number of
    out-of-memory errors, and so those that are reported, as any other allocation.

    Args:
        step: one training step with a batch of that many samples; what it returns is dropped.
        start: the first size.
        maximum: the largest size that is of use.
        multiple_of: sizes are multiples of it, `start` and `maximum` are rounded down to one.
        margin: the part of the largest size that is left away in the end, since a long training needs a little more
            than its first steps (fragmentation, longer samples).
        runs: of `step` in each try. The second one sees what the first has left, such as the optimizer's state.
        max_tries: then the largest that fitted so far is taken.
        process_group: of the ranks that have to agree; the default group where that is initialised.

    Raises:
        ConfigurationError: an argument is wrong, or not the same on every rank.
        NoBatchSizeError: no size that was tried fits; its cause is the last out-of-memory error, with its diagnosis.
        RankFailedError: `step` failed on another rank, otherwise than out of memory; or a rank has gone.
        Exception: what else `step` raises on this rank, unchanged, at once, after the other ranks were told.
    """
    start, maximum, multiple_of = operator.index(start), operator.index(maximum), operator.index(multiple_of)
    _check(start, maximum, multiple_of, margin, runs, max_tries)
    ranks = Ranks.of(process_group)
    cuda = torch.cuda.is_available()
    settings = {"start": start, "maximum": maximum, "multiple_of": multiple_of, "margin": margin}
    _agree(ranks, {"CUDA": cuda, **settings, "runs": runs, "max_tries": max_tries})
    if not cuda:
        no_cuda("find_batch_size")
        return BatchSizeSearch(start // multiple_of * multiple_of)

    torch.cuda.synchronize()  # there is a context from here on, so that the first try is measured, too
    bisection = Bisection(start // multiple_of, maximum // multiple_of)
    tries: list[BatchSizeTry] = []
    error: BaseException | None = None
    while len(tries) < max_tries and (units := bisection.next()) is not None:
        error = None  # it holds the last try's frames
        clear_cache(collect_garbage=True)
        tried, error = _try(step, units * multiple_of, runs, ranks)
        _log.info("batch size %s", str(tried).strip())
        tries.append(tried)
        bisection.tell(units, fits=tried.fits)
    error = None if bisection.fits else error
    clear_cache(collect_garbage=True)
    if not bisection.fits:
        sizes = _listed(tried.size for tried in tries)
        on = f"; the last one on rank {_listed(tries[-1].ranks_out_of_memory)}" if ranks.size > 1 else ""
        raise NoBatchSizeError(f"out of memory with every batch size that was tried: {sizes}{on}") from error
    units = max(1, int(bisection.fits * (1 - margin)))
    return BatchSizeSearch(units * multiple_of, bisection.fits * multiple_of, tuple(tries))


def _try(
    step: Callable[[int], object], size: int, runs: int, ranks: Ranks
) -> tuple[BatchSizeTry, BaseException | None]:
    """Run the step, and learn how the other ranks fared.

    Raises:
        RankFailedError: another rank failed otherwise.
        Exception: this one did.
    """
    error: BaseException | None = None
    used: list[MemoryUse] = []
    with no_training(), Measured("batch size", kept=False, ended=used.append):
        try:
            with oom_guard(batch_size=size, free_frames=True, clean=False):  # the next size needs the memory
                for _ in range(runs):
                    step(size)
                torch.cuda.synchronize()  # what fails later than it is called has failed in this try
        except Exception as raised:
            if not _says_out_of_memory(raised):
                with contextlib.suppress(
                    Exception
                ):  # the step's own error goes on, whether the others hear of it or not
                    ranks.gather(_FAILED)
                raise
            error = raised
    outcomes = ranks.gather(_FITS if error is None else _OUT_OF_MEMORY)
    failed = tuple(rank for rank, outcome in outcomes.items() if outcome == _FAILED)
    if failed:
        raise RankFailedError(
            f"the step of a batch of {size} has failed on rank {_listed(failed)}; the error there says why", failed
        )
    main = used[0].main if used else None
    tried = BatchSizeTry(
        size,
        fits=not any(outcomes.values()),
        peak_bytes=main.peak_bytes if main is not None and main.exact else None,
        ranks_out_of_memory=tuple(rank for rank, outcome in outcomes.items() if outcome) if ranks.size > 1 else (),
    )
    return tried, error


def _says_out_of_memory(error: BaseException) -> bool:
    """It is an out-of-memory error, or was raised from one."""
    at: BaseException | None = error
    for _ in range(8):
        if at is None or is_out_of_memory(at):
            break
        at = at.__cause__
    return at is not None and is_out_of_memory(at)


def _check(start: int, maximum: int, multiple_of: int, margin: float, runs: int, max_tries: int) -> None:
    """Refuse what nothing can be searched with.

    Raises:
        ConfigurationError: says what would be right.
    """
    for name, value in (("multiple of", multiple_of), ("runs", runs), ("max tries", max_tries)):
        if value < 1:
            raise ConfigurationError(f"{name} {value}; it must be at least 1")
    if not multiple_of <= start <= maximum:
        raise ConfigurationError(
            f"start {start} with multiple of {multiple_of} and maximum {maximum}; it must lie between these two"
        )
    if not 0 <= margin < 1:
        raise ConfigurationError(f"margin {margin}; it is a part of the batch, at least 0 and below 1")


def _agree(ranks: Ranks, settings: Mapping[str, float]) -> None:
    """Find out, before anything is tried, that all ranks will try the same.

    Raises:
        ConfigurationError: they would not.
    """
    for name, value in settings.items():
        values = ranks.gather(value)
        if len(set(values.values())) > 1:
            told = ", ".join(f"{value:g} on rank {rank}" for rank, value in values.items())
            raise ConfigurationError(f"find_batch_size must be called alike on every rank; {name} is {told}")


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))
