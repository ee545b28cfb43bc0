from __future__ import annotations

import pytest

from gpumem_client.allocator.idle_cache import IdleCache
from gpumem_client.allocator.sampler import Sampler
from gpumem_client.wire.protocol import DeviceSample
from tests.support.builders.fake_allocator import FakeAllocator


class Optimizer:
    """An object that can be weakly referenced."""


class Bench:
    def __init__(self) -> None:
        self.now = 1000.0
        self.allocator = FakeAllocator()
        self.errors: list[Exception] = []
        self.sampler = Sampler(self.allocator, swallow=self.errors.append, clock=lambda: self.now)  # type: ignore[arg-type]
        self.optimizer = Optimizer()

    def step(self, seconds: float = 0.1) -> None:
        self.now += seconds
        self.sampler.on_step(self.optimizer)

    def report(self) -> float:
        """Report as the reporter's thread does; returns the age of the sample."""
        return self.now - self.sampler.current(self.now + 1.0).taken_seconds


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.mark.parametrize("seconds", [0.09, 0.13, 0.3, 0.45, 0.7, 1.0, 1.9, 7.0])
def test_no_sample_is_older_than_two_steps(bench: Bench, seconds: float) -> None:
    bench.report()
    reported, stepped, paced = bench.now, bench.now, 0
    for _ in range(600):  # reports and steps in the order of their times
        report_next, step_next = reported + 1.0, stepped + seconds * (1.0 + 0.2 * (bench.allocator.looks % 2))
        bench.now = min(report_next, step_next)
        if bench.now == step_next:
            bench.step(0.0)
            stepped = bench.now
        else:
            age = bench.report()
            reported = bench.now
            assert paced < 2 or age <= 2 * 1.2 * seconds  # a report before knew when to expect a step
            paced += bench.sampler.step_seconds is not None
    assert bench.allocator.looks <= 600


def test_after_the_last_step_a_sample_is_at_most_one_report_old(bench: Bench) -> None:
    for _ in range(3):
        bench.report()
        for _ in range(10):
            bench.step()
    bench.report()
    bench.now += 0.8
    assert bench.report() == 0.0
    assert bench.sampler.steps_run() is True, "commands still wait for a step"


def test_long_steps_are_waited_for_until_the_next_one_is_late(bench: Bench) -> None:
    bench.step(30.0)
    bench.report()
    bench.step(30.0)
    for age in (1.0, 30.0, 37.0):
        bench.now = 1060.0 + age
        assert bench.report() == age
    bench.now += 1.0
    assert bench.report() == 0.0


def test_under_memory_pressure_late_steps_are_waited_for_up_to_a_minute(bench: Bench) -> None:
    bench.step(30.0)
    bench.report()
    bench.step(30.0)
    bench.now += 35.0
    bench.allocator.retries += 1
    bench.sampler.take()
    bench.now += 24.0
    assert bench.report() == 24.0
    bench.now += 2.0
    assert bench.report() == 0.0


def test_one_long_step_does_not_change_the_step_time(bench: Bench) -> None:
    assert bench.sampler.step_seconds is None
    bench.step()
    assert bench.sampler.step_seconds is None  # one end is no length
    for seconds in (0.1, 0.1, 60.0):
        bench.step(seconds)
        assert bench.sampler.step_seconds == pytest.approx(0.1)
    for _ in range(5):
        bench.step(2.0)
    assert bench.sampler.step_seconds == pytest.approx(2.0)


def test_another_optimizer_counts_once_the_first_makes_no_more_steps(bench: Bench) -> None:
    bench.step()
    given_up, bench.optimizer = bench.optimizer, Optimizer()
    for _ in range(20):
        bench.step()
    assert bench.sampler.take().step == 14  # the first seven of these could be the critic's, between two of the model's
    assert given_up is not bench.optimizer


def test_an_optimizer_with_rare_steps_still_counts(bench: Bench) -> None:
    critic = Optimizer()
    for _ in range(4):
        bench.step()
        for _ in range(5):
            bench.sampler.on_step(critic)
    assert bench.sampler.take().step == 4


@pytest.mark.parametrize("mark_first", [False, True])
def test_after_a_mark_only_marks_count_and_the_step_of_the_first_mark_counts_once(
    bench: Bench, *, mark_first: bool
) -> None:
    for _ in range(3):
        if mark_first:
            bench.sampler.on_step(None)
        for _ in range(5):
            bench.step()
        if not mark_first:
            bench.sampler.on_step(None)
    # Before the first mark, each step of the optimizer counts.
    assert bench.sampler.take().step == (3 if mark_first else 5 + 2)


def test_a_step_does_not_wait_while_the_cache_is_being_cleared(bench: Bench) -> None:
    with bench.sampler.exclusively:
        bench.step()
        assert bench.allocator.looks == 0
    bench.step()
    assert bench.allocator.looks == 1


def test_during_a_flush_the_last_sample_is_reported_with_its_age(bench: Bench) -> None:
    bench.report()
    bench.allocator.flushing = True
    bench.now += 3.0
    assert bench.report() == 3.0
    assert bench.allocator.looks == 1
    bench.allocator.flushing = False
    assert bench.report() == 0.0


@pytest.mark.parametrize("started", [True, False], ids=["an old sample", "no sample"])
def test_during_a_long_flush_no_device_is_reported(bench: Bench, started: bool) -> None:
    if started:
        bench.report()
    bench.allocator.flushing = True
    bench.now += 10.0
    sample = bench.sampler.current(bench.now + 1.0)
    assert (sample.devices, sample.taken_seconds) == ((), bench.now)
    assert bench.allocator.looks == started


def idle_cache(bench: Bench) -> int | None:
    """Report, and return the reported idle cache."""
    return bench.sampler.current(bench.now + 1.0).devices[0].idle_cache_bytes


def wait(bench: Bench, seconds: float, reclaimable: int) -> None:
    """Let a reporter wait for its exporter, while the cache has this size."""
    bench.allocator.reclaimable = reclaimable
    end = bench.now + seconds
    while bench.now < end:
        bench.now = min(end, bench.now + max(0.01, bench.sampler.read_when_due()))
        bench.sampler.read_when_due()


def test_the_cache_is_read_during_a_step(bench: Bench) -> None:
    bench.allocator.reclaimable = 90
    for _ in range(70):  # between two steps the cache is large, during a step it is small
        bench.step(0.0)
        idle_cache(bench)
        bench.allocator.reclaimable = 20
        wait(bench, 1.0, 20)
        bench.allocator.reclaimable = 90
        bench.step(0.0)
    assert idle_cache(bench) == 20


def test_no_reading_waits_for_a_flush(bench: Bench) -> None:
    bench.allocator.reclaimable = 90
    bench.step()
    idle_cache(bench)
    bench.allocator.flushing = True
    readings = bench.allocator.readings
    wait(bench, 5.0, 90)
    assert bench.allocator.readings == readings
    bench.allocator.flushing = False
    bench.allocator.retries += 1
    wait(bench, 5.0, 90)
    assert bench.allocator.readings == readings + 1  # this one shows the retry: flushes come in series
    wait(bench, 30.0, 90)
    assert bench.allocator.readings > readings + 1


def test_a_retry_in_long_steps_does_not_make_the_idle_cache_unknown(bench: Bench) -> None:
    for retries in (0, 0, 1):
        bench.allocator.retries = retries
        bench.step(0.0)
        shown = [idle_cache(bench)]
        for _ in range(45):
            wait(bench, 1.0, 50)
            shown.append(idle_cache(bench))
    assert set(shown[1:]) == {0}


@pytest.mark.parametrize(("step_seconds", "pause_seconds"), [(90.0, 30.0), (1.0, 200.0)])
def test_the_idle_cache_covers_two_steps_and_a_minute(bench: Bench, step_seconds: float, pause_seconds: float) -> None:
    """A step of more than a minute, or an evaluation after the steps, does not hide what the steps need."""
    for _ in range(4 if step_seconds > 60.0 else 100):
        wait(bench, 0.1 * step_seconds, 20)  # the part that needs the most
        wait(bench, 0.9 * step_seconds, 90)
        bench.step(0.0)
    wait(bench, pause_seconds, 90)
    assert idle_cache(bench) == 20
    wait(bench, 301.0, 90)  # no step for five windows
    assert idle_cache(bench) == 90


# --- The idle cache of a window

WINDOW = 60.0


class Readings:
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
def readings() -> Readings:
    return Readings()


def test_the_value_is_the_smallest_of_the_window(readings: Readings) -> None:
    readings.fill(80)
    assert readings.read(30) == 30
    assert readings.read(50) == 30
    for _ in range(int(WINDOW) - 1):
        assert readings.read(80) == 30
    assert readings.read(80) == 50
    assert readings.read(80) == 80


def test_an_unknown_value_or_a_gap_starts_the_window_again(readings: Readings) -> None:
    readings.fill(80)
    assert readings.read(None) is None
    assert readings.read(80) is None
    assert readings.fill(80) == 80
    assert readings.read(80, seconds=WINDOW) is None


def test_a_peak_that_changed_bounds_what_was_reclaimable(readings: Readings) -> None:
    assert readings.fill(80, allocated_peak_bytes=50) == 80  # an old peak shows nothing
    assert readings.read(80, allocated_peak_bytes=90) == 10
    readings.fill(80, allocated_peak_bytes=90)
    assert (
        readings.read(80, allocated_peak_bytes=70) == 30
    )  # the program has reset its peaks, and then reached this one
    assert readings.read(80, allocated_peak_bytes=95, segments_freed=1) == 30  # more was reserved at the peak


def test_a_retried_allocation_has_released_the_whole_cache(readings: Readings) -> None:
    readings.fill(80, alloc_retries=3)
    assert readings.read(80, alloc_retries=4) == 0
    assert readings.cache.retried_seconds == readings.now
