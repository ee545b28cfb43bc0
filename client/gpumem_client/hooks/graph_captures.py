"""CUDA graphs: which are being captured, and which private pools no graph uses any more.

The hook replaces the two methods of `torch.cuda.CUDAGraph` that start and end a capture, in every release of torch.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from gpumem_client.guest_safety import guest_safety

# Methods that end a capture. The hook replaces the first that exists: since torch 2.14 the second calls the first.
_ENDS = ("capture_end_pre", "capture_end")
# The longest that the start of a capture waits for a clear in another thread.
_CLEAR_SECONDS = 2.0


class GraphCaptures:
    """The captures of this process, from the first `watch` to the end of the last one. Any thread may call any method.

    The id of a pool has two numbers, as `torch.cuda.CUDAGraph.pool` returns them.
    """

    def __init__(self) -> None:
        # Held while the hook is installed or removed. No thread waits for it: another one may hold it when the process
        # forks, and a finalizer may end a watch while its thread holds it.
        self._changing = threading.Lock()
        # Reentrant: a finalizer may clear while its thread holds the lock.
        self._starting = threading.RLock()
        self._watches: set[object] = set()
        self._installed = False
        self._graph_class: Any = None
        # The methods of torch and what replaces them, by name.
        self._replaced: dict[str, tuple[Any, Any]] = {}
        self._forget()

    def _forget(self) -> None:
        # The graphs that are being captured. Weak references: a graph that stays alive keeps its pool.
        self._running: dict[int, weakref.ref[Any]] = {}
        # Graphs whose capture is running or has failed.
        self._incomplete: dict[int, weakref.ref[Any]] = {}
        # PyTorch does not report that a pool is dead. Its memory stays reserved until the cache is emptied, and looks
        # like the memory of a pool in use. So the graphs of each pool are kept here, by their id.
        self._users: dict[tuple[int, int], dict[int, weakref.ref[Any]]] = {}

    def watch(self) -> Callable[[], None]:
        """Watch the captures from now on; returns a function that ends this watch.

        The first watch installs the hook; the end of the last one restores torch's methods.
        """
        watch = object()

        def end() -> None:
            self._watches.discard(watch)
            self._install_or_remove()

        self._watches.add(watch)
        self._install_or_remove()
        return end

    @contextmanager
    def no_start(self) -> Iterator[bool]:
        """Let no capture start within the context: a capture of another thread waits for some seconds.

        Yields False if another clear, or a starting capture, has not ended within that time. The caller checks for
        captures within the context.
        """
        lock = self._starting
        held = lock.acquire(timeout=_CLEAR_SECONDS)
        try:
            yield held
        finally:
            if held:
                lock.release()

    def running(self) -> list[Any]:
        """Return the graphs that are being captured in any thread."""
        return [graph for reference in list(self._running.values()) if (graph := reference()) is not None]

    def dead_pools(self) -> frozenset[tuple[int, int]]:
        """Return the private pools that no graph uses; none of the pools that the user's code made."""
        for key, graph in list(self._incomplete.items()):
            if graph() is None:
                self._incomplete.pop(key, None)
        # A graph whose capture is running or has failed does not show its pool: it may use any of them.
        if self._incomplete:
            return frozenset()
        # The id (n, 0) was made for a graph. Only graphs use such a pool: that graph, and those captured into the pool
        # later, even after it was dead. The users of (0, n) are unknown: the user's code made that pool, with `MemPool`
        # or `graph_pool_handle`.
        made_for_graphs = [(pool, users) for pool, users in list(self._users.items()) if pool[1] == 0]
        return frozenset(
            [pool for pool, users in made_for_graphs if all(_pool(user()) != pool for user in list(users.values()))]
        )

    def pools(self) -> Collection[tuple[int, int]]:
        """Return the private pools into which graphs were captured."""
        return frozenset(list(self._users))

    def keep_only(self, present: Collection[tuple[int, int]]) -> None:
        """Forget the pools that are not among these, which still have memory."""
        dead = self.dead_pools()
        for pool in self.pools():
            if pool not in present and not self._incomplete and (pool in dead or pool[1]):
                self._users.pop(pool, None)

    def _install_or_remove(self) -> None:
        while bool(self._watches) != self._installed and self._changing.acquire(blocking=False):
            try:
                self._installed = not self._installed
                (self._install if self._installed else self._remove)()
            finally:
                self._changing.release()

    def _install(self) -> None:
        """Replace the methods, if this torch has them."""
        # Torch's own hooks (2.14 and later) do not run if ending a capture fails.
        self._graph_class = getattr(sys.modules.get("torch.cuda.graphs"), "CUDAGraph", None)
        end = next((name for name in _ENDS if name in vars(self._graph_class or object)), None)
        if end is None or "capture_begin" not in vars(self._graph_class):
            return
        for name, around in (("capture_begin", self._around_begin), (end, self._around_end)):
            original = vars(self._graph_class)[name]
            self._replaced[name] = original, around(original)
            setattr(self._graph_class, name, self._replaced[name][1])

    def _remove(self) -> None:
        """Restore the methods. If another library has wrapped a method since, it stays and has no effect."""
        for name, (original, replacement) in self._replaced.items():
            if vars(self._graph_class).get(name) is replacement:
                setattr(self._graph_class, name, original)
        self._replaced, self._graph_class = {}, None
        self._forget()

    def _around_begin(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def capture_begin(graph: Any, *arguments: Any, **named: Any) -> Any:
            try:
                # Before the capture starts: a clear in another thread would otherwise run into it.
                self._started(graph)
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
    def _started(self, graph: Any) -> None:
        if not self._watches:
            return
        # A `cudaFree` of a clear that runs in another thread, on any device, would break this capture. A clear that
        # takes longer must not stop training, so the capture then starts beside it.
        with self.no_start():
            self._running[id(graph)] = self._incomplete[id(graph)] = weakref.ref(graph)

    @guest_safety()
    def _ended(self, graph: Any, *, complete: bool) -> None:
        """Note the end of a capture. It is incomplete if starting or ending it has failed."""
        self._running.pop(id(graph), None)
        pool = _pool(graph) if complete and self._watches else None
        if pool is not None:
            self._users.setdefault(pool, {})[id(graph)] = weakref.ref(graph)
        if complete:
            self._incomplete.pop(id(graph), None)


def _pool(graph: Any) -> tuple[int, int] | None:
    """Return the pool that a graph uses; None if the graph was deleted or reset."""
    if graph is None:
        return None
    try:
        first, second = graph.pool()
    except RuntimeError:
        return None
    return int(first), int(second)


_captures = GraphCaptures()


def process_captures() -> GraphCaptures:
    """Return the captures of this process."""
    return _captures
