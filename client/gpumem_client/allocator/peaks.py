"""Detects resets of the allocator's peaks: a peak rises, and only a reset lets it fall.

A reset (by the user's code, a library or a `reset_peak` action) affects all peaks of a device, so any of them shows it.
A reset is not visible, and not counted, if no peak was above the current value, or if each peak has risen again before
the next reading. The reporter counts its own resets in any case.
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
    """Counts the resets of each device's peaks. For one thread at a time, except `resets`."""

    def __init__(self) -> None:
        self._peaks: dict[int, dict[str, int]] = {}
        self._resets: dict[int, int] = {}

    def look(self, index: int, state: Mapping[str, Any]) -> None:
        """Compare a device's peaks in its nested statistics with those of the previous call."""
        before = self._peaks.get(index, {})
        peaks = {name: state[name]["peak"] for name in _STATISTICS if name in state}
        self._peaks[index] = peaks
        if peaks != before and any(peaks.get(name, then) < then for name, then in before.items()):
            self._resets[index] = self._resets.get(index, 0) + 1

    def reset(self, index: int) -> None:
        """Count a reset that the client has made."""
        self._peaks.pop(index, None)
        self._resets[index] = self._resets.get(index, 0) + 1

    def forget(self, index: int) -> None:
        """Do not count a reset that the client has made and compensates for."""
        self._peaks.pop(index, None)

    def resets(self, index: int) -> int:
        """Return the number of resets. Any thread may call this."""
        return self._resets.get(index, 0)
