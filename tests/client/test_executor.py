from __future__ import annotations

from typing import Any, cast

import pytest

from gpumem_client.allocator.sampler import Sampler
from gpumem_client.allocator.unmapped import Unmapped
from gpumem_client.commands.executor import Executor
from gpumem_client.wire.protocol import Command, CommandResult, DeviceSample, StillFree
from tests.support.fake_allocator import FakeAllocator


class Bench:
    def __init__(self) -> None:
        self.now = 100.0
        self.allocator = cast("Any", FakeAllocator())
        sampler = Sampler(self.allocator, swallow=lambda error: None, clock=lambda: self.now)
        self.collected = 0
        self.executor = Executor(self.allocator, sampler, collect_garbage=self._collect_garbage, clock=lambda: self.now)

    def _collect_garbage(self) -> None:
        self.collected += 1

    def run(self, action: str = "empty_cache", id: str = "a", **changes: Any) -> CommandResult:
        command = Command(id=id, action=action, **{"deadline_seconds": 30.0, **changes})
        result = self.executor.run(command, expires_seconds=100.0 + command.deadline_seconds)
        assert result is not None
        return result


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_what_another_thread_reserves_during_the_clear_is_neither_freed_nor_still_free(bench: Bench) -> None:
    clear = bench.allocator.empty_cache

    def clear_while_another_thread_allocates() -> None:
        clear()
        bench.allocator.reserved += 50

    bench.allocator.empty_cache = clear_while_another_thread_allocates
    (device,) = bench.run(settle_seconds=10.0).devices
    assert (device.reserved_after_bytes, device.freed_bytes) == (60, 90)
    settling = bench.executor.settling
    settling.measure((DeviceSample(device.uuid, reserved_bytes=60),), taken_seconds=109.9)
    assert settling.results(64) == ()
    settling.measure((DeviceSample(device.uuid, reserved_bytes=60),), taken_seconds=110.0)
    assert settling.results(64) == (StillFree("a", device.uuid, 40),)
    settling.delivered(settling.results(64))
    assert settling.results(64) == ()


def test_the_bytes_of_a_result_are_absent_while_unmapped_memory_is_unknown(bench: Bench) -> None:
    bench.allocator.unmapped_memory = None
    (device,) = bench.run().devices
    assert (device.reserved_before_bytes, device.reserved_after_bytes, device.freed_bytes) == (None, None, 90)
    assert (device.allocated_before_bytes, device.allocated_after_bytes) == (None, None)
    bench.allocator.unmapped_memory = Unmapped(3, 2)
    (device,) = bench.run(id="b").devices
    assert (device.reserved_after_bytes, device.allocated_after_bytes) == (7, 8)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        ("CUDAPluggableAllocator does not yet support emptyCache. If you need it, ask.", "unsupported"),
        ("CUDA error: misaligned address", "failed"),
    ],
)
def test_an_error_of_torch_is_the_result(bench: Bench, error: str, outcome: str) -> None:
    bench.allocator.error = RuntimeError(error)
    result = bench.run()
    assert (result.outcome, result.reason) == (outcome, f"RuntimeError: {error}")


def test_a_command_that_arrives_twice_runs_once_and_has_one_result(bench: Bench) -> None:
    assert bench.run() == bench.run()
    assert bench.allocator.cleared == 1
    bench.run(id="another")
    assert bench.allocator.cleared == 2


def test_garbage_is_collected_only_on_request(bench: Bench) -> None:
    bench.run()
    assert bench.collected == 0
    bench.run(id="b", collect_garbage=True)
    assert bench.collected == 1
    bench.run("collect_garbage", id="c")
    assert bench.collected == 2
    assert bench.allocator.cleared == 2
