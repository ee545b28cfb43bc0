"""The last ten minutes of each device in memory, for the chart of the live page. Used on the event loop only.

A point is the result of one poll. A device that could not be read has a gap at that point; no value is interpolated.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Any

from gpumem_exporter.core.ledger import node_ledgers
from gpumem_exporter.core.samples import Snapshot

__all__ = ["SPAN_SECONDS", "History"]

SPAN_SECONDS = 600.0
STEP_SECONDS = 2.0
"""The history has at most one point per step."""
MAX_DEVICES = 256
"""More than a node has. If more MIG devices were created, removed ones are forgotten."""

_GAP = -1
_MIB = 20


@dataclass(slots=True)
class _Line:
    """The bytes of one device at each point; `_GAP` if unknown."""

    in_use: array[int]
    allocated: array[int] = field(default_factory=lambda: array("q"))


class History:
    """The points of each device; about 5 KB per device.

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
        self._seconds: array[float] = array("d")
        self._lines: dict[str, _Line] = {}

    def take(self, snapshot: Snapshot) -> None:
        """Add a point from the last poll if one is due; called about once a second."""
        node = snapshot.node
        if node is None:
            return
        step = self._step_seconds
        if self._seconds and node.taken_seconds // step <= self._seconds[-1] // step:
            return
        self._drop_before(node.taken_seconds - self.span_seconds)
        points = {
            uuid: (ledger.total_bytes - ledger.categories["free"], ledger.categories["torch_allocated"])
            for uuid, ledger in node_ledgers(snapshot).items()
            if uuid
        }
        self._update_devices(points)
        self._seconds.append(node.taken_seconds)
        for uuid, line in self._lines.items():
            in_use, allocated = points.get(uuid, (_GAP, _GAP))
            line.in_use.append(in_use)
            line.allocated.append(allocated)

    def newest(self) -> dict[str, Any] | None:
        """Return the last point as JSON: `seconds` of the exporter's clock, `[in use, allocated]` in MiB by device."""
        if not self._seconds:
            return None
        points = {uuid: (line.in_use[-1], line.allocated[-1]) for uuid, line in self._lines.items()}
        return {
            "seconds": round(self._seconds[-1], 3),
            "devices": {uuid: [_mib(value) for value in point] for uuid, point in points.items() if point[0] != _GAP},
        }

    def document(self) -> dict[str, Any]:
        """Return all points as JSON, in MiB; null is a gap."""
        return {
            "span_seconds": self.span_seconds,
            "gap_seconds": self.gap_seconds,
            "seconds": [round(seconds, 3) for seconds in self._seconds],
            "devices": {
                uuid: {
                    "in_use": [_mib(value) for value in line.in_use],
                    "allocated": [_mib(value) for value in line.allocated],
                }
                for uuid, line in self._lines.items()
            },
        }

    def _drop_before(self, seconds: float) -> None:
        old = bisect_left(self._seconds, seconds)
        if not old:
            return
        del self._seconds[:old]
        for uuid, line in list(self._lines.items()):
            del line.in_use[:old]
            del line.allocated[:old]
            if all(value == _GAP for value in line.in_use):
                del self._lines[uuid]

    def _update_devices(self, points: dict[str, tuple[int, int]]) -> None:
        for uuid in points:
            if uuid not in self._lines:
                gaps = array("q", [_GAP]) * len(self._seconds)
                self._lines[uuid] = _Line(gaps, gaps[:])
        removed = [uuid for uuid in self._lines if uuid not in points]
        for uuid in removed[: max(0, len(self._lines) - MAX_DEVICES)]:
            del self._lines[uuid]


def _mib(value: int) -> int | None:
    return None if value == _GAP else value >> _MIB
