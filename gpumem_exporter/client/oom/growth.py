"""What a guarded block grows by, by the size of its batch; and whether more is left from run to run. Pure."""

from __future__ import annotations

from collections import OrderedDict
from statistics import median

from gpumem_exporter.client.leaks.trend import Slope, Trend

__all__ = ["BlockHistory"]

_SIZES_MAX = 32
_WARM_UP_RUNS = 3
_LEAST_LEAK = 1 << 20


class BlockHistory:
    """The runs of one block on one device. One thread at a time."""

    def __init__(self) -> None:
        self.runs = 0
        self._growths: OrderedDict[int | None, int] = OrderedDict()
        self._trend = Trend(warm_up_steps=_WARM_UP_RUNS, least_growth=_LEAST_LEAK)
        self._first_begin: int | None = None
        self._last_begin = 0

    def begun(self, allocated_bytes: int) -> None:
        """The block begins, with so much allocated."""
        self.runs += 1
        if self.runs > _WARM_UP_RUNS and self._first_begin is None:
            self._first_begin = allocated_bytes
        self._last_begin = allocated_bytes
        self._trend.add(allocated_bytes)

    def ended(self, batch_size: int | None, growth_bytes: int) -> None:
        """The block has ended well, and its peak, which is known exactly, lay so much above its begin."""
        self._growths[batch_size] = growth_bytes
        self._growths.move_to_end(batch_size)
        while len(self._growths) > _SIZES_MAX:
            self._growths.popitem(last=False)

    def growth(self, batch_size: int | None) -> int | None:
        """What the block would grow by with such a batch, by the runs measured; None where none was."""
        known = self._growths.get(batch_size)
        if known is not None or batch_size is None:
            return known
        fit = self._fit()
        return None if fit is None else round(fit[0] * batch_size + fit[1])

    def bytes_per_item(self) -> int | None:
        """What each item of a batch takes."""
        fit = self._fit()
        return None if fit is None else max(1, round(fit[0]))

    def leaked(self) -> tuple[int, Slope] | None:
        """What the runs have surely left behind, since the first ones, and how fast."""
        slope = self._trend.judge_now()
        if slope is None or self._first_begin is None:
            return None
        return max(0, self._last_begin - self._first_begin), slope

    def _fit(self) -> tuple[float, float] | None:
        """Bytes for each item, and beside them: a line through the points, or through the origin where there is one."""
        points = [(size, growth) for size, growth in self._growths.items() if size]
        if not points:
            return None
        slopes = [
            (growth - other_growth) / (size - other_size)
            for at, (size, growth) in enumerate(points)
            for other_size, other_growth in points[:at]
        ]
        slope = median(slopes) if slopes else 0.0
        if slope <= 0:
            slope = max(growth / size for size, growth in points)
        return slope, max(0.0, median(growth - slope * size for size, growth in points))
