"""Tells whoever listens that a training step has ended, in the thread that made it."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from gpumem_exporter.client.hooks.cuda_start import when_cuda_starts
from gpumem_exporter.client.hooks.guest_safety import of_a_handler
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

    One hook is put into PyTorch, with the first listener, and never taken out: while an optimizer walks over its hooks,
    taking one out would raise in the program. So would adding one: that waits until none walks.
    """

    def __init__(self) -> None:
        self._listeners: dict[int, Callable[[Any], None]] = {}
        self._next_key = 0
        self._hooked = False
        self._waiting = False

    def listen(self, callback: Callable[[Any], None]) -> Callable[[], None]:
        """Have `callback(optimizer)` called after each step, with None for one that is marked by hand.

        PyTorch tells of its optimizers from 2.1 on. Called within an optimizer's step, that begins with the next mark,
        listener or report.

        Returns:
            What ends that.
        """
        key, self._next_key = self._next_key, self._next_key + 1
        self._listeners[key] = callback
        if "torch.optim.optimizer" in sys.modules:
            self.hook()
        elif not self._waiting:
            self._waiting = True
            when_cuda_starts(self.hook)  # torch is not imported yet
        return lambda: self._stop(key)

    def hook(self) -> None:
        """Hear of the optimizers, if somebody listens, none does yet and none of them steps right now."""
        if self._hooked or not self._listeners:
            return
        optimizers = sys.modules.get("torch.optim.optimizer")
        register = getattr(optimizers, "register_optimizer_step_post_hook", None)
        if register is not None and not runs_a_step(getattr(optimizers, "__file__", "")):
            self._hooked = True
            register(_uncompiled(optimizers, lambda optimizer, _args, _kwargs: self._tell(optimizer)))

    def mark(self) -> None:
        """A step has ended: the program says so."""
        if self._listeners:
            self.hook()
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
                if of_a_handler(error):
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


def runs_a_step(optimizer_file: str) -> bool:
    """Whether a thread is in the function of that file that makes an optimizer's step and walks over its hooks."""

    def is_one(frame: FrameType | None) -> bool:
        while frame is not None:
            if frame.f_code.co_filename == optimizer_file and frame.f_code.co_name == "wrapper":
                return True
            frame = frame.f_back
        return False

    # Our own frame is among them. A variable of its own that holds it would keep it, and with it those of the program
    # that have called us and all their tensors, until a garbage collection.
    return any(map(is_one, sys._current_frames().values()))  # noqa: SLF001 - where every thread is, nothing else says


_steps = Steps()  # a process has one training loop


def process_steps() -> Steps:
    """The one of this process."""
    return _steps
