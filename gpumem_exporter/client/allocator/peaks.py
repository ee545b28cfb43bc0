"""Notices that somebody has reset the peaks of PyTorch's allocator: they rise, and fall by a reset alone.

Whoever resets (the program, a library, a `reset_peak` action) resets all of a device's peaks at once, so it is seen by
any of them. A reset at which no peak stood above the present, or after which each has risen to where it was before the
next look, changes nothing that could be seen, and is not counted unless the reporter made it itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["PeakWatch"]

_STATISTICS = (
    "allocated_bytes",
    "reserved_bytes",
    "active_bytes",
    "requested_bytes",
    "inactive_split_bytes",
    "allocation",
    "segment",
    "active",
    "inactive_split",
)


class PeakWatch:
    """Counts the resets of each device's peaks since it was made. One thread at a time, but for `resets`."""

    def __init__(self) -> None:
        self._peaks: dict[int, tuple[int | None, ...]] = {}
        self._resets: dict[int, int] = {}

    def look(self, index: int, state: Mapping[str, Any]) -> None:
        """Compare a device's peaks, as its nested statistics have them now, with those of the last look."""
        peaks = tuple([state.get(name, {}).get("all", {}).get("peak") for name in _STATISTICS])
        before = self._peaks.get(index)
        self._peaks[index] = peaks
        if before is not None and any(
            then is not None and now is not None and now < then for then, now in zip(before, peaks, strict=True)
        ):
            self._resets[index] = self._resets.get(index, 0) + 1

    def reset(self, index: int) -> None:
        """The reporter itself has just reset them."""
        self._peaks.pop(index, None)
        self._resets[index] = self._resets.get(index, 0) + 1

    def begin_anew(self, index: int) -> None:
        """They have been reset in a way that is made up for: the next look has nothing to compare with."""
        self._peaks.pop(index, None)

    def resets(self, index: int) -> int:
        """How many there were. Any thread may ask."""
        return self._resets.get(index, 0)
