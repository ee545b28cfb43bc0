"""Searches for the largest batch size that fits, with a few traces and lines through them."""

from __future__ import annotations

from collections.abc import Callable

from gpumem_exporter.training.planning.job import Job
from gpumem_exporter.training.planning.trace import Line, Peaks, Trace, blend, replay

__all__ = ["Sizing"]

LARGEST = 1 << 20
_NEAR, _FAR = 4, 8
_TRIES = 24
_SPREAD = ("parameters", "gradients", "optimizer")


class Sizing:
    """The traces and peaks of one job at any batch size, each computed once. Not thread-safe."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._traces: dict[int, Trace] = {}
        self._peaks: dict[tuple[int, int | None], Peaks] = {}

    def trace(self, batch: int) -> Trace:
        """Return the allocations of the job at a batch size.

        Raises:
            ConfigurationError: the job's own code failed.
        """
        if batch not in self._traces:
            self._traces[batch] = self._make(batch)
        return self._traces[batch]

    def sharded(self, shards: int) -> Sizing:
        """Return the sizing with parameters, gradients and optimizer state divided by the number of devices."""
        return _Sharded(self, shards)

    def _make(self, batch: int) -> Trace:
        from gpumem_exporter.training.planning.simulation import trace_job

        return trace_job(self.job, batch)

    def peaks(self, batch: int, free_bytes: int | None = None) -> Peaks:
        """Return the peaks on a device with this number of free bytes; None means unlimited."""
        key = batch, free_bytes
        if key not in self._peaks:
            self._peaks[key] = replay(self.trace(batch), free_bytes)
        return self._peaks[key]

    def largest(self, limit_bytes: int, multiple_of: int = 1) -> int:
        """Return the largest batch size that runs within the limit; 0 if no size does.

        A size fits even if the allocator has to flush its cache. A line through the traces of two sizes estimates the
        largest size. The trace of the estimate shows whether it fits, and is one end of the next line.
        """
        line = self._line(_NEAR * multiple_of, _FAR * multiple_of)
        fits = self._fitting(limit_bytes, multiple_of)
        low, high = 0, max(1, LARGEST // multiple_of) + 1  # in units of multiple_of: low fits, high does not
        guess = _FAR
        for _ in range(_TRIES):
            low, high = (guess, high) if fits(guess) else (low, guess)
            if high - low <= 1:
                break
            if line is None:
                guess = 2 * low if high > LARGEST // multiple_of else (low + high) // 2
                continue
            estimate = _largest(line, limit_bytes, multiple_of, low, high)
            if estimate == low:
                break
            line = self._line(low * multiple_of or _NEAR * multiple_of, estimate * multiple_of) or line
            guess = estimate
        return low * multiple_of

    def _fitting(self, limit_bytes: int, multiple_of: int) -> Callable[[int], bool]:
        return lambda units: not self.peaks(units * multiple_of, limit_bytes).out_of_memory

    def _line(self, a: int, b: int) -> Line | None:
        return None if a == b else blend(self.trace(a), a, self.trace(b), b)


def _largest(line: Line, limit_bytes: int, multiple_of: int, low: int, high: int) -> int:
    """Return the largest number of units from `low` to below `high` that fits according to a line."""
    step = 1
    while high - low > 1:
        # The steps double, so that few large batches are replayed: they take longest.
        middle = min(low + step, (low + high) // 2)
        if replay(line.at(middle * multiple_of), limit_bytes).out_of_memory:
            high = middle
        else:
            low, step = middle, 2 * step
    return low


class _Sharded(Sizing):
    """The traces of another sizing, with parameters, gradients and optimizer state divided."""

    def __init__(self, whole: Sizing, shards: int) -> None:
        super().__init__(whole.job)
        self._whole = whole
        self._shards = shards

    def _make(self, batch: int) -> Trace:
        whole = self._whole.trace(batch)
        sizes = [
            -(-size // self._shards) if kind in _SPREAD else size
            for size, kind in zip(whole.sizes, whole.kinds, strict=True)
        ]
        return Trace(whole.events, sizes, whole.kinds)
