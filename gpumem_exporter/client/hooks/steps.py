"""Tells whoever listens that a training step has ended, in the thread that made it."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from gpumem_exporter.client.hooks.call_stacks import any_thread_runs
from gpumem_exporter.client.hooks.cuda_start import when_cuda_starts
from gpumem_exporter.client.hooks.guest_safety import raised_by_signal_handler
from gpumem_exporter.client.log import log

__all__ = ["OneStep", "Steps", "no_training", "process_steps"]

_ABANDONED_STEPS = 8
"""An optimizer that makes none while another makes so many has been given up, though something still holds it."""
_not_training: set[int] = set()
"""Threads in which nothing counts as a step."""


@contextmanager
def no_training() -> Iterator[None]:
    """What this thread does meanwhile is no training, even where an optimizer steps: nobody is told of a step."""
    thread = threading.get_ident()
    outermost = thread not in _not_training
    _not_training.add(thread)
    try:
        yield
    finally:
        if outermost:
            _not_training.discard(thread)


class OneStep:
    """Tells the ends of steps from what else listeners hear of: each of several optimizers, and marks by hand.

    Of several optimizers in a step, the first one seen counts, until it is gone or makes no more steps; where the
    program marks its steps, its marks alone.
    """

    def __init__(self) -> None:
        self._by_hand = False
        self._counted: weakref.ref[Any] | None = None
        self._others = 0

    def ends(self, optimizer: Any) -> bool:
        """Whether this is the end of a step; None for the program's mark."""
        if optimizer is None:
            self._by_hand = True
            return True
        if self._by_hand:
            return False
        counted = self._counted() if self._counted is not None else None
        if counted is not optimizer:
            self._others += 1
            if counted is not None and self._others < _ABANDONED_STEPS:
                return False
            self._counted = weakref.ref(optimizer)
        self._others = 0
        return True


class Steps:
    """The ends of steps: those of any optimizer of `torch.optim`, and those that the program marks itself.

    Nothing that a listener raises reaches the program: its first error is logged, and it is not called again. Any
    thread may call any method.

    One hook is put into PyTorch for all listeners. PyTorch walks over its hooks at the end of an optimizer's step, and
    adding or removing one meanwhile would raise there: `install` and `remove` do nothing while an optimizer steps.
    """

    def __init__(self) -> None:
        self._listeners: dict[int, Callable[[Any], None]] = {}
        self._next_key = 0
        self._installed = False
        self._handle: Any = None
        self._stop_waiting: Callable[[], None] | None = None

    def listen(self, callback: Callable[[Any], None]) -> Callable[[], None]:
        """Have `callback(optimizer)` called after each step, with None for one that is marked by hand.

        PyTorch reports its optimizers from 2.1 on. If `listen` is called within an optimizer's step, the calls start
        with the next mark, listener or report.

        Returns:
            A function that ends the calls. The hook stays in PyTorch until `remove`.
        """
        key, self._next_key = self._next_key, self._next_key + 1
        self._listeners[key] = callback
        self.install()
        return lambda: self._stop(key)

    def install(self) -> None:
        """Put the hook into PyTorch, if there is a listener, no hook yet, and no optimizer steps right now."""
        if self._installed or not self._listeners:
            return
        optimizers = sys.modules.get("torch.optim.optimizer")
        if optimizers is None:
            if self._stop_waiting is None:
                self._stop_waiting = _nothing
                self._stop_waiting = when_cuda_starts(self.install)  # torch is not imported yet
            return
        register = getattr(optimizers, "register_optimizer_step_post_hook", None)
        if register is not None and not _an_optimizer_steps(optimizers):
            self._installed = True
            self._handle = register(_uncompiled(optimizers, lambda optimizer, _args, _kwargs: self._tell(optimizer)))

    def remove(self) -> bool:
        """Take the hook out of PyTorch if nothing listens any more.

        Returns:
            False while an optimizer steps: then the hook stays, and does nothing, until another call removes it.
        """
        if self._listeners:
            return True
        stop_waiting, self._stop_waiting = self._stop_waiting, None
        if stop_waiting is not None:
            stop_waiting()
        if self._handle is None:
            return True
        if _an_optimizer_steps(sys.modules.get("torch.optim.optimizer")):
            return False
        handle, self._handle = self._handle, None
        handle.remove()
        self._installed = False
        self.install()  # for a listener that has come meanwhile
        return True

    def mark(self) -> None:
        """A step has ended: the program says so."""
        if self._listeners:
            self.install()
            self._tell(None)

    def _tell(self, optimizer: Any) -> None:
        if _not_training and threading.get_ident() in _not_training:
            return
        # Keys alone: pairs are objects of the garbage collector's, which may run as each is made and end a watch, whose
        # listener goes (before Python 3.12).
        for key in list(self._listeners):
            listener = self._listeners.get(key)
            if listener is None:
                continue
            try:
                listener(optimizer)
            except Exception as error:  # this runs inside the program's optimizer
                if raised_by_signal_handler(error):
                    raise
                self._stop(key)
                log.warning("nothing is done at steps any more: %r", error)

    def _stop(self, key: int) -> None:
        self._listeners.pop(key, None)


def _uncompiled(optimizers: Any, hook: Callable[..., None]) -> Callable[..., None]:
    """The hook as `torch.compile` leaves it alone, where a compiled function has the optimizer step.

    It would compile what listeners do, guard that with what they count, and warn of what it cannot trace. What keeps
    it from that is loaded by the first call: so it is used where every optimizer is made with it.
    """
    disable = getattr(sys.modules.get("torch"), "_disable_dynamo", None)
    made_with_it = hasattr(getattr(getattr(optimizers, "Optimizer", None), "add_param_group", None), "__wrapped__")
    return disable(hook) if disable is not None and made_with_it else hook


def _an_optimizer_steps(optimizers: Any) -> bool:
    """Whether a thread is in the function that makes an optimizer's step and walks over its hooks."""
    return any_thread_runs("wrapper", getattr(optimizers, "__file__", ""))


def _nothing() -> None:
    """Stands for the end of a wait that is just being made."""


_steps = Steps()  # a process has one training loop


def process_steps() -> Steps:
    """The one of this process."""
    return _steps
