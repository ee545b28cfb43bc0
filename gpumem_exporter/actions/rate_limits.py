"""How many actions per minute a caller may request, and a process may get from all callers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable

from gpumem_exporter.errors import TooManyActionsError

_MAX_BUCKETS = 4096
_MINUTE_SECONDS = 60.0


class RateLimits:
    """Counts the actions per minute of each caller, and on each process from all callers. Not thread-safe.

    A caller may use the limit of a whole minute at once. `what` names what is counted, for messages.
    """

    def __init__(self, *, per_caller: int, per_process: int, clock: Callable[[], float], what: str = "actions") -> None:
        self._clock = clock
        self._what = what
        self._callers = _Buckets(per_caller)
        self._processes = _Buckets(per_process)
        # By the lower limit of a kind of action, which the other kinds do not use up.
        self._kinds: dict[int, _Buckets] = {}

    def take(self, caller: str, processes: Iterable[tuple[Hashable, str]], *, per_process: int | None = None) -> None:
        """Count one action on these processes, given as keys and names for messages.

        `per_process` is a lower limit for this kind of action. Raises TooManyActionsError if a limit is reached; then
        nothing is counted.
        """
        now = self._clock()
        taken: list[tuple[_Buckets, Hashable, str]] = [
            (self._callers, caller, f"{caller} has requested {self._callers.size} {self._what}")
        ]
        for key, name in processes:
            taken.append((self._processes, key, f"{name} has had {self._processes.size} {self._what}"))
            if per_process is not None:
                kind = self._kinds.setdefault(per_process, _Buckets(per_process))
                taken.append((kind, key, f"{name} has had {per_process} {self._what} of this kind"))
        for buckets, owner, reached in taken:
            wait = buckets.wait_seconds(owner, now)
            if wait > 0:
                raise TooManyActionsError(f"{reached} within a minute", wait)
        for buckets, owner, _ in taken:
            buckets.take(owner, now)


class _Buckets:
    """A bucket for each key that was used recently."""

    def __init__(self, size: int) -> None:
        self.size = size
        # The level of each bucket, and when it had that level.
        self._levels: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()

    def wait_seconds(self, key: Hashable, now: float) -> float:
        """Return the seconds until an action is permitted; 0 if one is permitted now."""
        missing = 1.0 - self._level(key, now)
        return missing * _MINUTE_SECONDS / self.size if missing > 1e-9 else 0.0

    def take(self, key: Hashable, now: float) -> None:
        self._levels[key] = self._level(key, now) - 1.0, now
        self._levels.move_to_end(key)
        # The bucket that was used longest ago is the most likely to be full again, like a new bucket.
        while len(self._levels) > _MAX_BUCKETS:
            self._levels.popitem(last=False)

    def _level(self, key: Hashable, now: float) -> float:
        level, since = self._levels.get(key, (float(self.size), now))
        return min(float(self.size), level + max(0.0, now - since) * self.size / _MINUTE_SECONDS)
