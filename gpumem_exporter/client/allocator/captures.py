"""CUDA graphs: whether one is being captured, and which private pools nothing holds any more.

PyTorch tells of captures through global hooks (2.14 and later). It does not tell when a graph has died, nor which pools
are still held: a dead graph's memory stays in its pool until somebody empties the cache, and looks there like a living
one's. But a pool that PyTorch made for a graph is held by graphs alone: by that one, and by those that were captured
into the same pool later. So it is dead once all of them are.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from gpumem_exporter.client.allocator.heap import PoolId
from gpumem_exporter.client.hooks.graph_captures import on_captures

__all__ = ["Captures"]


@dataclass(slots=True)
class _Capture:
    """A capture whose end no hook has reported."""

    graph: weakref.ref[Any]
    thread: int
    under_way: bool = True
    """False once its own thread was found outside of a capture: its end has failed."""


class Captures:
    """Watches the captures of this process, whichever threads make them. All but the hooks: one thread at a time.

    Args:
        capturing: whether the calling thread's current stream is in a capture.
    """

    def __init__(self, capturing: Callable[[], bool]) -> None:
        self._capturing = capturing
        self._begun: dict[int, _Capture] = {}
        self._holders: dict[PoolId, list[weakref.ref[Any]]] = {}
        self._dead: set[PoolId] = set()
        self._deaths = 0

    def watch(self) -> Callable[[], None]:
        """Start to watch; returns a function that ends it."""
        return on_captures(self._begin, self._end)

    @property
    def under_way(self) -> bool:
        """A graph is being captured, or may be. Before torch 2.14 this covers the calling thread only.

        A capture is over when torch's hook reports its end. The hook does not run if ending the capture failed. Only
        the thread that captures can tell then, since torch reports about the current stream of the calling thread
        alone. Until that thread asks at a moment when its current stream is in no capture, the answer stays True.
        """
        if self._may_be_capturing():
            return True
        here = threading.get_ident()
        under_way = False
        for capture in list(self._begun.values()):
            if capture.thread == here:
                capture.under_way = False
            elif capture.under_way and capture.graph() is not None:
                under_way = True
        return under_way

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
        for key, capture in list(self._begun.items()):
            if capture.graph() is None:
                self._begun.pop(key, None)
        for pool, holders in list(self._holders.items()):
            while holders and _pool(holders[-1]()) != pool:
                holders.pop()
            if not holders:
                del self._holders[pool]
                self._dead.add(pool)
                self._deaths += 1

    def _begin(self, graph: Any) -> None:
        self._begun[id(graph)] = _Capture(weakref.ref(graph), threading.get_ident())

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


def _pool(graph: Any) -> PoolId | None:
    """The pool that a graph holds; None once it is gone or has been reset."""
    if graph is None:
        return None
    try:
        first, second = graph.pool()
    except RuntimeError:
        return None
    return int(first), int(second)
