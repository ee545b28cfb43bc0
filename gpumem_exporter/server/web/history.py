"""The last ten minutes of each device, in memory: what the live page draws as a line. For the event loop.

A point is what one poll of the driver said. Where there was none there is no point, and a device that could not be read
has a hole at that moment: nothing is filled in between.
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
"""At most one point in each."""
MAX_DEVICES = 256
"""More than any node has; where MIG devices come and go, those that have gone make room."""

_HOLE = -1
_MIB = 20


@dataclass(slots=True)
class _Line:
    """One device's bytes at each of the moments; `_HOLE` where they are not known."""

    in_use: array[int]
    allocated: array[int] = field(default_factory=lambda: array("q"))


class History:
    """A ring of points for each device: some 5 KB a device.

    Args:
        span_seconds: how far back it reaches.
        step_seconds: at most one point is kept in each of these.
        reading_expiry_seconds: for how long a poll is believed. Two points that are further apart than three steps, and
            than this, have a hole between them.
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
        """Keep a point of the last poll, if one is due; called about once a second."""
        node = snapshot.node
        if node is None:
            return
        step = self._step_seconds
        if self._seconds and node.taken_seconds // step <= self._seconds[-1] // step:
            return
        self._forget_before(node.taken_seconds - self.span_seconds)
        points = {
            uuid: (ledger.total_bytes - ledger.categories["free"], ledger.categories["torch_allocated"])
            for uuid, ledger in node_ledgers(snapshot).items()
            if uuid
        }
        self._make_room(points)
        self._seconds.append(node.taken_seconds)
        for uuid, line in self._lines.items():
            in_use, allocated = points.get(uuid, (_HOLE, _HOLE))
            line.in_use.append(in_use)
            line.allocated.append(allocated)

    def newest(self) -> dict[str, Any] | None:
        """The last point as JSON: `seconds` on the exporter's clock, and `[in use, in tensors]` in MiB by device."""
        if not self._seconds:
            return None
        points = {uuid: (line.in_use[-1], line.allocated[-1]) for uuid, line in self._lines.items()}
        return {
            "seconds": round(self._seconds[-1], 3),
            "devices": {uuid: [_mib(value) for value in point] for uuid, point in points.items() if point[0] != _HOLE},
        }

    def document(self) -> dict[str, Any]:
        """All points as JSON, in MiB; null is a hole."""
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

    def _forget_before(self, seconds: float) -> None:
        old = bisect_left(self._seconds, seconds)
        if not old:
            return
        del self._seconds[:old]
        for uuid, line in list(self._lines.items()):
            del line.in_use[:old]
            del line.allocated[:old]
            if all(value == _HOLE for value in line.in_use):
                del self._lines[uuid]

    def _make_room(self, points: dict[str, tuple[int, int]]) -> None:
        for uuid in points:
            if uuid not in self._lines:
                holes = array("q", [_HOLE]) * len(self._seconds)
                self._lines[uuid] = _Line(holes, holes[:])
        gone = [uuid for uuid in self._lines if uuid not in points]
        for uuid in gone[: max(0, len(self._lines) - MAX_DEVICES)]:
            del self._lines[uuid]


def _mib(value: int) -> int | None:
    return None if value == _HOLE else value >> _MIB
