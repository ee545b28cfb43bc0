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
class _Values:
    """The last value of a size, the highest one, and the mean, as if it changed steadily from one to the next."""

    last: int | None = None
    seconds: float = 0.0
    """When the last value was taken."""
    highest: int | None = None
    mean: int | None = None
    _byte_seconds: float = 0.0
    _mean_seconds: float = 0.0

    def add(self, value: int | None, now_seconds: float, gap_seconds: float) -> None:
        """Add a value, unless it is unknown; later values have later times."""
        if value is None:
            return
        passed = now_seconds - self.seconds
        if self.last is not None and passed <= gap_seconds:
            self._byte_seconds += (self.last + value) / 2 * passed
            self._mean_seconds += passed
        self.mean = round(self._byte_seconds / self._mean_seconds) if self._mean_seconds else value
        self.highest = max(value, self.highest or 0)
        self.last, self.seconds = value, now_seconds


@dataclass(slots=True)
class DeviceUsage:
    """The memory of a process on one device. None is unknown."""

    gap_seconds: float = GAP_SECONDS
    """Between two values that are further apart, the memory is unknown."""
    used: _Values = field(default_factory=_Values)
    """The driver's values; a peak between two polls is not seen."""
    _reserved_peak: _Values = field(default_factory=_Values)
    """The allocator's own peaks, which are exact, over all resets of the peaks."""
    _idle_cache: _Values = field(default_factory=_Values)

    def take_used(self, used_bytes: int, now_seconds: float) -> None:
        """Add a reading of the driver."""
        self.used.add(used_bytes, now_seconds, self.gap_seconds)

    def take_sample(self, sample: DeviceSample, now_seconds: float) -> None:
        """Add a sample of the allocator."""
        self._reserved_peak.add(sample.reserved_peak_bytes, now_seconds, self.gap_seconds)
        self._idle_cache.add(sample.idle_cache_bytes, now_seconds, self.gap_seconds)

    def row(self, sample: DeviceSample | None = None, since_seconds: float = 0.0) -> dict[str, int | None]:
        """Return the values for an event: the last ones, if the driver's is not older than a time, peaks and means."""
        used = self.used.last if self.used.seconds >= since_seconds else None
        reserved = sample.reserved_bytes if sample is not None else None
        return {
            "used_bytes": used,
            **{name: getattr(sample, name, None) for name in _SAMPLED},
            "fragmented_bytes": fragmented_bytes(sample) if sample is not None else None,
            "non_torch_bytes": None if used is None or reserved is None else used - reserved,
            "used_peak_bytes": self.used.highest,
            "used_mean_bytes": self.used.mean,
            "reserved_highest_bytes": self._reserved_peak.highest,
            "idle_cache_mean_bytes": self._idle_cache.mean,
        }
