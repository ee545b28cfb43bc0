"""Reports and commands of a process, when their code is loaded, and when the same error comes again and again."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any, cast

import pytest

from gpumem_client.guest_safety import ErrorLog, log
from gpumem_client.reporter.delivery import Outcome
from gpumem_client.reporter.report_loop import ReportLoop
from gpumem_client.wire.protocol import Command, CommandResult, DeviceSample, Reply, Report
from tests.support.builders.builders import identity
from tests.support.builders.fake_allocator import FakeAllocator

SNAPSHOTS, PROFILES = "gpumem_client.allocator.snapshot_file", "gpumem_client.commands.profiling"
PROFILE = Command("profile", "profile", 60.0)


class Counted:
    """A function that always fails, and the number of its calls."""

    def __init__(self, *errors: Callable[[], Exception]) -> None:
        self.calls = 0
        self._errors = errors or (lambda: RuntimeError("internal"),)

    def __call__(self, *_: Any, **__: Any) -> Any:
        self.calls += 1
        raise self._errors[self.calls % len(self._errors)]()


class Bench:
    def __init__(self, **options: Any) -> None:
        self.now = 100.0
        self.allocator = cast("Any", FakeAllocator())
        self.loop = ReportLoop(identity(1), self.allocator, ErrorLog(), clock=lambda: self.now, **options)
        self.loaded: list[str] = []
        self.heap = cast("Any", None)
        self.loop.take_profiles(self._parts, lambda _: "id")

    def report(self, *commands: Command) -> Report:
        self.now += 1.0
        report = self.loop.next_report()
        self.loop.answered(report, Outcome.ACCEPTED, Reply(commands))
        return report

    def results(self, *commands: Command) -> tuple[CommandResult, ...]:
        self.report(*commands)
        return self.report().results

    def _parts(self) -> Any:
        self.loaded.append("parts")
        return self.heap, type("Recorder", (), {"standing": False})()


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    bench = Bench()
    for module in (SNAPSHOTS, PROFILES):
        monkeypatch.delitem(sys.modules, module, raising=False)
    return bench


# --- Code that is loaded when a command needs it


def test_a_snapshot_loads_its_code(bench: Bench) -> None:
    bench.report(Command("clear", "empty_cache", 60.0))
    assert SNAPSHOTS not in sys.modules
    bench.report(Command("snapshot", "snapshot", 60.0))
    assert SNAPSHOTS in sys.modules


def test_profiles_are_offered_before_their_code_is_loaded(bench: Bench) -> None:
    assert "profile" in bench.report().actions
    assert PROFILES not in sys.modules
    bench.report(PROFILE)
    assert PROFILES in sys.modules


def test_a_command_that_the_owner_denies_loads_nothing() -> None:
    bench = Bench(denied_actions=["profile"])
    assert [result.reason_code for result in bench.results(PROFILE)] == ["denied_by_owner"]
    assert bench.loaded == []


@pytest.mark.parametrize(("module", "action"), [(SNAPSHOTS, "snapshot"), (PROFILES, "profile")])
def test_a_command_whose_code_cannot_be_loaded_fails_and_reports_go_on(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, module: str, action: str
) -> None:
    monkeypatch.setitem(sys.modules, module, cast("Any", None))
    (result,) = bench.results(Command("1", action, 60.0))
    assert (result.id, result.outcome) == ("1", "failed")
    last = bench.report()
    assert (last.results, last.waiting) == ((), ())


# --- What fails with the same error three times is turned off; reports go on, and steps are counted


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
    bench.heap = type("Heap", (), {"require_short_pause": Counted()})()
    for number in range(3):
        assert "profile" in bench.report(Command(f"{number}", "profile", 60.0)).actions
    last = bench.report()
    assert "profile" not in last.actions
    assert [result.outcome for result in last.results] == ["failed"]
