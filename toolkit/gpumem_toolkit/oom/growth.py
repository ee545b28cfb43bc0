"""Measures how much a guarded block grows per batch size, and whether memory grows from run to run. Pure."""

from __future__ import annotations

import math
from collections import OrderedDict, deque

from gpumem_toolkit.leaks.trend import POINTS_MAX, POINTS_MIN, slope_of

_SIZES_MAX = 32
_WARM_UP_RUNS = 3
_LEAST_LEAK = 1 << 20


class BlockHistory:
    """The runs of one block on one device. Only one thread may use it at a time."""

    def __init__(self) -> None:
        self.runs = 0
        self._growths: OrderedDict[int | None, int] = OrderedDict()
        self._per_item_at_most = math.inf
        self._starts: deque[int] = deque(maxlen=POINTS_MAX)
        self._first_start = 0

    def started(self, allocated_bytes: int) -> None:
        """Record the allocated bytes at the start of a run."""
        self.runs += 1
        if self.runs > _WARM_UP_RUNS:
            self._first_start = self._first_start if self._starts else allocated_bytes
            self._starts.append(allocated_bytes)

    def measured(self, batch_size: int | None, growth_bytes: int) -> None:
        """Record the exact peak of a run without an error, relative to its start."""
        self._growths[batch_size] = growth_bytes
        self._growths.move_to_end(batch_size)
        while len(self._growths) > _SIZES_MAX:
            self._growths.popitem(last=False)

    def bounded(self, batch_size: int | None, most_bytes: int, *, close: bool) -> None:
        """Record an upper bound of the peak of a run without an error, relative to its start. It may be `close`."""
        before = self._growths.get(batch_size)
        if before is not None or close:
            self.measured(batch_size, most_bytes if before is None else min(before, most_bytes))
        elif batch_size:
            self._per_item_at_most = min(self._per_item_at_most, most_bytes / batch_size)

    def growth(self, batch_size: int | None) -> int | None:
        """Return the expected growth with this batch size, or None without a measured run."""
        known = self._growths.get(batch_size)
        if known is not None or batch_size is None:
            return known
        line = self._line()
        return None if line is None else round(line[0] * batch_size + line[1])

    def bytes_per_item(self) -> int | None:
        """Return the growth per item of a batch."""
        line = self._line()
        return None if line is None else max(1, round(line[0]))

    def leaked(self) -> tuple[int, float] | None:
        """Return the growth since the first runs, and per run, if memory surely grows from run to run."""
        slope = slope_of(self._starts, _LEAST_LEAK) if len(self._starts) >= POINTS_MIN else None
        return None if slope is None else (max(0, self._starts[-1] - self._first_start), slope)

    def _line(self) -> tuple[float, float] | None:
        """Return bytes per item and fixed bytes; with one batch size, or with distant bounds only, no fixed bytes."""
        points = [(size, growth) for size, growth in self._growths.items() if size]
        if not points:
            return None if math.isinf(self._per_item_at_most) else (self._per_item_at_most, 0.0)
        # In small batches the peak is a fixed part, such as the optimizer's temporaries. In larger ones it follows the
        # batch, so the line goes through the largest size and the size nearest to its half.
        size, growth = max(points)
        other, other_growth = min(points, key=lambda point: abs(point[0] - size / 2))
        slope = (growth - other_growth) / (size - other) if other < size else 0.0
        if slope <= 0:
            return growth / size, 0.0
        return slope, max(0.0, growth - slope * size)
