"""Tries one batch size with real training steps, on all ranks."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum

import torch

from gpumem_client import clear_cache
from gpumem_client.allocator.reclaimable import known
from gpumem_client.hooks.out_of_memory import out_of_memory_in
from gpumem_client.hooks.steps import no_training
from gpumem_client.phases.measured_block import Measured, MemoryUse
from gpumem_client.torch_access import Statistics
from gpumem_client.wire.units import ShownAsText, human_bytes
from gpumem_toolkit.errors import RankFailedError
from gpumem_toolkit.oom.guard import oom_guard
from gpumem_toolkit.training.ranks import Ranks

_log = logging.getLogger("gpumem_toolkit")
# The memory of a size has stopped growing if this number of runs reaches no new maximum on any rank.
_SETTLING_RUNS = 8


@dataclass(frozen=True, slots=True)
class BatchSizeTry(ShownAsText):
    """One batch size that was tried."""

    size: int
    fits: bool
    """Whether the size fits on every rank."""
    peak_bytes: int | None = None
    """The peak on this rank; None if it did not raise the allocator's own peak, which is never reset."""
    ranks_out_of_memory: tuple[int, ...] = ()
    """The global ranks on which the size did not fit; empty in a process that trains alone."""
    runs: int = 0
    """Completed calls of `step` on this rank."""

    def __str__(self) -> str:
        outcome = "fits" if self.fits else "out of memory"
        if self.ranks_out_of_memory:
            outcome += f" on rank {join_numbers(self.ranks_out_of_memory)}"
        return f"{self.size:>8}  {human_bytes(self.peak_bytes):>9}  {self.runs:>4}  {outcome}"


class _Outcome(IntEnum):
    """What some runs with a batch size came to on one rank."""

    FITS = 0
    GROWS = 1
    """The runs fit, and the memory still reached a new maximum."""
    OUT_OF_MEMORY = 2
    FAILED = 3


class _HighestMemory:
    """The highest reserved bytes, and the highest allocated bytes between two steps, of each device so far."""

    def __init__(self) -> None:
        self._statistics = Statistics(torch)
        self._highest: dict[tuple[int, str], int] = {}

    def rises(self) -> bool:
        """Read the memory. Returns whether it is higher than in all earlier calls."""
        rose = False
        for device in self._statistics.devices():
            state = self._statistics.state(device)
            for name in ("reserved_bytes", "allocated_bytes"):
                now = known(state, name) or 0
                rose = rose or now > self._highest.get((device, name), 0)
                self._highest[device, name] = max(now, self._highest.get((device, name), 0))
        return rose


class Trial:
    """Tries batch sizes, one after the other. All ranks call it in the same order. `step` runs `runs` times at first.

    `error` is the out-of-memory error of the last try on this rank, with its frames; None if the size fits.
    """

    def __init__(self, step: Callable[[int], object], runs: int, ranks: Ranks) -> None:
        self.error: BaseException | None = None
        self._step = step
        self._runs = runs
        self._ranks = ranks
        self._done = 0
        self._highest = _HighestMemory()

    def run(self, size: int, max_runs: int) -> BatchSizeTry:
        """Run the step until memory stops growing or `max_runs` is reached, the same number of times on all ranks."""
        self.error = None  # frees the frames of the last try
        clear_cache(collect_garbage=True)
        self._done, self._highest = 0, _HighestMemory()
        used: list[MemoryUse] = []
        runs = min(self._runs, max_runs)
        with no_training(), Measured("batch size", kept=False, ended=used.append):
            while True:
                outcomes = self._outcomes(size, runs)
                worst = max(outcomes.values())
                runs = min(_SETTLING_RUNS, max_runs - self._done)
                if worst != _Outcome.GROWS or not runs:
                    break
        if worst == _Outcome.GROWS and max_runs > self._runs:
            _log.warning("the memory of batch size %d still grows after %d runs", size, self._done)
        main = used[0].main if used else None
        failed = tuple(rank for rank, outcome in outcomes.items() if outcome == _Outcome.OUT_OF_MEMORY)
        return BatchSizeTry(
            size,
            fits=not failed,
            peak_bytes=main.peak_bytes if main is not None and main.exact else None,
            ranks_out_of_memory=failed if self._ranks.size > 1 else (),
            runs=self._done,
        )

    def _outcomes(self, size: int, runs: int) -> dict[int, float]:
        """Run the step and return the outcome of each rank. Raises errors other than out of memory."""
        outcome = _Outcome.FITS
        try:
            with oom_guard(batch_size=size, free_frames=True, clean=False):  # frees memory for the next size
                for _ in range(runs):
                    self._step(size)
                    self._done += 1
                    if self._highest.rises():
                        outcome = _Outcome.GROWS
                torch.cuda.synchronize()  # raises asynchronous errors in this try
        except Exception as raised:
            if out_of_memory_in(raised) is None:
                # The other ranks wait for this outcome, until the group's timeout. The error of the step is more
                # important than an error of the exchange.
                with contextlib.suppress(Exception):
                    self._ranks.gather(_Outcome.FAILED)
                raise
            self.error, outcome = raised, _Outcome.OUT_OF_MEMORY
        outcomes = self._ranks.gather(outcome)
        failed = tuple(rank for rank, each in outcomes.items() if each == _Outcome.FAILED)
        if failed:
            raise RankFailedError(
                f"the step with a batch of {size} failed on rank {join_numbers(failed)}; see the error of that rank",
                failed,
            )
        return outcomes


def join_numbers(numbers: Iterable[int]) -> str:
    """Return numbers as a text, with commas."""
    return ", ".join(map(str, numbers))
