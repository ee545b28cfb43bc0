"""The last ten minutes of each device in memory, for the chart of the live page. Used on the event loop only.

A point is the result of one poll. A device that could not be read has a gap at that point; no value is interpolated.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

from gpumem_exporter.core.ledger import node_ledgers
from gpumem_exporter.core.samples import Snapshot

__all__ = ["SPAN_SECONDS", "History"]

SPAN_SECONDS = 600.0
STEP_SECONDS = 2.0
"""The history has at most one point per step."""


class _Point(NamedTuple):
    seconds: float
    devices: dict[str, tuple[int, int]]
    """Bytes in use and allocated bytes of each readable device, in MiB."""


class History:
    """The points of all devices.

    Args:
        span_seconds: the age of the oldest point.
        step_seconds: the history has at most one point per step.
        reading_expiry_seconds: the maximum age of a valid reading. Two points that are further apart than this and than
            three steps have a gap between them.
    """

    def __init__(
        self,
        *,
        reading_expiry_seconds: float,
        span_seconds: float = SPAN_SECONDS,
        step_seconds: float = STEP_SECONDS,
    ) -> None:
        self.span_seconds = span_seconds
        self.gap_seconds = max(3 * step_seconds, reading_expiry_seconds)
        self._step_seconds = step_seconds
        self._points: deque[_Point] = deque()

    def take(self, snapshot: Snapshot) -> None:
        """Add a point from the last poll if one is due; called about once a second."""
        node = snapshot.node
        if node is None:
            return
        step = self._step_seconds
        if self._points and node.taken_seconds // step <= self._points[-1].seconds // step:
            return
        while self._points and self._points[0].seconds < node.taken_seconds - self.span_seconds:
            self._points.popleft()
        devices = {
            uuid: (_mib(ledger.total_bytes - ledger.categories["free"]), _mib(ledger.categories["torch_allocated"]))
            for uuid, ledger in node_ledgers(snapshot).items()
            if uuid
        }
        self._points.append(_Point(node.taken_seconds, devices))

    def newest(self) -> dict[str, Any] | None:
        """Return the last point as JSON: `seconds` of the exporter's clock, `[in use, allocated]` in MiB by device."""
        if not self._points:
            return None
        seconds, devices = self._points[-1]
        return {"seconds": round(seconds, 3), "devices": {uuid: list(values) for uuid, values in devices.items()}}

    def document(self) -> dict[str, Any]:
        """Return all points as JSON, in MiB; null is a gap."""
        gap = (None, None)
        uuids = dict.fromkeys(uuid for point in self._points for uuid in point.devices)
        lines = {uuid: [point.devices.get(uuid, gap) for point in self._points] for uuid in uuids}
        return {
            "span_seconds": self.span_seconds,
            "gap_seconds": self.gap_seconds,
            "seconds": [round(point.seconds, 3) for point in self._points],
            "devices": {
                uuid: {"in_use": [in_use for in_use, _ in line], "allocated": [allocated for _, allocated in line]}
                for uuid, line in lines.items()
            },
        }


def _mib(size: int) -> int:
    return size >> 20
