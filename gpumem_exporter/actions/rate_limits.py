"""How many actions per minute a caller may request, and a process may get from all callers."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterable

from gpumem_exporter.errors import TooManyActionsError

_MAX_BUCKETS = 4096
_MINUTE_SECONDS = 60.0
# The error of adding up such times, if the clock has run for years.
_ROUNDING_SECONDS = 1e-5


class RateLimits:
    """Counts the actions per minute of each caller, and on each process from all callers. Not thread-safe.

    A caller may use the limit of a whole minute at once. `what` names what is counted, for messages.
    """

    def __init__(self, *, per_caller: int, per_process: int, clock: Callable[[], float], what: str = "actions") -> None:
        self._per_caller = per_caller
        self._per_process = per_process
        self._clock = clock
        self._what = what
        # When each bucket that was used recently is full again, by what it counts and its size: a lower limit of a kind
        # of action has buckets of its own, which the other kinds do not use up.
        self._full_at: defaultdict[tuple[str, int], OrderedDict[Hashable, float]] = defaultdict(OrderedDict)

    def take(self, caller: str, processes: Iterable[tuple[Hashable, str]], *, per_process: int | None = None) -> None:
        """Count one action on these processes, given as keys and names for messages.

        `per_process` is a lower limit for this kind of action. Raises TooManyActionsError if a limit is reached; then
        nothing is counted.
        """
        now, what = self._clock(), self._what
        taken: list[tuple[str, int, Hashable, str]] = [
            ("caller", self._per_caller, caller, f"{caller} has requested {self._per_caller} {what}")
        ]
        for key, name in processes:
            taken.append(("process", self._per_process, key, f"{name} has had {self._per_process} {what}"))
            if per_process is not None:
                taken.append(("kind", per_process, key, f"{name} has had {per_process} {what} of this kind"))
        for counted, size, owner, reached in taken:
            full_seconds = max(0.0, self._full_at[counted, size].get(owner, now) - now)
            wait_seconds = full_seconds + _MINUTE_SECONDS / size - _MINUTE_SECONDS
            if wait_seconds > _ROUNDING_SECONDS:
                raise TooManyActionsError(f"{reached} within a minute", wait_seconds)
        for counted, size, owner, _ in taken:
            buckets = self._full_at[counted, size]
            buckets[owner] = max(now, buckets.get(owner, now)) + _MINUTE_SECONDS / size
            buckets.move_to_end(owner)
            # The bucket that was used longest ago is the most likely to be full again, like a new bucket.
            while len(buckets) > _MAX_BUCKETS:
                buckets.popitem(last=False)
