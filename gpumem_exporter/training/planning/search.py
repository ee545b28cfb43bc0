"""The largest batch size that fits: a few traces, and lines through them."""

from __future__ import annotations

from collections.abc import Callable

from gpumem_exporter.training.planning.job import Job
from gpumem_exporter.training.planning.replay import Peaks, replay
from gpumem_exporter.training.planning.trace import Line, Trace, blend

__all__ = ["Sizing"]

LARGEST = 1 << 20
_NEAR, _FAR = 4, 8
_TRIES = 24
_SPREAD = ("parameters", "gradients", "optimizer")


class Sizing:
    """One job at any batch size. A trace is made once for each size that is asked for; not thread-safe.

    Args:
        job: what is traced.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self._traces: dict[int, Trace] = {}
        self._peaks: dict[tuple[int, int | None], Peaks] = {}

    def trace(self, batch: int) -> Trace:
        """What the job allocates at that batch size.

        Raises:
            ConfigurationError: the job's own code failed.
        """
        if batch not in self._traces:
            self._traces[batch] = self._make(batch)
        return self._traces[batch]

    def sharded(self, shards: int) -> Sizing:
        """The same with parameters, gradients and optimizer state spread over that many devices."""
        return _Sharded(self, shards)

    def _make(self, batch: int) -> Trace:
        from gpumem_exporter.training.planning.simulation import trace_job

        return trace_job(self.job, batch)

    def peaks(self, batch: int, free_bytes: int | None = None) -> Peaks:
        """What it takes of a device with that many bytes free; None: of one that has enough."""
        key = batch, free_bytes
        if key not in self._peaks:
            self._peaks[key] = replay(self.trace(batch), free_bytes)
        return self._peaks[key]

    def largest(self, limit_bytes: int, multiple_of: int = 1) -> int:
        """The largest batch size that runs within the limit; 0 when none does.

        The cache may be flushed for it: with a margin above the limit, it then hardly ever is.
        Lines through the traces of two sizes give an estimate, whose own trace decides and is an end of the next line.
        """
        line = self._line(_NEAR * multiple_of, _FAR * multiple_of)
        fits = self._fitting(limit_bytes, multiple_of)
        low, high = 0, max(1, LARGEST // multiple_of) + 1  # low fits, high does not, in multiples
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
    """The largest number of multiples from `low` on, below `high`, that fits by a line."""
    step = 1
    while high - low > 1:
        # Doubling steps first: replaying a trace costs the more, the less bounded the search is.
        middle = min(low + step, (low + high) // 2)
        if replay(line.at(middle * multiple_of), limit_bytes).out_of_memory:
            high = middle
        else:
            low, step = middle, 2 * step
    return low


class _Sharded(Sizing):
    """Another's traces, with what can be spread over devices divided."""

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
