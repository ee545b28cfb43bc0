from __future__ import annotations

import gc
import logging
import sys
import threading
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from gpumem_client.hooks.steps import Steps, no_training


def test_no_training_suppresses_the_steps_of_its_thread() -> None:
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


def test_a_listener_that_raises_is_not_called_again_and_the_others_are(caplog: pytest.LogCaptureFixture) -> None:
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


def test_a_logging_handler_raises_nothing_into_the_optimizer_and_keeps_no_tensor() -> None:
    class Tensor:
        pass

    class Strict(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            kept.append(record)
            raise RuntimeError("no warnings are wanted here")

    kept: list[logging.LogRecord] = []
    held: list[weakref.ref[Tensor]] = []

    def listener(_: object) -> None:
        tensor = Tensor()
        held.append(weakref.ref(tensor))
        raise ValueError("its own fault")

    steps = Steps()
    steps.listen(listener)
    strict = Strict()
    logging.getLogger().addHandler(strict)
    try:
        steps.mark()
    finally:
        logging.getLogger().removeHandler(strict)
    assert "ValueError('its own fault')" in kept[0].getMessage()
    assert held[0]() is None


OPTIMIZERS = """
hooks = {}

class Handle:
    def __init__(self, hook):
        hooks[id(self)] = hook
    def remove(self):
        del hooks[id(self)]

register_optimizer_step_post_hook = Handle

def wrapper(optimizer):
    for hook in hooks.values():
        hook(optimizer, (), {})
"""


@pytest.fixture
def optimizers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A `torch.optim.optimizer` that iterates over its hooks as torch does."""
    module = ModuleType("torch.optim.optimizer")
    module.__file__ = "optimizers-of-the-test.py"
    exec(compile(OPTIMIZERS, module.__file__, "exec"), vars(module))
    monkeypatch.setitem(sys.modules, "torch.optim.optimizer", module)
    return module


def test_the_hook_is_removed_without_listeners_and_installed_for_the_next_one(optimizers: Any) -> None:
    steps = Steps()
    heard: list[object] = []
    for _ in range(2):
        first, second = steps.listen(heard.append), steps.listen(lambda _: None)
        optimizers.wrapper("optimizer")
        first()
        assert steps.update()
        assert len(optimizers.hooks) == 1, "there is another listener"
        second()
        assert steps.update()
        assert optimizers.hooks == {}
    assert heard == ["optimizer"] * 2


def test_a_hook_is_neither_installed_nor_removed_while_an_optimizer_walks_over_its_hooks(optimizers: Any) -> None:
    steps = Steps()
    stops: list[Callable[[], None]] = []
    removed: list[bool] = []

    def listen(*_: object) -> None:
        stops.append(steps.listen(lambda _: None))

    def stop(*_: object) -> None:
        stops.pop()()
        removed.append(steps.update())

    handle = optimizers.register_optimizer_step_post_hook(listen)
    optimizers.wrapper("optimizer")
    handle.remove()
    assert optimizers.hooks == {}
    steps.update()
    assert len(optimizers.hooks) == 1
    handle = optimizers.register_optimizer_step_post_hook(stop)
    optimizers.wrapper("optimizer")
    handle.remove()
    assert removed == [False]
    assert len(optimizers.hooks) == 1
    assert steps.update()
    assert optimizers.hooks == {}


def test_the_removal_keeps_no_local_variable_of_its_caller(optimizers: Any) -> None:
    class Model:
        pass

    def removes() -> weakref.ref[Model]:
        model = Model()
        steps = Steps()
        steps.listen(lambda _: None)()
        assert steps.update()
        return weakref.ref(model)

    collected = gc.isenabled()
    gc.disable()
    try:
        assert removes()() is None
    finally:
        if collected:
            gc.enable()
