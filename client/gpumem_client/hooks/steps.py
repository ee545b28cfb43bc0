"""Calls at the end of each training step, in the thread that made it."""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from gpumem_client.guest_safety import guest_safety, log
from gpumem_client.hooks.process_life import process_singleton
from gpumem_client.torch_access import uncompiled

# An optimizer counts as unused if it makes no step while others make this number of steps.
_ABANDONED_STEPS = 8


# `ignored`: whether optimizer steps of this thread are no training steps.
_thread = threading.local()


@contextmanager
def no_training() -> Iterator[None]:
    """Ignore the optimizer steps of this thread within the context: none counts as a training step."""
    before, _thread.ignored = getattr(_thread, "ignored", False), True
    try:
        yield
    finally:
        _thread.ignored = before


class OneStep:
    """Recognizes the ends of steps among the calls of a listener."""

    def __init__(self) -> None:
        self._by_hand = False
        self._counted: weakref.ref[Any] | None = None
        self._others = 0

    def ends(self, optimizer: Any) -> bool:
        """Whether this call is the end of a step; `optimizer` is None for a mark."""
        if optimizer is None:
            # A first mark after a step of an optimizer marks the end of that step, which has been counted.
            counts = self._by_hand or self._counted is None
            self._by_hand = True
            return counts
        if self._by_hand:
            return False
        # If a step has several optimizers, such as generator and discriminator, the first one counts, until it is
        # deleted or makes no more steps.
        counted = self._counted() if self._counted is not None else None
        if counted is not optimizer:
            self._others += 1
            if counted is not None and self._others < _ABANDONED_STEPS:
                return False
            self._counted = weakref.ref(optimizer)
        self._others = 0
        return True


class Steps:
    """The ends of steps of any optimizer of `torch.optim`, and the ends that the user's code marks.

    A listener's first error is logged, and the listener is not called again. Any thread may call any method. All
    listeners share one hook in PyTorch, which `update` does not change while an optimizer steps.
    """

    def __init__(self) -> None:
        # Guarded by no lock, because another thread could hold it when the process forks. Each access is one operation
        # of `dict`, which is atomic in Python, even without a GIL.
        self._listeners: dict[object, Callable[[Any], None]] = {}
        # Held while the hook is installed or removed. No thread waits for it.
        self._changing = threading.Lock()
        self._handle: Any = None

    def listen(self, callback: Callable[[Any], None]) -> Callable[[], None]:
        """Call `callback(optimizer)` after each step, and `callback(None)` after a mark.

        Returns a function that ends the calls; the hook stays in PyTorch until `update`. PyTorch reports the steps of
        optimizers from 2.1 on. If `listen` is called before torch is imported or within an optimizer's step, the calls
        start with the next mark, listener or report.
        """
        key = object()
        self._listeners[key] = callback
        self.update()
        return lambda: self._stop(key)

    def update(self) -> bool:
        """Install the hook if there is a listener and torch is loaded, or remove it if there is none.

        Does nothing while an optimizer steps. Returns False if a hook stays that no listener needs: it does nothing
        until another call removes it.
        """
        # Again after a change, for a listener that another thread has added or removed meanwhile.
        while bool(self._listeners) != (self._handle is not None) and self._changing.acquire(blocking=False):
            try:
                optimizers = sys.modules.get("torch.optim.optimizer")
                register = getattr(optimizers, "register_optimizer_step_post_hook", None)
                if register is None or _an_optimizer_steps(optimizers):
                    break
                if self._listeners and self._handle is None:
                    # At the end of a step the training thread is in no allocation and no capture. Errors of a hook go
                    # on into the user's `optimizer.step()`, so `_report` swallows them.
                    hook = uncompiled(optimizers, lambda optimizer, _args, _kwargs: self._report(optimizer))
                    self._handle = register(hook)
                elif not self._listeners and self._handle is not None:
                    self._handle.remove()
                    self._handle = None
            finally:
                self._changing.release()
        return self._handle is None or bool(self._listeners)

    def mark(self) -> None:
        """Report the end of a step that no optimizer made."""
        if self._listeners:
            self.update()
            self._report(None)

    def _report(self, optimizer: Any) -> None:
        if getattr(_thread, "ignored", False):
            return
        # A list of keys only: a list of pairs allocates tracked objects, which may start a garbage collection. Before
        # Python 3.12 that may end a watch, which removes its listener from this dictionary.
        for key in list(self._listeners):
            listener = self._listeners.get(key)
            if listener is not None:
                with guest_safety(functools.partial(self._failed, key)):
                    listener(optimizer)

    def _failed(self, key: object, error: Exception) -> None:
        self._stop(key)
        log.warning("a listener to steps failed and is not called again: %r", error)

    def _stop(self, key: object) -> None:
        self._listeners.pop(key, None)


def _an_optimizer_steps(optimizers: Any) -> bool:
    """Whether a thread is in the function that makes an optimizer's step and walks over its hooks."""
    # PyTorch iterates over the dictionary of its hooks there: a change would raise in the user's optimizer.
    file = getattr(optimizers, "__file__", "")

    def steps(frame: FrameType | None) -> bool:
        while frame is not None:
            if frame.f_code.co_filename == file and frame.f_code.co_name == "wrapper":
                return True
            frame = frame.f_back
        return False

    # A variable with these frames would be a reference cycle, because the frame of this function is among them. The
    # cycle would keep the callers' tensors until a garbage collection.
    return any(map(steps, sys._current_frames().values()))  # noqa: SLF001 - no public function shows other threads


def process_steps() -> Steps:
    """Return the steps of this process."""
    return process_singleton("steps", Steps)
