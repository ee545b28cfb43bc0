"""What fails with the same error three times is turned off in this process; reports go on, and steps are counted."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, cast

import pytest

from gpumem_client.guest_safety import ErrorLog, log
from gpumem_client.reporter.delivery import Outcome
from gpumem_client.reporter.report_loop import ReportLoop
from gpumem_client.wire.protocol import Command, DeviceSample, Reply
from tests.support.builders.builders import identity
from tests.support.builders.fake_allocator import FakeAllocator


class Counted:
    """A function that always fails, and the number of its calls."""

    def __init__(self, *errors: Callable[[], Exception]) -> None:
        self.calls = 0
        self._errors = errors or (lambda: RuntimeError("internal"),)

    def __call__(self, *_: Any, **__: Any) -> Any:
        self.calls += 1
        raise self._errors[self.calls % len(self._errors)]()


class Bench:
    def __init__(self) -> None:
        self.now = 100.0
        self.allocator = cast("Any", FakeAllocator())
        self.loop = ReportLoop(identity(1), self.allocator, ErrorLog(), clock=lambda: self.now)

    def report(self, *commands: Command) -> Any:
        self.now += 1.0
        report = self.loop.next_report()
        self.loop.answered(report, Outcome.ACCEPTED, Reply(commands))
        return report


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_filter_that_drops_repeated_messages_keeps_the_others(caplog: pytest.LogCaptureFixture) -> None:
    """Such a filter of the program compares the messages before their arguments are inserted."""
    log.warning("%s are full", "50 % of 8 GiB")
    log.warning("another line")
    assert [record.msg for record in caplog.records] == caplog.messages == ["50 % of 8 GiB are full", "another line"]


def test_the_third_equal_error_turns_a_part_off_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    errors, broken, works = ErrorLog(), Counted(), Counted(lambda: KeyError(1), lambda: ValueError(2))
    with caplog.at_level(logging.DEBUG, "gpumem_client"):
        assert [errors.attempt("a part", broken, 7) for _ in range(10)] == [7] * 10
        assert [errors.attempt("another part", works, 7) for _ in range(4)] == [7] * 4
    assert (broken.calls, works.calls) == (3, 4)
    assert [record.levelname for record in caplog.records if record.getMessage().startswith("a part")] == [
        "WARNING"
    ] * 2
    assert not errors.ended("another part"), "two of each kind"


def test_readings_of_the_cache_end(bench: Bench) -> None:
    bench.allocator.unused = broken = Counted()
    for _ in range(20):
        bench.now += 10.0
        bench.loop.read_cache()
    assert broken.calls == 3


def test_steps_that_cannot_sample_are_counted_and_the_reporter_samples(bench: Bench) -> None:
    bench.report()
    sample, samples = DeviceSample("GPU-0", reserved_bytes=1), bench.allocator.samples
    bench.allocator.samples = broken = Counted()
    for _ in range(20):
        bench.now += 1.0
        bench.loop.sampler.on_step(None)
    assert broken.calls == 3
    bench.allocator.samples = samples
    bench.allocator.reserved = sample.reserved_bytes
    report = bench.report()
    assert (report.step, report.devices[0].reserved_bytes) == (20, 1)


def test_profiles_end_and_are_not_offered(bench: Bench) -> None:
    heap = cast("Any", type("Heap", (), {"require_short_pause": Counted()})())
    recorder = cast("Any", type("Recorder", (), {"standing": False})())
    bench.loop.take_profiles(lambda: (heap, recorder), lambda _: "id")
    for number in range(3):
        assert "profile" in bench.report(Command(f"{number}", "profile", 60.0)).actions
    last = bench.report()
    assert "profile" not in last.actions
    assert [result.outcome for result in last.results] == ["failed"]
