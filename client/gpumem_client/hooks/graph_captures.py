"""Calls at the start and the end of each CUDA graph capture, in the thread that captures.

The hook replaces the two methods of `torch.cuda.CUDAGraph` that start and end a capture, in every release of torch.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from gpumem_client.guest_safety import guest_safety
from gpumem_client.hooks.process_life import after_fork_in_child

# Methods that end a capture. The hook replaces the first that exists: since torch 2.14 the second calls the first.
_ENDS = ("capture_end_pre", "capture_end")
# The longest that the start of a capture waits for a clear in another thread.
_CLEAR_SECONDS = 2.0


class CaptureListener(Protocol):
    """Receives a call around each capture. Its errors are swallowed."""

    def capture_started(self, graph: Any) -> None:
        """Note that a capture into this graph starts."""

    def capture_ended(self, graph: Any, *, complete: bool) -> None:
        """Note that the capture has ended. It is incomplete if starting or ending it has failed."""


class CaptureHook:
    """The replaced methods, shared by all listeners of the process."""

    def __init__(self) -> None:
        self.renew_locks()
        self._survives_forks = False
        self._listeners: tuple[CaptureListener, ...] = ()
        # The graphs that are being captured.
        self._started: dict[int, weakref.ref[Any]] = {}
        self._graph_class: Any = None
        self._originals: dict[str, Any] = {}
        self._replacements: dict[str, Any] = {}

    def renew_locks(self) -> None:
        """Replace the locks in a forked child, because another thread may have held them at the fork."""
        # Reentrant: a finalizer may remove a listener, or clear, while its thread holds the lock.
        self._lock = threading.RLock()
        self._starting = threading.RLock()

    @contextmanager
    def no_start(self) -> Iterator[bool]:
        """Let no capture start within the context. Yields False after `_CLEAR_SECONDS` in another such context."""
        lock = self._starting
        held = lock.acquire(timeout=_CLEAR_SECONDS)
        try:
            yield held
        finally:
            if held:
                lock.release()

    def add(self, listener: CaptureListener) -> None:
        """Add a listener, and report the running captures to it. The first listener installs the hook."""
        if not self._survives_forks:
            self._survives_forks = True
            after_fork_in_child(self.renew_locks, first=True)
        with self._lock:
            self._listeners = (*self._listeners, listener)
            if self._graph_class is None:
                self.install()
        for graph in self.running():
            listener.capture_started(graph)

    def running(self) -> list[Any]:
        """Return the graphs that are being captured. Any thread may call this."""
        return [graph for reference in list(self._started.values()) if (graph := reference()) is not None]

    def discard(self, listener: CaptureListener) -> None:
        """Stop calling the listener. The last one removes the hook."""
        with self._lock:
            self._listeners = tuple(each for each in self._listeners if each is not listener)
            if not self._listeners:
                self.remove()

    def install(self) -> None:
        """Replace the methods, if this torch has them."""
        # Torch's own hooks (2.14 and later) do not run if ending a capture fails.
        self._graph_class = getattr(sys.modules.get("torch.cuda.graphs"), "CUDAGraph", None)
        end = next((name for name in _ENDS if name in vars(self._graph_class or object)), None)
        if end is None or "capture_begin" not in vars(self._graph_class):
            return
        self._originals = {name: vars(self._graph_class)[name] for name in ("capture_begin", end)}
        self._replacements = {
            "capture_begin": self._around_begin(self._originals["capture_begin"]),
            end: self._around_end(self._originals[end]),
        }
        for name, replacement in self._replacements.items():
            setattr(self._graph_class, name, replacement)

    def remove(self) -> None:
        """Restore the methods. If another library has wrapped a method since, it stays and calls no listener."""
        for name, replacement in self._replacements.items():
            if vars(self._graph_class).get(name) is replacement:
                setattr(self._graph_class, name, self._originals[name])
        self._replacements, self._originals, self._graph_class = {}, {}, None
        self._started.clear()

    def _around_begin(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def capture_begin(graph: Any, *arguments: Any, **named: Any) -> Any:
            try:
                # Before the capture starts: a clear in another thread would otherwise run into it.
                self._starts(graph)
                return original(graph, *arguments, **named)
            except BaseException:
                self._ended(graph, complete=False)
                raise

        return capture_begin

    def _around_end(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def capture_end(graph: Any, *arguments: Any, **named: Any) -> Any:
            complete = False
            try:
                result = original(graph, *arguments, **named)
                complete = True
                return result
            finally:
                self._ended(graph, complete=complete)

        return capture_end

    @guest_safety()
    def _starts(self, graph: Any) -> None:
        # A `cudaFree` of a clear that runs in another thread, on any device, would break this capture. A clear that
        # takes longer must not stop training, so the capture then starts beside it.
        with self.no_start():
            self._started[id(graph)] = weakref.ref(graph)
        for listener in self._listeners:
            listener.capture_started(graph)

    @guest_safety()
    def _ended(self, graph: Any, *, complete: bool) -> None:
        self._started.pop(id(graph), None)
        for listener in self._listeners:
            listener.capture_ended(graph, complete=complete)


_hook = CaptureHook()


def running_captures() -> list[Any]:
    """Return the graphs that are being captured in any thread; empty if nothing listens."""
    return _hook.running()


def no_capture_starts() -> AbstractContextManager[bool]:
    """Return a context in which no capture starts for some seconds: a capture of another thread waits.

    It yields False if another clear, or a starting capture, has not ended within that time. The caller checks for
    captures within the context.
    """
    return _hook.no_start()


def listen_to_captures(listener: CaptureListener) -> Callable[[], None]:
    """Call the listener around each capture; returns a function that ends the calls.

    The first listener installs the hook; the removal of the last one restores torch's methods.
    """
    _hook.add(listener)
    return functools.partial(_hook.discard, listener)
