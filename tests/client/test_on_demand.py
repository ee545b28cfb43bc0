"""Code that a command needs is loaded when the command runs."""

from __future__ import annotations

import sys
from typing import Any, cast

import pytest

from gpumem_client.guest_safety import ErrorLog
from gpumem_client.reporter.delivery import Outcome
from gpumem_client.reporter.report_loop import ReportLoop
from gpumem_client.wire.protocol import Command, CommandResult, Reply, Report
from tests.support.builders.builders import identity
from tests.support.builders.fake_allocator import FakeAllocator

SNAPSHOTS, PROFILES = "gpumem_client.allocator.snapshot_file", "gpumem_client.commands.profiling"
PROFILE = Command("profile", "profile", 60.0)


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> ReportLoop:
    loop = ReportLoop(identity(1), cast("Any", FakeAllocator()), ErrorLog())
    loop.take_profiles(lambda: (cast("Any", None), cast("Any", None)), lambda _: "id")
    for module in (SNAPSHOTS, PROFILES):
        monkeypatch.delitem(sys.modules, module, raising=False)
    return loop


def send(loop: ReportLoop, *commands: Command) -> Report:
    report = loop.next_report()
    loop.answered(report, Outcome.ACCEPTED, Reply(commands))
    return report


def results(loop: ReportLoop) -> list[CommandResult]:
    return [*send(loop).results]


def test_a_snapshot_loads_its_code(loop: ReportLoop) -> None:
    send(loop, Command("clear", "empty_cache", 60.0))
    assert SNAPSHOTS not in sys.modules
    send(loop, Command("snapshot", "snapshot", 60.0))
    assert SNAPSHOTS in sys.modules


def test_profiles_are_offered_before_their_code_is_loaded(loop: ReportLoop) -> None:
    assert "profile" in send(loop).actions
    assert PROFILES not in sys.modules
    send(loop, PROFILE)
    assert PROFILES in sys.modules


def test_a_command_that_the_owner_denies_loads_nothing() -> None:
    allocator: Any = FakeAllocator()
    loop = ReportLoop(identity(1), allocator, ErrorLog(), denied_actions=["profile"])
    asked: list[str] = []
    loop.take_profiles(lambda: cast("Any", asked.append("parts")), lambda _: "id")
    send(loop, PROFILE)
    assert [result.reason_code for result in results(loop)] == ["denied_by_owner"]
    assert asked == []


@pytest.mark.parametrize(("module", "action"), [(SNAPSHOTS, "snapshot"), (PROFILES, "profile")])
def test_a_command_whose_code_cannot_be_loaded_fails_and_reports_go_on(
    loop: ReportLoop, monkeypatch: pytest.MonkeyPatch, module: str, action: str
) -> None:
    monkeypatch.setitem(sys.modules, module, cast("Any", None))
    send(loop, Command("1", action, 60.0))
    (result,) = results(loop)
    assert (result.id, result.outcome) == ("1", "failed")
    assert results(loop) == []
    assert send(loop).waiting == ()
