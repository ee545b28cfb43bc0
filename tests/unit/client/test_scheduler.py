"""Commands that wait in a process for the end of a step or for a rest."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from gpumem_exporter.client.allocator.sampler import Sampler
from gpumem_exporter.client.commands.executor import Executor
from gpumem_exporter.client.commands.scheduler import Scheduler
from gpumem_exporter.wire.protocol import Command, CommandResult
from tests.support.fake_allocator import FakeAllocator


class Bench:
    """A process at step 0, a clock set by hand, and a count of how often the reporter was woken."""

    def __init__(self) -> None:
        self.now = 100.0
        self.woken = 0
        self.allocator: Any = FakeAllocator()
        self.sampler = Sampler(self.allocator, swallow=lambda error: None, clock=lambda: self.now)
        self.executor = Executor(self.allocator, self.sampler, clock=lambda: self.now)
        self.waiting = Scheduler(self.executor, self.allocator, self.sampler, wake=self.wake, clock=lambda: self.now)
        self.sampler.at_step = self.waiting.at_step

    def wake(self) -> None:
        self.woken += 1

    def take(self, mode: str = "step", command_id: str = "a", **changes: Any) -> None:
        command = Command(command_id, **{"action": "empty_cache", "deadline_seconds": 30.0, "mode": mode, **changes})
        self.waiting.take(command, expires_seconds=self.now + command.deadline_seconds)

    def steps(self, count: int = 1) -> None:
        for _ in range(count):
            self.now += 0.1
            self.sampler.on_step(None)

    def result(self) -> CommandResult:
        (result,) = self.waiting.take_results()
        return result


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_in_mode_step_it_runs_at_the_end_of_the_next_step_in_the_thread_that_made_it(bench: Bench) -> None:
    bench.take()
    assert bench.waiting.ids == ("a",)
    bench.waiting.look()
    assert bench.allocator.cleared == 0
    thread = threading.Thread(target=bench.steps)
    thread.start()
    thread.join()
    result = bench.result()
    assert (result.outcome, result.step, result.thread_id) == ("done", 1, thread.native_id)
    assert (bench.allocator.cleared, bench.woken, bench.waiting.ids) == (1, 1, ())
    bench.steps(5)
    assert bench.allocator.cleared == 1


def test_given_twice_it_runs_once_and_answers_twice_the_same(bench: Bench) -> None:
    bench.take()
    bench.take()
    bench.steps()
    first = bench.result()
    bench.take()
    assert bench.result() == first
    assert bench.allocator.cleared == 1


def test_a_step_of_a_number_is_that_step_and_no_other(bench: Bench) -> None:
    bench.take(at_step=4)
    bench.steps(3)
    assert bench.waiting.take_results() == ()
    bench.steps(2)
    assert bench.result().step == 4


def test_a_step_that_has_passed_is_not_made_up_for(bench: Bench) -> None:
    bench.steps(4)
    bench.take(at_step=4)
    result = bench.result()
    assert (result.outcome, result.reason) == ("expired", result.reason)
    assert "step 4 " in result.reason
    assert bench.allocator.cleared == 0


def test_during_a_capture_a_step_waits_for_the_next_but_one_of_a_number_is_refused(bench: Bench) -> None:
    bench.take()
    bench.take(command_id="b", at_step=2)
    bench.allocator.capturing = True
    bench.steps(2)
    result = bench.result()
    assert (result.id, result.outcome, result.reason_code) == ("b", "refused", "cuda_graph_capture")
    bench.allocator.capturing = False
    bench.steps()
    assert bench.result().step == 3


def test_in_mode_now_it_waits_while_a_capture_may_be_under_way_and_runs_when_none_is(bench: Bench) -> None:
    bench.allocator.capturing = True
    bench.take("now")
    bench.waiting.look()
    assert bench.waiting.ids == ("a",)
    bench.allocator.capturing = False
    bench.waiting.look()
    assert (bench.result().outcome, bench.allocator.cleared) == ("done", 1)


def test_in_mode_now_it_runs_at_the_end_of_a_step_outside_of_a_capture_if_that_comes_first(bench: Bench) -> None:
    bench.allocator.capturing = True
    bench.take("now")
    bench.steps()
    assert bench.waiting.ids == ("a",)
    bench.allocator.capturing = False
    bench.steps()
    assert (bench.result().step, bench.woken) == (2, 1)


def test_a_step_never_waits_for_a_command_that_another_thread_runs(bench: Bench) -> None:
    bench.take()
    with bench.sampler.exclusively():
        bench.steps()
    assert bench.waiting.ids == ("a",)
    bench.steps()
    assert bench.result().outcome == "done"


@pytest.mark.parametrize(
    ("mode", "at_step", "code"),
    [
        ("step", None, "no_step_ended"),
        ("step", 9, "no_step_ended"),
        ("idle", None, "not_idle"),
        ("now", None, "cuda_graph_capture"),
    ],
)
def test_what_has_not_begun_by_its_deadline_never_does(bench: Bench, mode: str, at_step: int | None, code: str) -> None:
    bench.allocator.capturing = mode == "now"
    bench.take(mode, at_step=at_step)
    bench.now += 30.0
    bench.sampler.on_step(None)  # a hung job recovers before the reporter's thread does
    assert bench.allocator.cleared == 0
    bench.waiting.look()
    result = bench.result()
    assert (result.outcome, result.reason_code) == ("expired", code)


def test_what_is_cancelled_does_not_run(bench: Bench) -> None:
    bench.take()
    bench.waiting.cancel(("unknown", "a"))
    result = bench.result()
    assert (result.outcome, result.reason_code) == ("refused", "cancelled")
    bench.steps()
    assert bench.allocator.cleared == 0


def test_in_mode_idle_it_runs_once_nothing_was_allocated_for_a_while(bench: Bench) -> None:
    bench.take("idle")
    for _ in range(5):
        bench.waiting.look()
        bench.allocator.allocated_blocks += 1
        bench.now += 1.0
    assert bench.allocator.cleared == 0
    bench.waiting.look()
    bench.now += 1.9
    bench.waiting.look()
    assert bench.allocator.cleared == 0
    bench.now += 0.1
    bench.waiting.look()
    assert bench.result().outcome == "done"


def test_in_mode_idle_it_does_not_run_while_steps_do_and_does_not_look_either(bench: Bench) -> None:
    bench.take("idle")
    for _ in range(50):
        bench.steps()
        bench.waiting.look()
    assert (bench.allocator.counted, bench.allocator.cleared) == (0, 0)
    for _ in range(5):
        bench.now += 1.0
        bench.waiting.look()
    assert bench.result().outcome == "done"


def test_in_mode_idle_a_capture_is_waited_for(bench: Bench) -> None:
    bench.take("idle")
    bench.allocator.capturing = True
    for _ in range(4):
        bench.now += 1.0
        bench.waiting.look()
    assert bench.waiting.ids == ("a",)
    bench.allocator.capturing = False
    for _ in range(4):
        bench.now += 1.0
        bench.waiting.look()
    assert bench.result().outcome == "done"


def test_a_mode_of_a_newer_exporter_is_answered_as_one_that_is_not_known(bench: Bench) -> None:
    bench.take("someday")
    assert bench.result().outcome == "unsupported"
    bench.take(action="explode", command_id="b")
    assert bench.result().outcome == "unsupported"


def test_only_so_many_wait(bench: Bench) -> None:
    for number in range(65):
        bench.take(command_id=str(number))
    result = bench.result()
    assert (result.id, result.outcome) == ("64", "refused")
