"""The last ten minutes of each device in memory, for the charts of the page and of `top`. Used on the event loop only.

A point is the result of one poll. A device that could not be read has a gap at that point; no value is interpolated.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

from gpumem_exporter.core.ledger import node_ledgers
from gpumem_exporter.core.samples import Snapshot


class _Point(NamedTuple):
    seconds: float
    devices: dict[str, tuple[int, int]]
    """Bytes in use and allocated bytes of each readable device, in MiB."""


class History:
    """The points of all devices, at most one in each step.

    Two points that are further apart than three steps, and than the maximum age of a valid reading
    (`reading_expiry_seconds`), have a gap between them.
    """

    def __init__(
        self, *, reading_expiry_seconds: float, span_seconds: float = 600.0, step_seconds: float = 2.0
    ) -> None:
        self._span_seconds = span_seconds
        self._step_seconds = step_seconds
        self._gap_seconds = max(3 * step_seconds, reading_expiry_seconds)
        self._points: deque[_Point] = deque()

    def add(self, snapshot: Snapshot) -> None:
        """Add a point from the last poll if one is due; called about once a second."""
        node = snapshot.node
        if node is None:
            return
        taken, newest = round(node.taken_seconds, 3), self.newest_seconds
        if newest is not None and taken // self._step_seconds <= newest // self._step_seconds:
            return
        while self._points and self._points[0].seconds < taken - self._span_seconds:
            self._points.popleft()
        devices = {
            uuid: ((ledger.total_bytes - ledger.categories["free"]) >> 20, ledger.categories["torch_allocated"] >> 20)
            for uuid, ledger in node_ledgers(snapshot).items()
            if uuid
        }
        self._points.append(_Point(taken, devices))

    @property
    def newest_seconds(self) -> float | None:
        """The time of the last point on the exporter's monotonic clock; None without a point."""
        return self._points[-1].seconds if self._points else None

    def document(self, since_seconds: float | None = None) -> dict[str, Any]:
        """Return the points after a time, or all of them, as JSON in MiB; null is a gap."""
        points = [point for point in self._points if since_seconds is None or point.seconds > since_seconds]
        gap = (None, None)
        uuids = dict.fromkeys(uuid for point in points for uuid in point.devices)
        lines = {uuid: [point.devices.get(uuid, gap) for point in points] for uuid in uuids}
        return {
            "span_seconds": self._span_seconds,
            "gap_seconds": self._gap_seconds,
            "seconds": [point.seconds for point in points],
            "devices": {
                uuid: {"in_use": [in_use for in_use, _ in line], "allocated": [allocated for _, allocated in line]}
                for uuid, line in lines.items()
            },
        }
