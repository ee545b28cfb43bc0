"""What can be known of the peak inside a stretch of a program from a counter that is shared with everybody.

PyTorch keeps one peak a device, since whoever last reset it. Where that has risen during the stretch, the stretch made
it, and the figure is exact. Where it has not, the stretch's own peak lies between the largest value that anybody looked
at and the old peak, which it has not passed. So there are always two bounds, and they often meet. A reset by somebody
else takes the upper one away; one after which every peak has risen to where it was, before the next look, cannot be
seen, and only then may the true peak lie above it.
"""

from __future__ import annotations

__all__ = ["PeakBounds"]


class PeakBounds:
    """The peak of one device's allocated bytes during one stretch, narrowed by every look at the statistics.

    Args:
        allocated_bytes: at its begin.
        peak_bytes: the allocator's peak at its begin.
    """

    __slots__ = ("_before_reset", "_peak_then", "_unseen_reset", "at_least", "entered", "now")

    def __init__(self, allocated_bytes: int, peak_bytes: int) -> None:
        self.entered = self.now = self.at_least = allocated_bytes
        self._peak_then = peak_bytes
        self._before_reset = 0
        self._unseen_reset = False

    def look(self, allocated_bytes: int, peak_bytes: int) -> None:
        """The figures at some moment of the stretch."""
        self.now = allocated_bytes
        self.at_least = max(self.at_least, allocated_bytes, peak_bytes if peak_bytes > self._peak_then else 0)

    def at_most(self, peak_bytes: int) -> int | None:
        """The upper bound, given the allocator's peak now; None where a reset that was not ours hides it."""
        return None if self._unseen_reset else max(self._before_reset, peak_bytes)

    def reset_by_us(self, peak_before_bytes: int, allocated_bytes: int) -> None:
        """The peak begins anew now; what it was until now has just been looked at."""
        self._before_reset = max(self._before_reset, peak_before_bytes)
        self._peak_then = allocated_bytes

    def reset_by_others(self, allocated_bytes: int, peak_bytes: int) -> None:
        """Somebody has reset it since the last look: the peak has been made since, and an earlier one was lost."""
        self.at_least = max(self.at_least, allocated_bytes, peak_bytes)
        self.now = allocated_bytes
        self._unseen_reset = True
        self._peak_then = peak_bytes
