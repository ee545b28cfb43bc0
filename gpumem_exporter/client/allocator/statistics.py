"""The allocator's statistics for code that runs in the program's own threads, without a reporter.

`Allocator` is the reporter's view: it hooks into captures and walks heaps. This one only reads, in 10 µs a device, and
like it touches nothing but a torch that the program has imported and initialised itself.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

__all__ = ["Statistics", "initialised_torch"]

_MANY_POOLS = 32
"""Torch never forgets a dead private pool; with more than this, the statistics that list them are not asked for."""


def initialised_torch() -> Any | None:
    """The program's torch, once CUDA is initialised in this process; None before, without torch, and in a fork of it.

    `torch.cuda.is_initialized()` knows forked children: the raw calls answer there with the parent's bytes, or never.
    """
    torch = sys.modules.get("torch")
    initialised = getattr(getattr(torch, "cuda", None), "is_initialized", None)
    return torch if initialised is not None and initialised() else None


class Statistics:
    """Reads the statistics of one process' devices. Any thread may."""

    def __init__(self, torch: Any) -> None:
        self._cuda = torch.cuda
        self._c = torch._C
        self._many_pools: set[int] = set()

    def devices(self) -> list[int]:
        """The indices of the devices on which this process has a context: the only ones it can hold memory on."""
        has_context = self._c._cuda_hasPrimaryContext
        return [index for index in range(self._cuda.device_count()) if has_context(index)]

    def state(self, index: int) -> Mapping[str, Any] | None:
        """The nested statistics of one device now; None from an allocator that keeps none."""
        try:
            if index in self._many_pools:
                return dict(self._c._accelerator_getDeviceStats(index))
            state: dict[str, Any] = self._c._cuda_memoryStats(index)
        except (AttributeError, RuntimeError):
            return None
        pools = state.get("reserved_bytes_by_private_pools", ())  # 2.13 and later
        if len(pools) > _MANY_POOLS and hasattr(self._c, "_accelerator_getDeviceStats"):
            self._many_pools.add(index)
        return state

    def reset_peaks(self, index: int) -> None:
        """Let every peak of one device begin anew at the present value."""
        self._c._cuda_resetPeakMemoryStats(index)
