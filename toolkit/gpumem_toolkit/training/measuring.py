"""The time of a run, the memory of repeated runs, and the distance between their results."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
from torch import Tensor

from gpumem_client.allocator.reclaimable import known
from gpumem_client.torch_access import Statistics

__all__ = ["HighestMemory", "distance_ratio", "run_seconds"]


def run_seconds(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of one run, including the device's work."""
    _synchronize(device)
    started = time.perf_counter()
    run()
    _synchronize(device)
    return time.perf_counter() - started


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class HighestMemory:
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


def distance_ratio(kept: Tensor, tensor: Tensor) -> float:
    """Return the distance of a tensor from `kept`, divided by the norm of `kept`. Both are on the CPU."""
    before = kept.to(torch.float64).flatten()
    size, distance = float(before.norm()), float((tensor.to(torch.float64).flatten() - before).norm())
    if not distance:
        return 0.0
    return distance / size if size else math.inf
