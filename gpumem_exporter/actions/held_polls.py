"""Requests of reporters that are held open until there is a command for them. Used on the event loop only."""

from __future__ import annotations

import asyncio
import contextlib

from gpumem_exporter.core.samples import ProcessKey

__all__ = ["HeldPolls"]


class HeldPolls:
    """At most one held request for each process."""

    def __init__(self) -> None:
        self._futures: dict[ProcessKey, asyncio.Future[None]] = {}

    def __len__(self) -> int:
        return len(self._futures)

    async def wait(self, key: ProcessKey, timeout_seconds: float) -> None:
        """Return when the process is woken, when the timeout has passed, or when a later request replaces this one.

        Cancelling the call is safe.
        """
        self.wake(key)  # a process has one connection, so an earlier request has no client any more
        future = asyncio.get_running_loop().create_future()
        self._futures[key] = future
        try:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(future, timeout_seconds)
        finally:
            if self._futures.get(key) is future:
                del self._futures[key]

    def wake(self, key: ProcessKey) -> None:
        """End the held request of a process; does nothing if there is none."""
        future = self._futures.get(key)
        if future is not None and not future.done():
            future.set_result(None)
