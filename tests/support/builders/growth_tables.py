"""Jobs over time, for what finds growth: leaks in one process, and jobs that never grow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

Minutes = float
Sizes = Mapping[tuple[int, str], tuple[int, float]]
"""By rank and session, the device and the GiB that a process keeps in tensors."""
ACTIVATION_GIB = 0.5
"""What a step uses besides."""


class Leak(NamedTuple):
    """A job of which rank 0 leaks. Each rank has a device of its own."""

    ranks: int
    gib: float
    gib_per_hour: float
    device_gib: float

    @property
    def end(self) -> Minutes:
        """When rank 0 runs out of memory."""
        return (self.device_gib - self.gib - ACTIVATION_GIB) / self.gib_per_hour * 60

    def sizes(self, now: Minutes) -> Sizes:
        """Return the processes after this time."""
        leaked = self.gib_per_hour * now / 60
        return {(rank, "1"): (rank, self.gib + (leaked if rank == 0 else 0)) for rank in range(self.ranks)}


LEAKS = (Leak(1, 60, 12, 80), Leak(8, 60, 12, 70), Leak(8, 70, 12, 80), Leak(8, 4, 6, 8), Leak(2, 10, 6, 16))


def _started_again(now: Minutes) -> Sizes:
    return {(rank, "1" if now < 30 else "2"): (rank, 4) for rank in range(8) if now < 28 or now >= 30 + 3 * rank}


def _rolling_restart(now: Minutes) -> Sizes:
    """One rank each minute, from the tenth on, is absent for ten seconds."""
    moved = now - 10
    return {(rank, "1" if moved < rank else "2"): (rank, 4) for rank in range(8) if not 0 <= moved - rank < 1 / 6}


def _curriculum(now: Minutes) -> Sizes:
    return {(rank, "1"): (rank, 10 + 4 * sum(now >= stage for stage in (15, 30, 45))) for rank in range(2)}


STEADY: Mapping[str, Callable[[Minutes], Sizes]] = {
    "a replica each 3 minutes": lambda now: {(rank, "1"): (rank, 4) for rank in range(8) if now >= 3 * rank},
    "replicas on one device": lambda now: {(rank, "1"): (0, 4) for rank in range(8) if now >= 3 * rank},
    "a sweep, a run each 2 minutes": lambda now: {(0, str(int(now // 2))): (0, 4)},
    "a worker each 10 minutes": lambda now: {(rank, "1"): (rank, 4) for rank in range(7) if now >= 10 * rank},
    "replicas that start again": _started_again,
    "a rolling restart": _rolling_restart,
    "a curriculum of four stages": _curriculum,
}
"""Jobs whose processes never grow for long, by description."""
