"""What a process used: its last values, peaks and means on each device."""

from __future__ import annotations

from dataclasses import dataclass, field

from gpumem_client.wire.protocol import DeviceSample
from gpumem_exporter.core.ledger import fragmented_bytes

GAP_SECONDS = 60.0
"""What a process used is not known between two values that are further apart, and further than readings or reports may
be; that time does not count."""
_SAMPLED = (
    *("allocated_bytes", "reserved_bytes", "reclaimable_bytes", "allocated_peak_bytes", "reserved_peak_bytes"),
    *("alloc_retries", "ooms"),
)


@dataclass(slots=True)
class _Mean:
    """The mean of a value over time, as if it changed steadily from one reading to the next."""

    value: int | None = None
    last: tuple[int, float] | None = None
    """The last value and its time."""
    _byte_seconds: float = 0.0
    _seconds: float = 0.0

    def add(self, value: int, now_seconds: float, gap_seconds: float) -> None:
        """Add a value; later values have later times. More than `gap_seconds` since the last one are left out."""
        before, last_seconds = self.last or (value, now_seconds)
        self.last = value, now_seconds
        passed = now_seconds - last_seconds
        if passed <= gap_seconds:
            self._byte_seconds += (before + value) / 2 * passed
            self._seconds += passed
        self.value = round(self._byte_seconds / self._seconds) if self._seconds else value


@dataclass(slots=True)
class DeviceUsage:
    """The memory of a process on one device. None is unknown."""

    gap_seconds: float = GAP_SECONDS
    """Between two values that are further apart, the memory is unknown."""
    used_peak_bytes: int | None = None
    """The highest value of the driver; a peak between two polls is not seen."""
    reserved_highest_bytes: int | None = None
    """The highest of the allocator's own peaks, which are exact, over all resets of the peaks."""
    _used: _Mean = field(default_factory=_Mean)
    _idle_cache: _Mean = field(default_factory=_Mean)

    def take_used(self, used_bytes: int, now_seconds: float) -> None:
        """Add a reading of the driver."""
        self.used_peak_bytes = max(used_bytes, self.used_peak_bytes or 0)
        self._used.add(used_bytes, now_seconds, self.gap_seconds)

    def take_sample(self, sample: DeviceSample, now_seconds: float) -> None:
        """Add a sample of the allocator."""
        if sample.reserved_peak_bytes is not None:
            self.reserved_highest_bytes = max(sample.reserved_peak_bytes, self.reserved_highest_bytes or 0)
        if sample.idle_cache_bytes is not None:
            self._idle_cache.add(sample.idle_cache_bytes, now_seconds, self.gap_seconds)

    def used_bytes(self, since_seconds: float) -> int | None:
        """Return the last value of the driver; None if it is older than a time."""
        used_bytes, seconds = self._used.last or (None, since_seconds)
        return used_bytes if seconds >= since_seconds else None

    def row(self, sample: DeviceSample | None = None, used_bytes: int | None = None) -> dict[str, int | None]:
        """Return the values for an event: the last ones, which are given, the peaks and the means."""
        reserved = sample.reserved_bytes if sample is not None else None
        return {
            "used_bytes": used_bytes,
            **{name: getattr(sample, name, None) for name in _SAMPLED},
            "fragmented_bytes": fragmented_bytes(sample) if sample is not None else None,
            "non_torch_bytes": None if used_bytes is None or reserved is None else used_bytes - reserved,
            "used_peak_bytes": self.used_peak_bytes,
            "used_mean_bytes": self._used.value,
            "reserved_highest_bytes": self.reserved_highest_bytes,
            "idle_cache_mean_bytes": self._idle_cache.value,
        }
