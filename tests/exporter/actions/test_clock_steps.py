"""A wall clock that is set, backwards or forwards, moves timestamps and nothing else."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

import pytest

import gpumem_client
from gpumem_exporter.actions.caller import Caller
from gpumem_exporter.actions.request import ActionRequest, Target
from gpumem_exporter.core.store import Store
from tests.support.builders import device, node, report, sample
from tests.support.dispatching import build_dispatcher

DAY_SECONDS = 86_400.0
STEPS = pytest.mark.parametrize("step_seconds", [-DAY_SECONDS, -0.5, 0.5, DAY_SECONDS])


class Clocks:
    """Both clocks; only what a test does moves them."""

    def __init__(self) -> None:
        self.monotonic_seconds, self.wall_seconds = 1000.0, 1.7e9

    def monotonic(self) -> float:
        return self.monotonic_seconds

    def wall(self) -> float:
        return self.wall_seconds

    def pass_(self, seconds: float) -> None:
        self.monotonic_seconds += seconds
        self.wall_seconds += seconds


@pytest.fixture
def clocks() -> Clocks:
    return Clocks()


@STEPS
def test_a_set_clock_does_not_change_when_reports_and_readings_expire(clocks: Clocks, step_seconds: float) -> None:
    store = Store(report_expiry_seconds=15, reading_expiry_seconds=5, max_processes=9)
    store.put_reading(dataclasses.replace(node(device()), taken_seconds=clocks.monotonic()))
    sent = report(7, devices=(sample(),))
    store.put_report(sent, host_pid=7, now_seconds=clocks.monotonic(), now_unix_seconds=clocks.wall())
    clocks.wall_seconds += step_seconds
    clocks.pass_(5)
    assert store.snapshot(clocks.monotonic()).node is not None
    clocks.pass_(0.001)
    assert store.snapshot(clocks.monotonic()).node is None
    clocks.pass_(9.999)
    assert len(store.snapshot(clocks.monotonic()).processes) == 1
    clocks.pass_(0.001)
    snapshot = store.snapshot(clocks.monotonic())
    assert (len(snapshot.processes), len(snapshot.silent)) == (0, 1)


@STEPS
def test_a_set_clock_does_not_change_the_deadline_and_duration_of_an_action(
    clocks: Clocks, step_seconds: float
) -> None:
    store = Store(report_expiry_seconds=1000, reading_expiry_seconds=5, max_processes=9)
    sent = report(7, devices=(sample(),), actions=("empty_cache",))
    store.put_report(sent, host_pid=7, now_seconds=clocks.monotonic(), now_unix_seconds=clocks.wall())
    dispatcher = build_dispatcher(store, clocks.monotonic, wall_clock=clocks.wall)
    action = dispatcher.submit(ActionRequest("empty_cache", Target(all=True)), requested_by=Caller.policy("ada"))
    assert action.created_unix_seconds == clocks.wall()
    clocks.wall_seconds += step_seconds
    clocks.pass_(29.9)
    dispatcher.expire()
    assert not dispatcher.get(action.id).finished  # type: ignore[union-attr]
    clocks.pass_(0.1)
    dispatcher.expire()
    expired = dispatcher.get(action.id)
    assert expired is not None
    assert expired.state == "expired"
    assert expired.duration_seconds == pytest.approx(30.0)


def test_the_client_does_not_use_the_wall_clock() -> None:
    root = Path(gpumem_client.__file__).parent
    modules = sorted(root.rglob("*.py"))
    assert len(modules) > 20
    looked_at = []
    for module in modules:
        if module.parent.name == "profile":
            continue  # torch's history, with which a profile compares its own times, has the wall clock's
        for part in ast.walk(ast.parse(module.read_text())):
            if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name):
                call = f"{part.value.id}.{part.attr}"
                if call in ("time.time", "time.time_ns", "datetime.now", "datetime.utcnow"):
                    looked_at.append(f"{module.relative_to(root)}:{part.lineno}: {call}")
    assert looked_at == []
