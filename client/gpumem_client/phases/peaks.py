"""Peaks, from the one peak counter of a device that all code shares: its resets, and the bounds of a span's own peak.

PyTorch keeps one peak per device since its last reset. If it rises during the span, it is the span's own peak, exactly.
Otherwise the span's peak lies between the largest value that was read and the old peak. So there are always two bounds,
often equal. A reset by the user's code removes the upper bound. A reset that is not noticed may make the bounds wrong.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpumem_client.torch_access import SUMMED


class PeakWatch:
    """Counts the resets of each device's peaks. For one thread at a time, except `resets`.

    A reset is not visible, and not counted, if no peak was above the current value, or if each peak has risen again
    before the next reading. The reporter counts its own resets in any case.
    """

    def __init__(self) -> None:
        self._peaks: dict[int, dict[str, int]] = {}
        self._resets: dict[int, int] = {}

    def note(self, index: int, state: Mapping[str, Any]) -> None:
        """Compare a device's peaks in its nested statistics with the peaks of the previous call."""
        before = self._peaks.get(index, {})
        peaks = {name: state[name]["peak"] for name in SUMMED if name in state}
        self._peaks[index] = peaks
        # A peak rises, and only a reset lets it fall. A reset affects all peaks of a device, so any of them shows it.
        if peaks != before and any(peaks.get(name, then) < then for name, then in before.items()):
            self._resets[index] = self._resets.get(index, 0) + 1

    def reset(self, index: int) -> None:
        """Count a reset that the client has made."""
        self._peaks.pop(index, None)
        self._resets[index] = self._resets.get(index, 0) + 1

    def forget(self, index: int) -> None:
        """Do not count a reset that the client has made and compensates for."""
        self._peaks.pop(index, None)

    def resets(self, index: int) -> int:
        """Return the number of resets. Any thread may call this."""
        return self._resets.get(index, 0)


class PeakBounds:
    """The peak of one device's allocated bytes in one span. Each reading of the statistics narrows the bounds.

    It is made with the allocated bytes and the allocator's peak at the start.
    """

    __slots__ = ("_before_reset", "_peak_then", "_unseen_reset", "at_least", "entered", "now")

    def __init__(self, allocated_bytes: int, peak_bytes: int) -> None:
        self.entered = self.now = self.at_least = allocated_bytes
        self._peak_then = peak_bytes
        self._before_reset = 0
        self._unseen_reset = False

    def note(self, allocated_bytes: int, peak_bytes: int) -> None:
        """Evaluate a reading during the span."""
        self.now = allocated_bytes
        self.at_least = max(self.at_least, allocated_bytes, peak_bytes if peak_bytes > self._peak_then else 0)

    def at_most(self, peak_bytes: int) -> int | None:
        """Return the upper bound, given the allocator's peak now; None after a reset by the user's code."""
        return None if self._unseen_reset else max(self._before_reset, peak_bytes)

    def reset_by_exporter(self, peak_before_bytes: int, allocated_bytes: int) -> None:
        """Evaluate a reset by this package, right after a reading."""
        self._before_reset = max(self._before_reset, peak_before_bytes)
        self._peak_then = allocated_bytes

    def reset_by_user(self, allocated_bytes: int, peak_bytes: int) -> None:
        """Evaluate a reading after a reset by the user's code. The upper bound is unknown from now on."""
        self.at_least = max(self.at_least, allocated_bytes, peak_bytes)
        self.now = allocated_bytes
        self._unseen_reset = True
        self._peak_then = peak_bytes


@dataclass(frozen=True)
class PhasePeak:
    """The largest peak of allocated bytes in the runs of a phase since the last reset of the allocator's peaks.

    A phase that has not run since then keeps the peak of its runs before.
    """

    at_least_bytes: int
    at_most_bytes: int | None
    """None if the user's code reset the allocator's peaks during the phase."""

    @property
    def exact(self) -> bool:
        """Whether both bounds are equal."""
        return self.at_least_bytes == self.at_most_bytes


class Span:
    """One run of a phase or a measured block, with the bounds of the peak of each device.

    `reset_peaks` resets the allocator's peaks at the start. `kept` says that the run counts as a run of a phase.
    """

    __slots__ = ("bounds", "ended_seconds", "kept", "name", "peaks", "reset_peaks", "started_seconds", "thread")

    def __init__(self, name: str, *, reset_peaks: bool = False, kept: bool = True) -> None:
        self.name = name
        self.reset_peaks = reset_peaks
        self.kept = kept
        self.thread = threading.get_ident()
        self.bounds: dict[int, PeakBounds] = {}
        self.peaks: dict[int, PhasePeak] = {}
        self.started_seconds = time.monotonic()
        self.ended_seconds: float | None = None
