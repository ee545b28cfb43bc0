"""An exception that a signal handler raises while the client's code runs reaches the user's code."""

from __future__ import annotations

import contextlib
import functools
import logging
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from gpumem_client.guest_safety import guest_safety
from gpumem_client.hooks.out_of_memory import OutOfMemoryObserver
from gpumem_client.hooks.steps import Steps
from gpumem_client.phases.measured_block import Measured
from gpumem_client.phases.observed import Observed
from gpumem_toolkit import oom_guard
from gpumem_toolkit.integrations.training_watch import safely
from gpumem_toolkit.oom import guard
from tests.support.builders.fake_allocator import CommandBench


def test_an_integration_that_fails_is_one_line_and_the_training_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    steps = []

    @safely
    def step() -> None:
        steps.append(1)
        raise RuntimeError("a defect of the integration")

    with caplog.at_level(logging.DEBUG):
        for _ in range(3):
            step()
    assert len(steps) == 3
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(lines) == 1
    assert "a defect of the integration" in lines[0]


class TooLateError(Exception):
    """An error that the user's signal handler raises after a timeout."""


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
    """Stands for code of the client that a signal interrupts."""
    signal.raise_signal(signal.SIGUSR1)


@pytest.fixture(autouse=True)
def _handler() -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, too_late)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("handler", [too_late, functools.partial(too_late_for, "all"), Clock(), Clock().alarm])
def test_a_handler_may_be_any_callable(handler: Any) -> None:
    signal.signal(signal.SIGUSR1, handler)
    with pytest.raises(TooLateError), guest_safety():
        interrupted()


def test_an_error_of_the_client_is_none_of_a_handler_that_contextlib_decorates() -> None:
    @contextlib.contextmanager
    def logged() -> Iterator[None]:
        yield

    signal.signal(signal.SIGUSR1, logged()(too_late))

    @guest_safety()
    def fails() -> None:
        raise RuntimeError("a defect of the client")

    fails()
    with pytest.raises(TooLateError):
        guest_safety()(interrupted)()


def test_after_an_error_at_a_step_its_listener_stays() -> None:
    steps = Steps()
    heard: list[object] = []
    steps.listen(interrupted)
    steps.listen(heard.append)
    with pytest.raises(TooLateError):
        steps.mark()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    steps.mark()
    assert heard[-1:] == [None]


def test_an_error_at_the_start_of_a_phase_leaves_no_phase_open() -> None:
    first = iter((interrupted, lambda: None))
    observed = Observed(statistics=lambda: next(first)())
    with pytest.raises(TooLateError), Measured("forward", kept=True, observed=observed):
        pytest.fail("the block must not start")
    assert observed.current_phase() is None


def test_an_error_at_an_out_of_memory_error_reaches_the_user_s_code() -> None:
    observer = OutOfMemoryObserver()
    observer.listener = interrupted
    with pytest.raises(TooLateError):
        observer(0, 1, 2, 3)


def test_an_error_at_a_guarded_block_reaches_the_user_s_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard._blocks, "start", interrupted)
    with pytest.raises(TooLateError), oom_guard():
        pass


def test_a_command_interrupted_by_a_signal_handler_fails_and_the_error_goes_on() -> None:
    bench = CommandBench()
    bench.allocator.empty_cache = interrupted
    bench.add()
    with pytest.raises(TooLateError):
        bench.steps()
    result = bench.result()
    assert (result.id, result.outcome) == ("a", "failed")
    assert "TooLateError" in result.reason
    assert not bench.sampler.exclusively.locked()
