"""Waiting, on the event loop, for the thread that keeps events: never longer than is promised."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future

from gpumem_exporter.errors import StorageError
from gpumem_exporter.events import EventLog, Page, Query

__all__ = ["KEPT_SECONDS", "READ_SECONDS", "read_events", "wait_until_kept"]

KEPT_SECONDS = 1.0
"""For how long the answer to a report with an out-of-memory error waits for the disk."""
READ_SECONDS = 5.0


async def wait_until_kept(log: EventLog, kept: Future[bool]) -> bool:
    """Wait until events are committed, but not where the disk fails or takes long: then they wait in memory."""
    if not kept.done() and log.status().prompt:
        await asyncio.wait((asyncio.wrap_future(kept),), timeout=KEPT_SECONDS)
    return kept.done() and kept.result()


async def read_events(log: EventLog, query: Query) -> Page:
    """The events that are asked for.

    Raises:
        StorageError: they cannot be read, or not in time.
    """
    try:
        return await asyncio.wait_for(asyncio.wrap_future(log.read(query)), READ_SECONDS)
    except asyncio.TimeoutError:
        raise StorageError(f"{log.status().where} has not answered within {READ_SECONDS:g} s") from None
