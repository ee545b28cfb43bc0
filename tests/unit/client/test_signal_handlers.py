"""What a signal's handler of the program raises while our code runs goes on to the program."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gpumem_exporter.client import oom_guard
from gpumem_exporter.client.allocator.sampler import Sampler
from gpumem_exporter.client.commands.executor import Executor
from gpumem_exporter.client.commands.scheduler import Waiting
from gpumem_exporter.client.hooks.guest_safety import Swallowing
from gpumem_exporter.client.hooks.steps import Steps
from gpumem_exporter.client.measure.measured import Measured
from gpumem_exporter.client.measure.observed import Observed
from gpumem_exporter.client.oom import guard
from gpumem_exporter.client.oom.observer import OutOfMemoryObserver
from gpumem_exporter.wire.protocol import Command
from tests.support.fake_allocator import FakeAllocator


class TooLateError(Exception):
    """What a program raises once its time is over."""


def too_late(number: int, frame: object) -> None:
    raise TooLateError


def too_late_for(whom: str, number: int, frame: object) -> None:
    too_late(number, frame)


class Clock:
    def __call__(self, number: int, frame: object) -> None:
        too_late(number, frame)

    def alarm(self, number: int, frame: object) -> None:
        too_late(number, frame)


def interrupted(*_: Any, **__: Any) -> Any:
    """Stands for a piece of our code in which a signal comes."""
    signal.raise_signal(signal.SIGUSR1)


@pytest.fixture(autouse=True)
def _handler() -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, too_late)
    yield
    signal.signal(signal.SIGUSR1, before)


def at_a_step() -> None:
    steps, told = Steps(), []
    steps.listen(interrupted)
    steps.listen(told.append)
    try:
        steps.mark()
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        steps.mark()
        assert told[-1:] == [None], "whoever listens goes on listening"


def at_a_sample() -> None:
    allocator: Any = FakeAllocator()
    allocator.samples = interrupted
    Sampler(allocator, swallow=lambda error: None).on_step(None)


def at_a_phase_s_begin() -> None:
    first = iter((interrupted, lambda: None))
    observed = Observed(statistics=lambda: next(first)())
    measured = Measured("forward", kept=True, observed=observed)
    try:
        with measured:
            pytest.fail("it has begun")
    finally:
        assert observed.current_phase() is None


def at_an_out_of_memory_error() -> None:
    observer = OutOfMemoryObserver()
    observer.listener = interrupted
    observer(0, 1, 2, 3)


def at_a_guarded_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard._blocks, "start", interrupted)
    with oom_guard():
        pass


@pytest.mark.parametrize("where", [at_a_step, at_a_sample, at_a_phase_s_begin, at_an_out_of_memory_error])
def test_what_a_handler_raises_in_our_code_reaches_the_program(where: Callable[[], None]) -> None:
    with pytest.raises(TooLateError):
        where()


def test_what_a_handler_raises_at_a_guarded_block_reaches_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TooLateError):
        at_a_guarded_block(monkeypatch)


def test_a_command_that_a_handler_ends_at_a_step_has_failed_and_the_program_gets_its_error() -> None:
    allocator: Any = FakeAllocator()
    allocator.empty_cache = interrupted
    sampler = Sampler(allocator, swallow=lambda error: None)
    waiting = Waiting(Executor(allocator, sampler), allocator, sampler, wake=lambda: None)
    sampler.at_step = waiting.at_step
    waiting.take(Command("a", "empty_cache", 30.0, mode="step"), expires_seconds=float("inf"))
    with pytest.raises(TooLateError):
        sampler.on_step(None)
    (result,) = waiting.take_results()
    assert (result.id, result.outcome, result.reason) == ("a", "failed", result.reason)
    assert "TooLateError" in result.reason
    assert not sampler.exclusively().locked()


def test_ctrl_c_at_an_out_of_memory_error_ends_the_program() -> None:
    observer = OutOfMemoryObserver()
    observer.listener = interrupted
    signal.signal(signal.SIGUSR1, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        observer(0, 1, 2, 3)


@pytest.mark.parametrize("handler", [functools.partial(too_late_for, "all"), Clock(), Clock().alarm])
def test_a_handler_may_be_anything_that_can_be_called(handler: Any) -> None:
    signal.signal(signal.SIGUSR1, handler)
    with pytest.raises(TooLateError), Swallowing():
        interrupted()


def test_an_error_of_our_own_is_kept_from_the_program() -> None:
    with Swallowing():
        raise TooLateError
