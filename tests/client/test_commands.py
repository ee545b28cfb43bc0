"""Commands in a process: how they run, and how they wait for a step, an idle time or the end of a capture."""

from __future__ import annotations

import threading

import pytest

from gpumem_client.allocator.components import Unmapped
from gpumem_client.wire.protocol import DeviceSample, StillFree
from tests.support.builders.fake_allocator import CommandBench
from tests.support.waiting import patient


@pytest.fixture
def bench() -> CommandBench:
    return CommandBench()


def test_what_another_thread_reserves_during_the_clear_is_neither_freed_nor_still_free(bench: CommandBench) -> None:
    clear = bench.allocator.empty_cache

    def clear_while_another_thread_allocates() -> None:
        clear()
        bench.allocator.reserved += 50

    bench.allocator.empty_cache = clear_while_another_thread_allocates
    (device,) = bench.run(settle_seconds=10.0).devices
    assert (device.reserved_after_bytes, device.freed_bytes) == (60, 90)
    settling = bench.executor.settling
    settling.measure((DeviceSample(device.uuid, reserved_bytes=60),), taken_seconds=109.9)
    assert settling.ended == []
    settling.measure((DeviceSample(device.uuid, reserved_bytes=60),), taken_seconds=110.0)
    assert settling.ended == [StillFree("a", device.uuid, 40)]


def test_the_bytes_of_a_result_are_absent_while_unmapped_memory_is_unknown(bench: CommandBench) -> None:
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
def test_an_error_of_torch_is_the_result(bench: CommandBench, error: str, outcome: str) -> None:
    bench.allocator.error = RuntimeError(error)
    result = bench.run()
    assert (result.outcome, result.reason) == (outcome, f"RuntimeError: {error}")


def test_a_command_that_arrives_twice_runs_once_and_has_one_result(bench: CommandBench) -> None:
    assert bench.run() == bench.run()
    assert bench.allocator.cleared == 1
    bench.run(id="another")
    assert bench.allocator.cleared == 2


def test_garbage_is_collected_only_on_request(bench: CommandBench) -> None:
    bench.run()
    assert bench.collected == 0
    bench.run(id="b", collect_garbage=True)
    assert bench.collected == 1
    bench.run("collect_garbage", id="c")
    assert bench.collected == 2
    assert bench.allocator.cleared == 2


# --- Waiting


def test_a_command_in_mode_step_runs_after_the_next_step_in_the_training_thread(bench: CommandBench) -> None:
    bench.add()
    assert bench.scheduler.ids == ("a",)
    bench.scheduler.run_due()
    assert bench.allocator.cleared == 0
    thread = threading.Thread(target=bench.steps)
    thread.start()
    thread.join()
    result = bench.result()
    assert (result.outcome, result.step, result.thread_id) == ("done", 1, thread.native_id)
    assert (bench.allocator.cleared, bench.woken, list(bench.scheduler.ids)) == (1, 1, [])
    bench.steps(5)
    assert bench.allocator.cleared == 1


def test_a_command_for_a_passed_step_expires(bench: CommandBench) -> None:
    bench.steps(4)
    bench.add(at_step=4)
    result = bench.result()
    assert result.outcome == "expired"
    assert "step 4 " in result.reason
    assert bench.allocator.cleared == 0


def test_during_a_capture_mode_step_waits_for_the_next_step_and_a_numbered_step_is_refused(bench: CommandBench) -> None:
    bench.add()
    bench.add(command_id="b", at_step=2)
    bench.allocator.capturing = True
    bench.steps(2)
    result = bench.result()
    assert (result.id, result.outcome, result.reason_code) == ("b", "refused", "cuda_graph_capture")
    bench.allocator.capturing = False
    bench.steps()
    assert bench.result().step == 3


def test_a_command_in_mode_now_waits_for_the_end_of_a_capture(bench: CommandBench) -> None:
    bench.allocator.capturing = True
    bench.add("now")
    bench.scheduler.run_due()
    assert bench.scheduler.ids == ("a",)
    bench.allocator.capturing = False
    bench.scheduler.run_due()
    assert (bench.result().outcome, bench.allocator.cleared) == ("done", 1)


def test_a_step_does_not_wait_for_a_command_in_another_thread(bench: CommandBench) -> None:
    bench.add()
    with bench.sampler.exclusively:
        bench.steps()
    assert bench.scheduler.ids == ("a",)
    bench.steps()
    assert bench.result().outcome == "done"


def test_a_numbered_step_waits_until_the_deadline_at_most(bench: CommandBench) -> None:
    bench.add(at_step=1, deadline_seconds=0.15)
    training = threading.Thread(target=bench.steps, daemon=True)
    with bench.sampler.exclusively:  # a command of the reporter's thread that hangs
        training.start()
        training.join(patient(30))
        assert not training.is_alive()
    assert (bench.result().outcome, bench.allocator.cleared) == ("expired", 0)


@pytest.mark.parametrize(
    ("mode", "at_step", "code"),
    [
        ("step", None, "no_step_ended"),
        ("step", 9, "no_step_ended"),
        ("idle", None, "not_idle"),
        ("now", None, "cuda_graph_capture"),
    ],
)
def test_a_command_after_its_deadline_never_runs(
    bench: CommandBench, mode: str, at_step: int | None, code: str
) -> None:
    bench.allocator.capturing = mode == "now"
    bench.add(mode, at_step=at_step)
    bench.now += 30.0
    bench.sampler.on_step(None)  # a hung job recovers before the reporter's thread
    assert bench.allocator.cleared == 0
    bench.scheduler.run_due()
    result = bench.result()
    assert (result.outcome, result.reason_code) == ("expired", code)


def test_a_cancelled_command_does_not_run(bench: CommandBench) -> None:
    bench.add()
    bench.scheduler.cancel(("unknown", "a"))
    result = bench.result()
    assert (result.outcome, result.reason_code) == ("refused", "cancelled")
    bench.steps()
    assert bench.allocator.cleared == 0


def test_a_command_in_mode_idle_runs_after_two_seconds_without_an_allocation(bench: CommandBench) -> None:
    bench.add("idle")
    for _ in range(5):
        bench.scheduler.run_due()
        bench.allocator.allocated_blocks += 1
        bench.now += 1.0
    assert bench.allocator.cleared == 0
    bench.scheduler.run_due()
    bench.now += 1.9
    bench.scheduler.run_due()
    assert bench.allocator.cleared == 0
    bench.now += 0.1
    bench.scheduler.run_due()
    assert bench.result().outcome == "done"


def test_an_allocator_that_counts_no_allocations_is_not_idle(bench: CommandBench) -> None:
    bench.allocator.allocated_blocks = None
    bench.add("idle")
    for _ in range(30):
        bench.scheduler.run_due()
        bench.now += 1.0
    bench.scheduler.run_due()
    assert (bench.result().reason_code, bench.allocator.cleared) == ("not_idle", 0)


def test_while_steps_run_mode_idle_waits_and_does_not_count_allocations(bench: CommandBench) -> None:
    bench.add("idle")
    for _ in range(50):
        bench.steps()
        bench.scheduler.run_due()
    assert (bench.allocator.counted, bench.allocator.cleared) == (0, 0)
    for _ in range(5):
        bench.now += 1.0
        bench.scheduler.run_due()
    assert bench.result().outcome == "done"


def test_an_unknown_mode_or_action_is_unsupported(bench: CommandBench) -> None:
    bench.add("someday")
    assert bench.result().outcome == "unsupported"
    bench.add(action="explode", command_id="b")
    assert bench.result().outcome == "unsupported"


def test_a_command_is_refused_if_64_are_waiting(bench: CommandBench) -> None:
    for number in range(65):
        bench.add(command_id=str(number))
    result = bench.result()
    assert (result.id, result.outcome) == ("64", "refused")
