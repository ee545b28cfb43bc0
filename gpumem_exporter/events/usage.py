"""Adds up the memory of a process on one device from its first report to its end: peaks and means."""

from __future__ import annotations

from dataclasses import dataclass, field

from gpumem_client.wire.protocol import DeviceSample

__all__ = ["DeviceUsage"]

_GAP_SECONDS = 60.0
"""What a process used is not known between two values that are further apart; this time does not count."""


@dataclass(slots=True)
class _Mean:
    """The mean of a value over time, as if it changed steadily from one reading to the next."""

    value: int | None = None
    _byte_seconds: float = 0.0
    _seconds: float = 0.0
    _last: tuple[int, float] | None = None

    def add(self, value: int, now_seconds: float) -> None:
        """Add a value; later values have later times."""
        before, last_seconds = self._last or (value, now_seconds)
        self._last = value, now_seconds
        passed = now_seconds - last_seconds
        if passed <= _GAP_SECONDS:
            self._byte_seconds += (before + value) / 2 * passed
            self._seconds += passed
        self.value = round(self._byte_seconds / self._seconds) if self._seconds else value


@dataclass(slots=True)
class DeviceUsage:
    """The memory of a process on one device. None is unknown."""

    used_peak_bytes: int | None = None
    """The highest value of the driver; a peak between two polls is not seen."""
    reserved_highest_bytes: int | None = None
    """The highest of the allocator's own peaks, which are exact, over all resets of the peaks."""
    _used: _Mean = field(default_factory=_Mean)
    _idle_cache: _Mean = field(default_factory=_Mean)

    def take_used(self, used_bytes: int, now_seconds: float) -> None:
        """Add a reading of the driver."""
        self.used_peak_bytes = max(used_bytes, self.used_peak_bytes or 0)
        self._used.add(used_bytes, now_seconds)

    def take_sample(self, sample: DeviceSample, now_seconds: float) -> None:
        """Add a sample of the allocator."""
        if sample.reserved_peak_bytes is not None:
            self.reserved_highest_bytes = max(sample.reserved_peak_bytes, self.reserved_highest_bytes or 0)
        if sample.idle_cache_bytes is not None:
            self._idle_cache.add(sample.idle_cache_bytes, now_seconds)

    def row(self) -> dict[str, int | None]:
        """Return the values for an event."""
        return {
            "used_peak_bytes": self.used_peak_bytes,
            "used_mean_bytes": self._used.value,
            "reserved_highest_bytes": self.reserved_highest_bytes,
            "idle_cache_mean_bytes": self._idle_cache.value,
        }
