"""CUDA graphs: whether one is being captured, and which private pools nothing holds any more.

PyTorch tells of captures through global hooks (2.14 and later). It does not tell when a graph has died, nor which pools
are still held: a dead graph's memory stays in its pool until somebody empties the cache, and looks there like a living
one's. But a pool that PyTorch made for a graph is held by graphs alone: by that one, and by those that were captured
into the same pool later. So it is dead once all of them are.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import Any

from gpumem_exporter.client.allocator.heap import PoolId

__all__ = ["Captures"]


class Captures:
    """Watches the captures of this process, whichever threads make them. All but the hooks: one thread at a time.

    Args:
        cuda: the program's `torch.cuda`.
        capturing: whether the calling thread's current stream is in a capture.
        has_context: whether this process has a context on a device.
    """

    def __init__(self, cuda: Any, capturing: Callable[[], bool], has_context: Callable[[int], bool]) -> None:
        self._cuda = cuda
        self._capturing = capturing
        self._has_context = has_context
        self._begun: dict[int, tuple[weakref.ref[Any], Any]] = {}
        self._holders: dict[PoolId, list[weakref.ref[Any]]] = {}
        self._dead: set[PoolId] = set()
        self._deaths = 0

    def hooks(self) -> Iterator[Callable[[], None]]:
        """Begin to watch; each of these takes a hook out again. Torch swallows what its hooks raise."""
        graphs = sys.modules.get("torch.cuda.graphs")
        for name, hook in (("start", self._begin), ("end", self._end)):
            register = getattr(graphs, f"register_graph_capture_{name}_hook", None)
            if register is not None:
                yield register(hook).remove

    @property
    def under_way(self) -> bool:
        """A graph is being captured: in any thread from torch 2.14 on, before that in the calling one.

        The hook for a capture's end does not run where ending it failed: hence the driver is asked.
        """
        return self._may_be_capturing() or any(
            graph() is not None and self._is_capturing(stream) for graph, stream in list(self._begun.values())
        )

    def dead_pools(self) -> Collection[PoolId]:
        """Private pools that nothing holds.

        Only what is certain: never a pool that the program made itself (`MemPool`, `graph_pool_handle`), since their
        holders are not known; and none at all while a graph whose capture began, and has not ended well, may hold one.
        """
        self._bury()
        return () if self._begun else self._dead

    def version(self) -> tuple[int, bool]:
        """Changes whenever `dead_pools` has more or less to say."""
        self._bury()
        return self._deaths, bool(self._begun)

    def keep_only(self, present: Collection[PoolId]) -> None:
        """Forget dead pools but for these, which still have memory."""
        self._dead.intersection_update(present)

    def _bury(self) -> None:
        for key, (graph, _) in list(self._begun.items()):
            if graph() is None:
                self._begun.pop(key, None)
        for pool, holders in list(self._holders.items()):
            while holders and _pool(holders[-1]()) != pool:
                holders.pop()
            if not holders:
                del self._holders[pool]
                self._dead.add(pool)
                self._deaths += 1

    def _begin(self, graph: Any) -> None:
        self._begun[id(graph)] = weakref.ref(graph), self._cuda.current_stream()

    def _end(self, graph: Any) -> None:
        pool = _pool(graph)
        if pool is not None and pool[1] == 0:  # (n, 0): made for a graph; (0, n): made by the program
            self._holders.setdefault(pool, []).append(weakref.ref(graph))
        self._begun.pop(id(graph), None)

    def _may_be_capturing(self) -> bool:
        """Whether this thread's stream is in a capture, or the driver will not say.

        During some captures it forbids even the question on the legacy stream (cudaErrorStreamCaptureImplicit).
        """
        try:
            return self._capturing()
        except RuntimeError:
            return True

    def _is_capturing(self, stream: Any) -> bool:
        """Whether a stream of any thread is in a capture. The driver may be asked at any time.

        Torch asks of the current stream alone; which one that is, is this thread's own affair.
        """
        here = self._cuda.current_stream()
        self._cuda.set_stream(stream)
        try:
            return self._may_be_capturing()
        finally:
            # Going back to a device that this process does not use would give it a context there.
            used = self._has_context(here.device_index)
            self._cuda.set_stream(here if used else self._cuda.default_stream(stream.device_index))


def _pool(graph: Any) -> PoolId | None:
    """The pool that a graph holds; None once it is gone or has been reset."""
    if graph is None:
        return None
    try:
        first, second = graph.pool()
    except RuntimeError:
        return None
    return int(first), int(second)
