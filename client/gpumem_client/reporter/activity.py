"""How long the process has done nothing on its devices, as far as PyTorch and an inference engine show it."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable

# How long a process with CUDA graphs is known to be inactive. After that they may run: see `inactive_seconds`.
_GRAPHS_SECONDS = 60.0


class Activity:
    """Follows one process from report to report. For one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._active_seconds = clock()
        self._step: int | None = None
        self._allocations: Hashable = None
        self._graphs = False

    def inactive_seconds(
        self, *, step: int | None, allocations: Hashable, requests: int | None, graphs: bool = False
    ) -> float | None:
        """Return the time since the last sign of activity; None if there is none that could show it.

        `allocations` changes when the allocator allocates, and is None if that is not known at present; `requests` is
        the number of requests that the engine of the process has now. With `graphs`, the process may replay CUDA
        graphs, which allocate nothing and end no step.
        """
        graphs = graphs and requests is None
        changed = allocations is not None and allocations != self._allocations
        if changed or requests or step != self._step or (self._graphs and not graphs):
            self._active_seconds = self._clock()
        self._step, self._graphs = step, graphs
        self._allocations = self._allocations if allocations is None else allocations
        known = self._allocations is not None or step is not None
        seconds = self._clock() - self._active_seconds
        return seconds if known and not (graphs and seconds > _GRAPHS_SECONDS) else None
