"""One rendering of the state for everybody who follows it; nothing runs while nobody does. For the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, NamedTuple

__all__ = ["MAX_STREAMS", "Follower", "Rendering", "Streams", "TooManyStreamsError"]

MAX_STREAMS = 32
INTERVAL_SECONDS = 1.0

_log = logging.getLogger(__name__)


class TooManyStreamsError(Exception):
    """There is no room for another stream."""


class Rendering(NamedTuple):
    """The state at one moment, rendered."""

    seconds: float
    """On the exporter's monotonic clock."""
    moment: bytes
    """When that was, as JSON: the only part that differs where nothing has changed."""
    state: bytes
    """JSON."""


class Streams:
    """Renders the state once a second while somebody follows it.

    Nothing is queued: a follower is given the newest state when it asks, and whoever is slow to ask misses some.

    Args:
        render: the state as it is now, for `json.dumps`.
        clock: monotonic seconds.
        wall_clock: seconds of the Unix epoch.
        interval_seconds: between two renderings.
        max_streams: how many may follow.
    """

    def __init__(
        self,
        render: Callable[[], dict[str, Any]],
        *,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        interval_seconds: float = INTERVAL_SECONDS,
        max_streams: int = MAX_STREAMS,
    ) -> None:
        self._render = render
        self._clock = clock
        self._wall_clock = wall_clock
        self._interval_seconds = interval_seconds
        self._max_streams = max_streams
        self._followers = 0
        self._ticker: asyncio.Task[None] | None = None
        self._ticked = asyncio.Event()
        self._rendering: Rendering | None = None

    def __len__(self) -> int:
        return self._followers

    def latest(self) -> Rendering:
        """The state of now; where somebody follows it, or has just asked, what they were given."""
        known = self._rendering
        if known is not None and (
            self._ticker is not None or self._clock() - known.seconds < self._interval_seconds / 2
        ):
            return known
        return self._refresh()

    @contextlib.contextmanager
    def follow(self) -> Iterator[Follower]:
        """Take part until the block ends.

        Raises:
            TooManyStreamsError: there is no room.
        """
        if self._followers >= self._max_streams:
            raise TooManyStreamsError(f"{self._followers} streams are open, and no more are served")
        self._followers += 1
        if self._ticker is None:
            self._rendering = None
            self._ticker = asyncio.ensure_future(self._tick())
        try:
            yield Follower(self._next)
        finally:
            self._followers -= 1
            if not self._followers:
                self._ticker.cancel()
                self._ticker = None

    async def _next(self, seen: Rendering | None) -> Rendering:
        while self._rendering is None or self._rendering is seen:
            await self._ticked.wait()
        return self._rendering

    async def _tick(self) -> None:
        while True:
            try:
                self._refresh()
            except Exception:  # noqa: BLE001 - the next one may succeed, and whoever follows sees that none came
                _log.exception("the state cannot be rendered")
            ticked, self._ticked = self._ticked, asyncio.Event()
            ticked.set()
            await asyncio.sleep(self._interval_seconds)

    def _refresh(self) -> Rendering:
        now = self._clock()
        state = json.dumps(self._render(), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        moment = {"clock_seconds": round(now, 3), "unix_seconds": round(self._wall_clock(), 3)}
        known = self._rendering
        body = state.encode("utf-8", "replace")
        if known is not None and known.state == body:
            body = known.state  # one object for one state: followers tell by it that nothing changed
        self._rendering = Rendering(now, json.dumps(moment).encode(), body)
        return self._rendering


class Follower:
    """One of those that follow; from `Streams.follow`."""

    def __init__(self, after: Callable[[Rendering | None], Awaitable[Rendering]]) -> None:
        self._after = after
        self._seen: Rendering | None = None

    async def next(self) -> tuple[Rendering, bool]:
        """The next rendering, and whether its state is another than that of the one before it."""
        before = self._seen
        self._seen = newest = await self._after(before)
        return newest, before is None or before.state is not newest.state
