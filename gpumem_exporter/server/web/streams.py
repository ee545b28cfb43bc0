"""Renders the state once for all streams that follow it. Nothing runs without a stream. Used on the event loop only."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Iterator
from typing import NamedTuple, TypeAlias

__all__ = ["MAX_STREAMS", "MAX_STREAMS_OF_VIEWER", "Following", "Rendering", "Streams", "TooManyStreamsError"]

MAX_STREAMS = 32
MAX_STREAMS_OF_VIEWER = 4
"""The maximum number of streams of one user or machine, so that streams are left for others."""
INTERVAL_SECONDS = 1.0

_log = logging.getLogger(__name__)


class TooManyStreamsError(Exception):
    """The maximum number of streams is open."""


class Rendering(NamedTuple):
    """The rendered state."""

    seconds: float
    """On the exporter's monotonic clock."""
    moment: bytes
    """The time as JSON: the only part that differs if the state is unchanged."""
    state: bytes
    """JSON."""


Following: TypeAlias = "Callable[[], Awaitable[tuple[Rendering, bool]]]"
"""Waits for the next rendering; returns it and whether the state changed."""


class Streams:
    """Renders the state once a second while a stream follows it.

    Nothing is queued: a follower gets the newest state, and a slow one misses some states.

    Args:
        render: returns the current state as JSON.
        clock: monotonic seconds.
        wall_clock: seconds of the Unix epoch.
        interval_seconds: between two renderings.
    """

    def __init__(
        self,
        render: Callable[[], Awaitable[bytes]],
        *,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        interval_seconds: float = INTERVAL_SECONDS,
    ) -> None:
        self._render = render
        self._clock = clock
        self._wall_clock = wall_clock
        self._interval_seconds = interval_seconds
        self._followers: Counter[Hashable] = Counter()
        """The number of streams of each viewer."""
        self._ticker: asyncio.Task[None] | None = None
        self._ticked = asyncio.Event()
        self._rendering: Rendering | None = None

    def __len__(self) -> int:
        return self._followers.total()

    async def latest(self) -> Rendering:
        """Return the current state, or the last rendering if it is recent."""
        known = self._rendering
        if known is not None and (
            self._ticker is not None or self._clock() - known.seconds < self._interval_seconds / 2
        ):
            return known
        return await self._refresh()

    def moment(self) -> bytes:
        """Return the current time as JSON."""
        times = {"clock_seconds": round(self._clock(), 3), "unix_seconds": round(self._wall_clock(), 3)}
        return json.dumps(times).encode()

    @contextlib.contextmanager
    def follow(self, viewer: Hashable) -> Iterator[Following]:
        """Follow the state until the block ends.

        Args:
            viewer: the user or the machine that follows.

        Raises:
            TooManyStreamsError: the maximum number of streams is open, in total or by this viewer.
        """
        if self._followers[viewer] >= MAX_STREAMS_OF_VIEWER:
            raise TooManyStreamsError(f"{MAX_STREAMS_OF_VIEWER} streams are open from there, the maximum: poll instead")
        if len(self) >= MAX_STREAMS:
            raise TooManyStreamsError(f"{MAX_STREAMS} streams are open, the maximum: poll instead")
        self._followers[viewer] += 1
        if self._ticker is None:
            self._rendering = None
            self._ticker = asyncio.ensure_future(self._tick())
        seen: Rendering | None = None

        async def following() -> tuple[Rendering, bool]:
            nonlocal seen
            before = seen
            while self._rendering is None or self._rendering is before:
                await self._ticked.wait()
            seen = self._rendering
            return seen, before is None or before.state is not seen.state

        try:
            yield following
        finally:
            self._followers[viewer] -= 1
            self._followers = +self._followers
            if not self._followers:
                self._ticker.cancel()
                self._ticker = None

    async def _tick(self) -> None:
        while True:
            try:
                await self._refresh()
            except Exception:  # noqa: BLE001 - the next one may succeed
                _log.exception("the state cannot be rendered")
            ticked, self._ticked = self._ticked, asyncio.Event()
            ticked.set()
            await asyncio.sleep(self._interval_seconds)

    async def _refresh(self) -> Rendering:
        now, moment = self._clock(), self.moment()
        body = await self._render()
        known = self._rendering
        if known is not None and known.state == body:
            body = known.state  # followers compare the identity of the object
        self._rendering = Rendering(now, moment, body)
        return self._rendering
