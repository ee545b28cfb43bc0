"""A wall clock that is set, backwards or forwards, moves timestamps and nothing else."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import gpumem_exporter
from gpumem_exporter.actions.caller import Caller
from gpumem_exporter.actions.dispatcher import Dispatcher
from gpumem_exporter.actions.request import ActionRequest, Target
from gpumem_exporter.actions.terminate import Terminator
from gpumem_exporter.core.samples import DeviceMemory, ProcessMemory
from gpumem_exporter.core.store import Store
from gpumem_exporter.errors import NvmlUnavailableError
from gpumem_exporter.nvml.provider import DeviceIdentity
from gpumem_exporter.nvml.reader import NodeReader
from tests.support.builders import UNLIMITED, UUIDS, NobodyHost, device, node, report, sample

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
    dispatcher = Dispatcher(
        store,
        allowed=frozenset({"empty_cache"}),
        clock=clocks.monotonic,
        wall_clock=clocks.wall,
        on_finished=lambda action: None,
        terminator=Terminator(NobodyHost()),
        limits=UNLIMITED,
    )
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
    assert (expired.state, expired.duration_seconds) == ("expired", pytest.approx(30.0))


class OneGpu:
    """A driver that may be missing, and whose memory call runs a hook."""

    source = "nvml"

    def __init__(self) -> None:
        self.missing = False
        self.hook: Callable[[], None] = lambda: None

    def open(self) -> None:
        if self.missing:
            raise NvmlUnavailableError("no driver")

    def close(self) -> None: ...

    def release(self) -> None: ...

    def driver_version(self) -> str:
        return "580"

    def devices(self) -> Sequence[DeviceIdentity]:
        return (DeviceIdentity("0", UUIDS[0]),)

    def read_memory(self, uuid: str) -> DeviceMemory:
        self.hook()
        return DeviceMemory(80, 19, 60, 1)

    def read_processes(self, uuid: str) -> tuple[ProcessMemory, ...]:
        return ()

    def read_utilization_ratio(self, uuid: str) -> float:
        return 0.5


@STEPS
def test_a_reading_has_the_wall_time_and_a_monotonic_duration(clocks: Clocks, step_seconds: float) -> None:
    driver = OneGpu()
    reader = NodeReader(driver, NobodyHost(), clock=clocks.monotonic, wall_clock=clocks.wall)

    def set_the_clock() -> None:
        clocks.pass_(0.25)
        clocks.wall_seconds += step_seconds

    driver.hook = set_the_clock
    reading = reader.read()
    assert (reading.taken_seconds, reading.duration_seconds) == (1000.25, 0.25)
    assert reading.taken_unix_seconds == clocks.wall()


@STEPS
def test_a_set_clock_does_not_change_when_a_missing_driver_is_retried(clocks: Clocks, step_seconds: float) -> None:
    driver = OneGpu()
    driver.missing = True
    reader = NodeReader(driver, NobodyHost(), clock=clocks.monotonic, wall_clock=clocks.wall)
    assert not reader.read().up
    driver.missing = False
    clocks.wall_seconds += step_seconds
    assert not reader.read().up  # the first delay is half a second to a second
    clocks.pass_(1.0)
    assert reader.read().up


def test_the_client_does_not_use_the_wall_clock() -> None:
    root = Path(gpumem_exporter.__file__).parent
    looked_at = []
    for module in sorted((root / "client").rglob("*.py")):
        for part in ast.walk(ast.parse(module.read_text())):
            if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name):
                call = f"{part.value.id}.{part.attr}"
                if call in ("time.time", "time.time_ns", "datetime.now", "datetime.utcnow"):
                    looked_at.append(f"{module.relative_to(root)}:{part.lineno}: {call}")
    assert looked_at == []
