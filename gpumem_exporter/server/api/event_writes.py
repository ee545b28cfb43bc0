"""Wait on the event loop for the thread that stores events, with a timeout."""

from __future__ import annotations

import asyncio
from collections import deque
from concurrent.futures import Future
from dataclasses import replace

from gpumem_client.wire.errors import StorageError
from gpumem_exporter.events import Event, EventLog, Page, Query

__all__ = ["KEPT_SECONDS", "READ_SECONDS", "read_all_events", "read_events", "wait_until_kept"]

KEPT_SECONDS = 1.0
"""The longest time that the reply to a report with an out-of-memory error waits for the disk."""
READ_SECONDS = 5.0


async def wait_until_kept(log: EventLog, kept: Future[bool]) -> bool:
    """Wait until events are committed and return whether they are. Returns early if the disk fails or is slow."""
    if not kept.done() and log.status().prompt:
        await asyncio.wait((asyncio.wrap_future(kept),), timeout=KEPT_SECONDS)
    return kept.done() and kept.result()


async def read_events(log: EventLog, query: Query) -> Page:
    """Return the events that match a query.

    Raises:
        StorageError: the storage fails or does not answer in time.
    """
    try:
        return await asyncio.wait_for(asyncio.wrap_future(log.read(query)), READ_SECONDS)
    except asyncio.TimeoutError:
        raise StorageError(f"{log.status().where} has not answered within {READ_SECONDS:g} s") from None


async def read_all_events(log: EventLog, query: Query, *, max_rows: int | None = None) -> list[Event]:
    """Return the events of all pages, oldest first.

    Args:
        log: has the events.
        query: selects them.
        max_rows: only the latest events are returned; together, they and the items in their lists are at most this
            number. None is no limit.

    Raises:
        StorageError: as `read_events`.
    """
    events: deque[Event] = deque()
    rows = 0
    while True:
        page = await read_events(log, query)
        for event in page.events:
            events.append(event)
            rows += 1 + event.items
        while max_rows is not None and rows > max_rows:
            rows -= 1 + events.popleft().items
        if not page.more:
            return list(events)
        query = replace(query, after=page.next_after)
