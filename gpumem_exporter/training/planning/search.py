"""Searches for the largest batch size that fits, with a few traces and lines through them."""

from __future__ import annotations

from gpumem_exporter.training.bisection import Bisection
from gpumem_exporter.training.planning.job import Job
from gpumem_exporter.training.planning.trace import Line, Peaks, Trace, blend, replay

__all__ = ["Sizing"]

LARGEST = 1 << 20
_NEAR, _FAR = 4, 8
_TRIES = 24
_SPREAD = ("parameters", "gradients", "optimizer")


class Sizing:
    """The traces of one job at any batch size, each recorded once. Not thread-safe."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._traces: dict[int, Trace] = {}

    def trace(self, batch: int) -> Trace:
        """Return the allocations of the job at a batch size. Raises ConfigurationError if the job's code fails."""
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
        return replay(self.trace(batch), free_bytes)

    def largest(self, limit_bytes: int, multiple_of: int = 1) -> int:
        """Return the largest batch size that runs within the limit; 0 if no size does.

        A size fits even if the allocator has to flush its cache. A line through the traces of two sizes estimates the
        largest size. The trace of the estimate shows whether it fits, and is one end of the next line.
        """
        line = self._line(_NEAR * multiple_of, _FAR * multiple_of)
        search = Bisection(_FAR, max(1, LARGEST // multiple_of))  # in units of multiple_of
        guess: int | None = _FAR
        for _ in range(_TRIES):
            if guess is None:
                break
            search.record(guess, fits=_fits(self.trace(guess * multiple_of), limit_bytes))
            guess = search.next()
            if line is not None and guess is not None:
                guess = _estimate(line, limit_bytes, multiple_of, search)
                if guess == search.fits:
                    break
                line = self._line(search.fits * multiple_of or _NEAR * multiple_of, guess * multiple_of) or line
        return search.fits * multiple_of

    def _line(self, a: int, b: int) -> Line | None:
        return None if a == b else blend(self.trace(a), a, self.trace(b), b)


def _estimate(line: Line, limit_bytes: int, multiple_of: int, search: Bisection) -> int:
    """Return the largest number of units that fits according to a line, from `search.fits` to below `search.fails`."""
    more = Bisection(1, search.fails - search.fits - 1)  # doubles first: large batches take longest to replay
    while (units := more.next()) is not None:
        more.record(units, fits=_fits(line.at((search.fits + units) * multiple_of), limit_bytes))
    return search.fits + more.fits


def _fits(trace: Trace, limit_bytes: int) -> bool:
    return not replay(trace, limit_bytes).out_of_memory


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
