"""Requests that are held open until something happens: they end with the client, and with the exporter."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from enum import Enum
from typing import Any, Final, Literal, TypeVar

from starlette.types import Receive

__all__ = ["GONE", "RELEASED", "Ended", "Holds"]

T = TypeVar("T")


class Ended(Enum):
    """Why a hold ended without its result."""

    GONE = "the client went away"
    RELEASED = "the exporter stops"


GONE: Final = Ended.GONE
RELEASED: Final = Ended.RELEASED


class Holds:
    """All requests that are being held. For the event loop."""

    def __init__(self) -> None:
        self._released = False
        self._waiting: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    async def until(self, awaited: Coroutine[Any, Any, T], receive: Receive) -> T | Literal[Ended.GONE, Ended.RELEASED]:
        """Wait for `awaited`, which is cancelled when the client goes away or the exporter stops.

        Args:
            awaited: what is waited for; must bear cancelling, and have an end of its own.
            receive: the request's; its body must have been read.
        """
        if self._released:
            awaited.close()
            return RELEASED
        # uvicorn does not cancel the handler of a client that has gone, it only says so to whoever asks.
        waiting = asyncio.ensure_future(awaited)
        gone = asyncio.ensure_future(_disconnected(receive))
        self._waiting.add(waiting)
        try:
            await asyncio.wait((waiting, gone), return_when=asyncio.FIRST_COMPLETED)
            if waiting.done() and not waiting.cancelled():
                return waiting.result()
            return RELEASED if self._released else GONE
        finally:
            self._waiting.discard(waiting)
            waiting.cancel()
            gone.cancel()

    def release(self) -> None:
        """End every hold now, and each later one at once: the exporter stops."""
        self._released = True
        for task in self._waiting:
            task.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
