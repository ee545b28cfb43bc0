"""Requests whose reply waits: a report for a command, an action for its end. Used on the event loop only."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Hashable
from enum import Enum, auto

from starlette.types import Receive


class Held(Enum):
    """Why a request is held no longer."""

    WOKEN = auto()
    LATE = auto()
    """The time is over."""
    GONE = auto()
    """The client disconnected."""
    STOPPING = auto()
    """The exporter stops."""


class HeldRequests:
    """All requests that are held, by what they wait for: a process or the id of an action."""

    def __init__(self) -> None:
        self._held: defaultdict[Hashable, set[asyncio.Future[Held]]] = defaultdict(set)
        self._stopping = False

    def __len__(self) -> int:
        return sum(map(len, self._held.values()))

    async def hold(self, key: Hashable, seconds: float, receive: Receive) -> Held:
        """Hold a request, whose body has been read, until `wake(key)` and for this time at most."""
        if self._stopping:
            return Held.STOPPING
        woken: asyncio.Future[Held] = asyncio.get_running_loop().create_future()
        self._held[key].add(woken)
        # uvicorn does not cancel the handler of a client that disconnected; `receive` reports it.
        disconnected = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((woken, disconnected), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if woken.done():
                return woken.result()
            return Held.GONE if disconnected.done() else Held.LATE
        finally:
            disconnected.cancel()
            self._held[key].discard(woken)
            if not self._held[key]:
                del self._held[key]

    def wake(self, key: Hashable) -> None:
        """End the requests that wait for this."""
        self._end(key, Held.WOKEN)

    def stop(self) -> None:
        """End every held request now and each later one at once, because the exporter stops."""
        self._stopping = True
        for key in self._held:
            self._end(key, Held.STOPPING)

    def _end(self, key: Hashable, why: Held) -> None:
        for woken in self._held.get(key, ()):
            if not woken.done():
                woken.set_result(why)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
