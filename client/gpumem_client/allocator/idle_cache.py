"""Keeps the idle cache of each device: the smallest reclaimable value of the last minute, or of a longer time."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gpumem_client.wire.protocol import DeviceSample

IDLE_CACHE_SECONDS = 60.0
"""The window of the idle cache."""
# Readings are kept for this number of windows, for a job whose last steps are older than one window.
_LONGEST_WINDOWS = 5
# After a longer gap between two readings, as a share of the window, the window starts again: too little is known of it.
_GAP_SHARE = 0.5


@dataclass
class _Device:
    """The readings of one device."""

    since_seconds: float
    last: DeviceSample
    last_seconds: float
    minima: tuple[tuple[float, int], ...] = ()
    """Times and values of the readings that are not above any later reading. The first one is the minimum."""


class IdleCache:
    """The smallest reclaimable value of each device within a window. One thread at a time may call `note`."""

    def __init__(self) -> None:
        self.window_seconds = IDLE_CACHE_SECONDS
        self.retried_seconds = float("-inf")
        """When a reading last showed that the allocator had retried an allocation."""
        self._devices: dict[str, _Device] = {}

    def note(self, reading: DeviceSample, now_seconds: float) -> None:
        """Add a reading. If its reclaimable value is unknown, the window of its device starts again."""
        reclaimable = reading.reclaimable_bytes
        device = self._devices.get(reading.uuid)
        if reclaimable is None:
            self._devices.pop(reading.uuid, None)
            return
        if device is None or now_seconds - device.last_seconds > _GAP_SHARE * self.window_seconds:
            device = self._devices[reading.uuid] = _Device(now_seconds, reading, now_seconds)
        least = min(reclaimable, self._least_since(device.last, reading, now_seconds))
        device.last, device.last_seconds = reading, now_seconds
        oldest_seconds = now_seconds - _LONGEST_WINDOWS * self.window_seconds
        kept = [(seconds, value) for seconds, value in device.minima if seconds >= oldest_seconds and value < least]
        device.minima = (*kept, (now_seconds, least))

    def bytes(self, uuid: str, now_seconds: float, since_seconds: float = math.inf) -> int | None:
        """Return the idle cache of a device; None before the first reading is as old as the window. Thread-safe.

        Readings since `since_seconds` count even if they are older than the window, up to five windows.
        """
        device = self._devices.get(uuid)
        if device is None or now_seconds - device.since_seconds < self.window_seconds:
            return None
        longest, shortest = (now_seconds - windows * self.window_seconds for windows in (_LONGEST_WINDOWS, 1))
        oldest_seconds = max(longest, min(shortest, since_seconds))
        return next((value for seconds, value in device.minima if seconds >= oldest_seconds), None)

    def _least_since(self, before: DeviceSample, now: DeviceSample, now_seconds: float) -> int:
        """Return an upper bound for the smallest reclaimable value between two readings, as the second one shows it."""
        # An allocation that the allocator retried released all reclaimable memory first.
        if (now.alloc_retries or 0) > (before.alloc_retries or 0):
            self.retried_seconds = now_seconds
            return 0
        # The peak counts memory that is unmapped, so the reserved bytes must count it too.
        reserved, peak = (now.reserved_bytes or 0) + (now.unmapped_bytes or 0), now.allocated_peak_bytes
        # A peak that differs from the peak at the last reading was reached in between, and then not more than
        # reserved − peak was reclaimable. Otherwise the peak is an old one and shows nothing.
        if peak is None or peak == before.allocated_peak_bytes or now.segments_freed != before.segments_freed:
            return reserved
        return max(0, reserved - peak)
