"""Requests that wait for a result. They end when the client disconnects and when the exporter stops."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from enum import Enum
from typing import Any, Final, Literal, TypeVar

from starlette.types import Receive

__all__ = ["GONE", "RELEASED", "Ended", "Holds"]

T = TypeVar("T")


class Ended(Enum):
    """Why a wait ended without its result."""

    GONE = "the client disconnected"
    RELEASED = "the exporter stops"


GONE: Final = Ended.GONE
RELEASED: Final = Ended.RELEASED


class Holds:
    """All requests that wait. Used on the event loop only."""

    def __init__(self) -> None:
        self._released = False
        self._waiting: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    async def until(self, awaited: Coroutine[Any, Any, T], receive: Receive) -> T | Literal[Ended.GONE, Ended.RELEASED]:
        """Wait for `awaited`; cancel it when the client disconnects or the exporter stops.

        Args:
            awaited: must have a timeout of its own.
            receive: the ASGI `receive` of the request, whose body has been read.
        """
        if self._released:
            awaited.close()
            return RELEASED
        # uvicorn does not cancel the handler of a client that disconnected; `receive` reports it.
        waiting = asyncio.ensure_future(awaited)
        disconnected = asyncio.ensure_future(_disconnected(receive))
        self._waiting.add(waiting)
        try:
            await asyncio.wait((waiting, disconnected), return_when=asyncio.FIRST_COMPLETED)
            if waiting.done() and not waiting.cancelled():
                return waiting.result()
            return RELEASED if self._released else GONE
        finally:
            self._waiting.discard(waiting)
            waiting.cancel()
            disconnected.cancel()

    def release(self) -> None:
        """End every wait now and each later one at once, because the exporter stops."""
        self._released = True
        for task in self._waiting:
            task.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
