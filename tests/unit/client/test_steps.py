from __future__ import annotations

import gc
import logging
import threading
import weakref

import pytest

from gpumem_exporter.client.hooks.steps import Steps, no_training, runs_a_step


def test_what_is_no_training_makes_no_step_in_its_thread() -> None:
    steps = Steps()
    heard: list[object] = []
    steps.listen(heard.append)
    steps.mark()
    with no_training():
        with no_training():
            steps.mark()
        steps.mark()
        thread = threading.Thread(target=steps.mark)
        thread.start()
        thread.join()
    steps.mark()
    assert len(heard) == 3


def test_a_listener_that_raises_is_called_no_more_and_the_others_are(caplog: pytest.LogCaptureFixture) -> None:
    steps = Steps()
    heard: list[object] = []
    failed: list[object] = []

    def fails(optimizer: object) -> None:
        failed.append(optimizer)
        raise ValueError("its own fault")

    steps.listen(fails)
    stop = steps.listen(heard.append)
    steps.mark()
    steps.mark()
    assert failed == [None]
    assert len(caplog.records) == 1
    assert heard == [None, None]
    stop()
    steps.mark()
    assert heard == [None, None]


def test_a_handler_of_the_program_s_that_raises_raises_nothing_where_an_optimizer_steps() -> None:
    class Strict(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            emitted.append(record.getMessage())
            raise RuntimeError("no warnings are wanted here")

    def fails(optimizer: object) -> None:
        raise ValueError("its own fault")

    emitted: list[str] = []
    strict = Strict()
    steps = Steps()
    steps.listen(fails)
    logging.getLogger().addHandler(strict)
    try:
        steps.mark()
    finally:
        logging.getLogger().removeHandler(strict)
    (logged,) = emitted
    assert "ValueError('its own fault')" in logged


def test_the_look_at_where_every_thread_is_keeps_nothing_of_who_asks_for_it() -> None:
    class Model:
        pass

    def asks() -> weakref.ref[Model]:
        model = Model()
        assert not runs_a_step("optimizer.py")
        return weakref.ref(model)

    collected = gc.isenabled()
    gc.disable()
    try:
        assert asks()() is None
    finally:
        if collected:
            gc.enable()


def test_a_handler_that_keeps_what_is_logged_keeps_nothing_of_the_program_s(caplog: pytest.LogCaptureFixture) -> None:
    class Tensor:
        pass

    held: list[weakref.ref[Tensor]] = []

    def listener(_: object) -> None:
        tensor = Tensor()
        held.append(weakref.ref(tensor))
        raise ValueError("of the program")

    steps = Steps()
    steps.listen(listener)
    steps.mark()
    (logged,) = caplog.messages
    assert "ValueError('of the program')" in logged
    assert held[0]() is None
