"""CUDA graphs: whether one is being captured, and which private pools no graph uses any more."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from typing import Any

from gpumem_client.allocator.heap_sum import PoolId
from gpumem_client.hooks.graph_captures import listen_to_captures, running_captures


class Captures:
    """Watches the captures of this process. Only one thread may use it; any thread may call the two listener methods.

    `capturing` returns whether the current stream of the calling thread is being captured.
    """

    def __init__(self, capturing: Callable[[], bool]) -> None:
        self._capturing = capturing
        # Graphs whose capture is running or has failed. Weak references: a graph that stays alive keeps its pool.
        self._incomplete: dict[int, weakref.ref[Any]] = {}
        # PyTorch does not report that a pool is dead. Its memory stays reserved until the cache is emptied, and looks
        # like the memory of a pool in use. So the users of each pool are counted here.
        self._users: dict[PoolId, list[weakref.ref[Any]]] = {}
        self._dead: set[PoolId] = set()
        self._pools: set[PoolId] = set()
        self._deaths = 0

    def watch(self) -> Callable[[], None]:
        """Start watching. Returns a function that stops it."""
        return listen_to_captures(self)

    def capture_started(self, graph: Any) -> None:
        """Note the start of a capture. The hook calls this in the capturing thread."""
        self._incomplete[id(graph)] = weakref.ref(graph)

    def capture_ended(self, graph: Any, *, complete: bool) -> None:
        """Note the end of a capture, also after a failure. The hook calls this in the capturing thread."""
        if not complete:
            return
        pool = _pool(graph)
        if pool is not None:
            self._pools.add(pool)
        # The id (n, 0) was made for a graph. The users of (0, n) are unknown: the user's code made that pool, with
        # `MemPool` or `graph_pool_handle`.
        if pool is not None and pool[1] == 0:
            self._users.setdefault(pool, []).append(weakref.ref(graph))
        self._incomplete.pop(id(graph), None)

    @property
    def under_way(self) -> bool:
        """Whether a graph is being captured in any thread of this process. Changes no stream."""
        if running_captures():  # that `torch.cuda.CUDAGraph` makes, as the hook reports
            return True
        try:
            return self._capturing()  # a capture that started before the hook was installed
        except RuntimeError:
            # During some captures the driver rejects a query of the legacy stream (cudaErrorStreamCaptureImplicit).
            return True

    def dead_pools(self) -> Collection[PoolId]:
        """Return the private pools that no graph uses; none of the pools that the user's code made."""
        self._update()
        # A graph whose capture is running or has failed does not show its pool: it may use any of them.
        return () if self._incomplete else self._dead

    def pools(self) -> Collection[PoolId]:
        """Return the private pools into which graphs were captured. Any thread may call this."""
        return self._pools

    def version(self) -> tuple[int, bool]:
        """Return a value that changes whenever `dead_pools` changes."""
        self._update()
        return self._deaths, bool(self._incomplete)

    def keep_only(self, present: Collection[PoolId]) -> None:
        """Forget the pools that are not among these, which still have memory."""
        self._dead.intersection_update(present)
        if not self._incomplete:
            self._pools.intersection_update(present)

    def _update(self) -> None:
        for key, graph in list(self._incomplete.items()):
            if graph() is None:
                self._incomplete.pop(key, None)
        # Only graphs use a pool that PyTorch made for a graph: that graph, and those captured into the pool later.
        for pool, users in list(self._users.items()):
            while users and _pool(users[-1]()) != pool:
                users.pop()
            if not users:
                del self._users[pool]
                self._dead.add(pool)
                self._deaths += 1


def _pool(graph: Any) -> PoolId | None:
    """Return the pool that a graph uses; None if the graph was deleted or reset."""
    if graph is None:
        return None
    try:
        first, second = graph.pool()
    except RuntimeError:
        return None
    return int(first), int(second)
