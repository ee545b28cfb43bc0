"""Searches for the largest batch size that fits, with two traces, the line through them, and a third trace."""

from __future__ import annotations

from collections.abc import Callable

from gpumem_toolkit.planning.job import Job
from gpumem_toolkit.planning.trace import Line, Peaks, Trace, proportional, replay

LARGEST = 1 << 20
_NEAR = 4
_LINES = 4
_TRIES = 24
_SPREAD = ("parameters", "gradients", "optimizer")


class Sizing:
    """The traces of one job at any batch size, as `make` returns them. Calls `notify` before. Not thread-safe."""

    def __init__(
        self, job: Job, notify: Callable[[int], None] = lambda _: None, make: Callable[[int], Trace] | None = None
    ) -> None:
        self.job = job
        self._notify = notify
        self._make = make or self._trace_job
        self._traces: dict[int, Trace] = {}

    def trace(self, batch: int) -> Trace:
        """Record the allocations of the job at a batch size; each size is recorded once."""
        if batch not in self._traces:
            self._notify(batch)
            self._traces[batch] = self._make(batch)
        return self._traces[batch]

    def sharded(self, shards: int, gathered_bytes: int) -> Sizing:
        """Return the sizing of the model as `fully_shard` divides it over this number of devices.

        `gathered_bytes` are the bytes of whole parameters and of buffers of collectives.
        """

        def make(batch: int) -> Trace:
            whole = self.trace(batch)
            pairs = zip(whole.sizes, whole.kinds, strict=True)
            sizes = [-(-size // shards) if kind in _SPREAD else size for size, kind in pairs]
            # What is whole at the same time, and the buffers of the collectives, are allocated first, and stay.
            return Trace([len(sizes), *whole.events], [*sizes, gathered_bytes], [*whole.kinds, "parameters"])

        return Sizing(self.job, make=make)

    def peaks(self, batch: int, free_bytes: int | None = None) -> Peaks:
        """Return the peaks on a device with this number of free bytes; None means unlimited."""
        return replay(self.trace(batch), free_bytes)

    def largest(self, limit_bytes: int, multiple_of: int = 1, *, recorded: bool = True) -> int:
        """Return the largest batch size that runs within the limit; 0 if no size does.

        A size fits even if the allocator has to flush its cache. Unless `recorded` is false, a trace at the found size
        confirms it. If two traces have different events, the search records a trace for each size that it tries.
        """
        # Tracing takes most of the time: two traces give a line on which all other sizes are tried. The second one is
        # where the first, extrapolated, reaches the limit, so that the line is exact where it counts.
        near = _NEAR * multiple_of
        guess = _reach(proportional(self.trace(near), near), limit_bytes, multiple_of, _NEAR)
        far = guess * multiple_of if guess != _NEAR else 2 * near
        for _ in range(_LINES):
            line = Line(self.trace(near), near, self.trace(far), far)
            if line.small.events != line.large.events or near == far:
                break
            largest = _largest(line, limit_bytes, multiple_of, far // multiple_of) * multiple_of
            if not (largest and recorded) or _fits(self.trace(largest), limit_bytes):
                return largest
            far = largest
        search = Bisection(guess, max(1, LARGEST // multiple_of))
        for _ in range(_TRIES):
            units = search.next()
            if units is None:
                break
            search.record(units, fits=_fits(self.trace(units * multiple_of), limit_bytes))
        return search.fits * multiple_of

    def _trace_job(self, batch: int) -> Trace:
        from gpumem_toolkit.planning.simulation import trace_job

        return trace_job(self.job, batch)


def _reach(line: Line, limit_bytes: int, multiple_of: int, start: int) -> int:
    """Extrapolate at how many units the reserved bytes reach the limit, if they grow linearly; at least 1."""
    low, high = (replay(line.at(units * multiple_of)).reserved_bytes for units in (start, 2 * start))
    reach = start + (limit_bytes - low) * start // max(1, high - low)
    return max(1, min(LARGEST // multiple_of, reach))


def _largest(line: Line, limit_bytes: int, multiple_of: int, start: int) -> int:
    """Return the largest number of units of a batch that fits according to a line; 0 if none does."""
    most = max(1, LARGEST // multiple_of)
    tried, step = _reach(line, limit_bytes, multiple_of, start), 1
    fits, fails = 0, most + 1
    while fails - fits > 1:
        if _fits(line.at(tried * multiple_of), limit_bytes):
            fits = tried
        else:
            fails = tried
        if fits and fails <= most:
            tried = (fits + fails) // 2
        else:
            tried = min(most, fits + step) if fits else max(1, fails - step)
            step *= 2
    # A larger size may fit although a smaller one does not: its blocks may fill the cache better, so that the reserved
    # bytes fall.
    for units in range(min(most, fits + fits // 8), fits, -max(1, fits // 64)):
        if _fits(line.at(units * multiple_of), limit_bytes):
            return units
    return fits


def _fits(trace: Trace, limit_bytes: int) -> bool:
    return not replay(trace, limit_bytes).out_of_memory


class Bisection:
    """Chooses the next number to try: doubles while numbers fit, halves while they do not, then bisects.

    `fits` is the largest number that fits so far, `fails` the smallest number that does not.
    """

    def __init__(self, start: int, maximum: int) -> None:
        self.fits = 0
        self.fails = maximum + 1
        self._start, self._maximum = start, maximum

    def next(self) -> int | None:
        """Return the next number; None once the largest number that fits is known."""
        if self.fails - self.fits <= 1:
            return None
        if self.fails > self._maximum:  # nothing has failed yet
            return min(2 * self.fits, self._maximum) if self.fits else self._start
        return (self.fits + self.fails) // 2

    def record(self, number: int, *, fits: bool) -> None:
        """Record whether this number fitted."""
        if fits:
            self.fits = number
        else:
            self.fails = number
