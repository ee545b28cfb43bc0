"""The last ten minutes of each device: what the exporter has kept of them, and then what `top` has seen itself."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import Any

__all__ = ["SPAN_SECONDS", "History", "Past", "Point"]

Document = Mapping[str, Any]
Point = tuple[float, int]
"""Monotonic seconds, and the bytes in use then: all that is not free."""
Past = Mapping[str, tuple[Point, ...]]
"""By uuid, in order. Where nothing was read there is no point."""

SPAN_SECONDS = 600.0
_STEP_SECONDS = 2.0
"""At most one point in each, as the exporter keeps them."""
_GAP_SECONDS = 6.0
"""Where nothing was read for longer, the exporter knows more than was seen here."""
_REFUSED_SECONDS = 60.0
"""Seconds until an exporter without a history is queried again."""


class History:
    """Keeps the points. One thread at a time may use it; every `now` is of one monotonic clock."""

    def __init__(self) -> None:
        self._lines: dict[str, list[Point]] = {}
        self._latest: dict[str, Point] = {}
        """What was seen last, whether it is kept or not: the line ends with it."""
        self._last_seconds = -float("inf")
        self._due_seconds = -float("inf")
        self._taken: object = None

    def due(self, now: float) -> bool:
        """Whether to query the exporter for missed points."""
        return now >= self._due_seconds and now - self._last_seconds > _GAP_SECONDS

    def refused(self, now: float) -> None:
        """It has none: an older exporter, say."""
        self._due_seconds = now + _REFUSED_SECONDS

    def take(self, live: Document, now: float) -> None:
        """Take the history in a document of `/api/v1/live`, which answered at `now`; one of another form tells nothing.

        What was seen here before its first point is kept: the exporter may have restarted.
        """
        try:
            ahead = now - live["moment"]["clock_seconds"]
            history = live["history"]
            seen_seconds = [min(now, seconds + ahead) for seconds in history["seconds"]]
            given = {
                uuid: [
                    (seconds, mib << 20)
                    for seconds, mib in zip(seen_seconds, line["in_use"], strict=True)
                    if mib is not None
                ]
                for uuid, line in history["devices"].items()
            }
        except (AttributeError, KeyError, TypeError, ValueError):
            self.refused(now)
            return
        self._due_seconds = now + _GAP_SECONDS
        first = min(seen_seconds, default=now)
        for uuid, line in self._lines.items():
            del line[bisect_left(line, (first, 0)) :]
            given[uuid] = line + given.get(uuid, [])
        self._lines = given
        self._last_seconds = max(seen_seconds, default=self._last_seconds)
        self._forget(now)

    def add(self, devices: Document, now: float) -> None:
        """Take what `/api/v1/devices` says, if it is another poll than the last; it is kept if a point is due."""
        taken = devices.get("taken_unix_seconds")
        if taken is None or taken == self._taken:
            return
        self._taken = taken
        self._latest = {}
        for device in devices.get("devices") or ():
            memory = device.get("memory") or {}
            total, free = memory.get("total_bytes"), memory.get("free_bytes")
            if device.get("up", True) and device.get("uuid") and total is not None and free is not None:
                self._latest[device["uuid"]] = (now, total - free)
        if now // _STEP_SECONDS <= self._last_seconds // _STEP_SECONDS:
            return
        self._last_seconds = now
        for uuid, point in self._latest.items():
            self._lines.setdefault(uuid, []).append(point)
        self._forget(now)

    def past(self) -> Past:
        """All that is known."""
        past = {uuid: tuple(line) for uuid, line in self._lines.items()}
        for uuid, point in self._latest.items():
            line = past.get(uuid, ())
            if not line or line[-1] < point:
                past[uuid] = (*line, point)
        return past

    def _forget(self, now: float) -> None:
        for uuid, line in list(self._lines.items()):
            del line[: bisect_left(line, (now - SPAN_SECONDS, 0))]
            if not line:
                del self._lines[uuid]
