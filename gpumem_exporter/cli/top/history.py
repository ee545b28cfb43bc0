"""The last ten minutes of each device: the exporter's history, then the readings of `top` itself."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import Any

__all__ = ["SPAN_SECONDS", "History", "Past", "Point"]

Document = Mapping[str, Any]
Point = tuple[float, int]
"""Monotonic seconds, and the bytes in use: total minus free."""
Past = Mapping[str, tuple[Point, ...]]
"""The points of each device by uuid, in order. A time without a reading has no point."""

SPAN_SECONDS = 600.0
_STEP_SECONDS = 2.0
"""At most one point is kept in each step, as in the exporter."""
_GAP_SECONDS = 6.0
"""After a gap of this length, the exporter is queried for the missing points."""
_REFUSED_SECONDS = 60.0
"""Seconds until an exporter without a history is queried again."""


class History:
    """Keeps the points. Not thread-safe; every `now` is from one monotonic clock."""

    def __init__(self) -> None:
        self._lines: dict[str, list[Point]] = {}
        self._latest: dict[str, Point] = {}
        """The latest point of each device. It ends the line, also if it is not kept."""
        self._last_seconds = -float("inf")
        self._due_seconds = -float("inf")
        self._poll_seconds: object = None

    def due(self, now: float) -> bool:
        """Whether to query the exporter for missed points."""
        return now >= self._due_seconds and now - self._last_seconds > _GAP_SECONDS

    def refused(self, now: float) -> None:
        """Record that the exporter has no history, such as an older version."""
        self._due_seconds = now + _REFUSED_SECONDS

    def take(self, live: Document, now: float) -> None:
        """Replace the points by those of `/api/v1/live`, read at `now`. A document in another format is ignored.

        Points older than the first one are kept, because the exporter may have restarted.
        """
        try:
            offset = now - live["moment"]["clock_seconds"]
            history = live["history"]
            point_seconds = [min(now, seconds + offset) for seconds in history["seconds"]]
            lines = {
                uuid: [
                    (seconds, mib << 20)
                    for seconds, mib in zip(point_seconds, line["in_use"], strict=True)
                    if mib is not None
                ]
                for uuid, line in history["devices"].items()
            }
        except (AttributeError, KeyError, TypeError, ValueError):
            self.refused(now)
            return
        self._due_seconds = now + _GAP_SECONDS
        first = min(point_seconds, default=now)
        for uuid, line in self._lines.items():
            del line[bisect_left(line, (first, 0)) :]
            lines[uuid] = line + lines.get(uuid, [])
        self._lines = lines
        self._last_seconds = max(point_seconds, default=self._last_seconds)
        self._forget(now)

    def add(self, devices: Document, now: float) -> None:
        """Add the values of `/api/v1/devices`, unless they are from the same poll. They are kept if a point is due."""
        taken = devices.get("taken_unix_seconds")
        if taken is None or taken == self._poll_seconds:
            return
        self._poll_seconds = taken
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
        """Return the points of all devices."""
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
