"""How many actions a caller may ask for, and a process may be asked: a bucket each, filled by the minute."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence

from gpumem_exporter.errors import TooManyActionsError

__all__ = ["RateLimits", "retry_after"]

_KNOWN = 4096
_MINUTE_SECONDS = 60.0


class RateLimits:
    """Counts actions. A minute's worth may come at once; after that they come as the minute passes. Not thread-safe.

    Args:
        per_caller: actions a minute of one caller.
        per_process: actions a minute on one process, whoever asks.
        clock: monotonic seconds.
    """

    def __init__(self, *, per_caller: int, per_process: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._callers = _Buckets(per_caller)
        self._processes = _Buckets(per_process)

    def take(self, caller: str, processes: Sequence[tuple[Hashable, str]]) -> None:
        """Count one action of a caller on these processes, each with the name that a message calls it by.

        Raises:
            TooManyActionsError: one of them has had its share; nothing is counted then.
        """
        now = self._clock()
        wait = self._callers.wait_seconds(caller, now)
        if wait > 0:
            raise TooManyActionsError(f"{caller} has asked for {self._callers.size} actions within a minute", wait)
        for process, name in processes:
            wait = self._processes.wait_seconds(process, now)
            if wait > 0:
                raise TooManyActionsError(f"{name} was asked {self._processes.size} times within a minute", wait)
        self._callers.take(caller, now)
        for process, _ in processes:
            self._processes.take(process, now)


class _Buckets:
    """One bucket for each of those who asked lately."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._left: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()

    def wait_seconds(self, who: Hashable, now: float) -> float:
        """How long until there is one; 0 when there is."""
        lacking = 1.0 - self._now(who, now)
        return max(0.0, lacking * _MINUTE_SECONDS / self.size) if lacking > 1e-9 else 0.0

    def take(self, who: Hashable, now: float) -> None:
        self._left[who] = self._now(who, now) - 1.0, now
        self._left.move_to_end(who)
        while len(self._left) > _KNOWN:
            self._left.popitem(last=False)

    def _now(self, who: Hashable, now: float) -> float:
        left, since = self._left.get(who, (float(self.size), now))
        return min(float(self.size), left + max(0.0, now - since) * self.size / _MINUTE_SECONDS)


def retry_after(seconds: float) -> str:
    """As the header `Retry-After` has it: whole seconds, 1 at least."""
    return str(max(1, math.ceil(seconds)))
