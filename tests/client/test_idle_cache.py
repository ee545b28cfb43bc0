from __future__ import annotations

import pytest

from gpumem_client.allocator.idle_cache import IdleCache
from gpumem_client.wire.protocol import DeviceSample

WINDOW = 60.0


class Bench:
    """Readings at the times of a clock."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.cache = IdleCache()
        self.cache.window_seconds = WINDOW

    def read(self, reclaimable: int | None, seconds: float = 1.0, **values: int) -> int | None:
        """Note a reading `seconds` after the last one; returns the idle cache."""
        self.now += seconds
        sample = DeviceSample("GPU-0", reserved_bytes=100, reclaimable_bytes=reclaimable, segments_freed=0)
        for name, value in values.items():
            object.__setattr__(sample, name, value)
        self.cache.note(sample, self.now)
        return self.cache.bytes("GPU-0", self.now)

    def fill(self, reclaimable: int, **values: int) -> int | None:
        """Read the same value for a whole window."""
        found = None
        for _ in range(int(WINDOW) + 1):
            found = self.read(reclaimable, **values)
        return found


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_the_value_is_the_smallest_of_the_window(bench: Bench) -> None:
    bench.fill(80)
    assert bench.read(30) == 30
    assert bench.read(50) == 30
    for _ in range(int(WINDOW) - 1):
        assert bench.read(80) == 30
    assert bench.read(80) == 50
    assert bench.read(80) == 80


def test_an_unknown_value_or_a_gap_starts_the_window_again(bench: Bench) -> None:
    bench.fill(80)
    assert bench.read(None) is None
    assert bench.read(80) is None
    assert bench.fill(80) == 80
    assert bench.read(80, seconds=WINDOW) is None


def test_a_peak_that_changed_bounds_what_was_reclaimable(bench: Bench) -> None:
    assert bench.fill(80, allocated_peak_bytes=50) == 80  # an old peak shows nothing
    assert bench.read(80, allocated_peak_bytes=90) == 10
    bench.fill(80, allocated_peak_bytes=90)
    assert bench.read(80, allocated_peak_bytes=70) == 30  # the program has reset its peaks, and then reached this one
    assert bench.read(80, allocated_peak_bytes=95, segments_freed=1) == 30  # more was reserved at the peak


def test_a_retried_allocation_has_released_the_whole_cache(bench: Bench) -> None:
    bench.fill(80, alloc_retries=3)
    assert bench.read(80, alloc_retries=4) == 0
    assert bench.cache.retried_seconds == bench.now
