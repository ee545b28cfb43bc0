"""The past of an exporter: its last events, and ten minutes of each device, continued with the readings of `top`."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import Any

from gpumem_client.wire.errors import ExporterAnswerError, ExporterError

__all__ = ["SPAN_SECONDS", "Events", "History", "Past", "Point"]

Document = Mapping[str, Any]
Point = tuple[float, int]
"""Monotonic seconds, and the bytes in use: total minus free."""
Past = Mapping[str, tuple[Point, ...]]
"""The points of each device by uuid, in order. A time without a reading has no point."""

SPAN_SECONDS = 600.0
_STEP_SECONDS = 2.0
"""At most one point is kept in each step, as in the exporter."""
_GAP_SECONDS = 6.0
"""After a gap of this length, the missing points are taken from the exporter."""
_REFUSED_SECONDS = 60.0
"""Seconds until an exporter without events is queried again, or its history is read again."""
_EVENTS_SECONDS = 3.0
"""Seconds between queries of events."""
_KEPT_EVENTS = 100
_FORBIDDEN = (401, 403)
_SERVER_ERROR = 500


class History:
    """Keeps the points. Not thread-safe; every `now` is from one monotonic clock."""

    def __init__(self) -> None:
        self._lines: dict[str, list[Point]] = {}
        self._last_seconds = -float("inf")
        self._due_seconds = -float("inf")
        self._poll_seconds: object = None

    def due(self, now: float) -> bool:
        """Whether to take missed points from the exporter."""
        return now >= self._due_seconds and now - self._last_seconds > _GAP_SECONDS

    def take(self, live: Document, now: float) -> None:
        """Replace the points by those of `/api/v1/live`, read at `now`. A document in another format is ignored.

        Points older than the first one are kept, because the exporter may have restarted.
        """
        try:
            offset = now - live["moment"]["clock_seconds"]
            times = [seconds + offset for seconds in live["history"]["seconds"]]
            lines = {
                uuid: [(at, mib << 20) for at, mib in zip(times, line["in_use"], strict=True) if mib is not None]
                for uuid, line in live["history"]["devices"].items()
            }
        except (AttributeError, KeyError, TypeError, ValueError):
            self._due_seconds = now + _REFUSED_SECONDS
            return
        self._due_seconds = now + _GAP_SECONDS
        first = min(times, default=now)
        for uuid, line in self._lines.items():
            lines[uuid] = line[: bisect_left(line, (first, 0))] + lines.get(uuid, [])
        self._lines = lines
        self._last_seconds = max(times, default=self._last_seconds)
        self._forget(now)

    def add(self, devices: Document, now: float) -> None:
        """Add the values of `/api/v1/devices`, unless they are from the same poll. A step keeps its latest values."""
        taken = devices.get("taken_unix_seconds")
        if taken is None or taken == self._poll_seconds:
            return
        self._poll_seconds = taken
        self._last_seconds = now
        for device in devices.get("devices") or ():
            memory = device.get("memory") or {}
            total, free = memory.get("total_bytes"), memory.get("free_bytes")
            if not device.get("up", True) or not device.get("uuid") or total is None or free is None:
                continue
            line = self._lines.setdefault(device["uuid"], [])
            if line and line[-1][0] // _STEP_SECONDS == now // _STEP_SECONDS:
                line.pop()
            line.append((now, total - free))
        self._forget(now)

    def past(self) -> Past:
        """Return the points of all devices."""
        return {uuid: tuple(line) for uuid, line in self._lines.items()}

    def _forget(self, now: float) -> None:
        for uuid, line in list(self._lines.items()):
            del line[: bisect_left(line, (now - SPAN_SECONDS, 0))]
            if not line:
                del self._lines[uuid]


class Events:
    """Keeps the last events. Not thread-safe; every `now` is from one monotonic clock."""

    def __init__(self) -> None:
        self.known: tuple[Document, ...] | None = None
        """The events, as in `/api/v1/events`; None if they are unknown."""
        self.refusal = ""
        """Why there are no events; empty if there are, or before the first answer."""
        self._after: int | None = None
        self._due_seconds = -float("inf")

    @property
    def path(self) -> str:
        """The URL path of the events since the last answer."""
        return f"/api/v1/events?limit={_KEPT_EVENTS}" + ("" if self._after is None else f"&after={self._after}")

    def due(self, now: float) -> bool:
        """Whether to query the exporter."""
        return now >= self._due_seconds

    def take(self, page: Document, now: float) -> None:
        """Add the events of an answer."""
        known = self.known if self._after is not None and self.known is not None else ()
        self.known = (*known, *page["events"])[-_KEPT_EVENTS:]
        self._after, self.refusal = page["next_after"], ""
        self._due_seconds = now if page.get("more") else now + _EVENTS_SECONDS

    def failed(self, error: ExporterError, now: float) -> None:
        """Record a failed query. The known events are kept if the exporter is slow or has an internal error."""
        if not isinstance(error, ExporterAnswerError):
            self._due_seconds = now + _REFUSED_SECONDS
        elif error.status >= _SERVER_ERROR:
            self._due_seconds = now + _EVENTS_SECONDS
        else:
            self.forget()
            forbidden = f"the exporter refuses to show events: {error.detail}"
            self.refusal = forbidden if error.status in _FORBIDDEN else "this exporter has no events"
            self._due_seconds = now + _REFUSED_SECONDS

    def forget(self) -> None:
        """Forget the events, because the next answer may come from another exporter."""
        self.refusal = ""
        self.known = self._after = None
        self._due_seconds = -float("inf")
