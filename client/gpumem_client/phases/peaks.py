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

    def merged(self, other: PhasePeak | None) -> PhasePeak:
        """Return the peak of both; `other` may be None for no run."""
        if other is None:
            return self
        most = None
        if self.at_most_bytes is not None and other.at_most_bytes is not None:
            most = max(self.at_most_bytes, other.at_most_bytes)
        return PhasePeak(max(self.at_least_bytes, other.at_least_bytes), most)


class PeakBounds:
    """The peak of one device's allocated bytes in one span. Each reading of the statistics narrows the bounds.

    It is made with the allocated bytes and the allocator's peak at the start.
    """

    __slots__ = ("_at_least", "_at_most", "_before_reset", "_others_peak", "entered", "now")

    def __init__(self, allocated_bytes: int, peak_bytes: int) -> None:
        self.entered = self.now = self._at_least = allocated_bytes
        self._at_most: int | None = peak_bytes
        # Only a higher peak is the span's own.
        self._others_peak = peak_bytes
        self._before_reset = 0

    @property
    def peak(self) -> PhasePeak:
        """The bounds at the last reading."""
        return PhasePeak(self._at_least, self._at_most)

    def note(self, allocated_bytes: int, peak_bytes: int) -> None:
        """Evaluate a reading during the span."""
        self.now = allocated_bytes
        self._at_least = max(self._at_least, allocated_bytes, peak_bytes if peak_bytes > self._others_peak else 0)
        if self._at_most is not None:
            self._at_most = max(self._before_reset, peak_bytes)

    def reset(self, *, by_user: bool) -> None:
        """Evaluate a reset of the allocator's peak since the last reading. The upper bound survives the client's."""
        self._before_reset, self._others_peak = self._at_most or 0, -1
        if by_user:
            self._at_most = None


class DevicePeaks:
    """The peaks of one device: their resets, and the peaks of its phases. For one thread at a time.

    A reset is not visible, and not counted, if no peak was above the current value, or if each peak has risen again
    before the next reading. The reporter counts its own resets in any case.
    """

    def __init__(self) -> None:
        self.resets = 0
        """The number of resets that the client has noticed. Any thread may read it."""
        self.lifted: dict[str, int] = {}
        """The peaks that phases have reset, by statistic."""
        self.phases: dict[str, PhasePeak] = {}
        """The peaks of phases since the last reset."""
        self.earlier_phases: dict[str, PhasePeak] = {}
        """The peaks of phases before the last reset."""
        self._peaks: dict[str, int] = {}

    def note(self, state: Mapping[str, Any]) -> bool:
        """Compare the peaks in nested statistics with the last ones. Returns whether the user's code has reset them."""
        before, self._peaks = self._peaks, {name: state[name]["peak"] for name in SUMMED if name in state}
        # A peak rises, and only a reset lets it fall. A reset affects all peaks of a device, so any of them shows it.
        fell = any(self._peaks.get(name, then) < then for name, then in before.items())
        if fell:
            self._count_reset()
        return fell

    def reset(self) -> None:
        """Count a reset that the client has made at the user's request."""
        self._peaks = {}
        self._count_reset()

    def lift(self, state: Mapping[str, Any]) -> None:
        """Remember the peaks, because a phase resets them now. This reset does not count."""
        self._peaks = {}
        for name in ("allocated_bytes", "reserved_bytes"):
            if name in state:
                self.lifted[name] = max(self.lifted.get(name, 0), state[name]["peak"])

    def _count_reset(self) -> None:
        self.resets += 1
        self.lifted = {}
        self.earlier_phases.update(self.phases)
        self.phases = {}


class Span:
    """One run of a phase or a measured block, with the bounds of the peak of each device.

    `reset_peaks` resets the allocator's peaks at the start. `kept` says that the run counts as a run of a phase.
    """

    __slots__ = ("bounds", "ended_seconds", "kept", "name", "reset_peaks", "started_seconds", "thread")

    def __init__(self, name: str, *, reset_peaks: bool = False, kept: bool = True) -> None:
        self.name = name
        self.reset_peaks = reset_peaks
        self.kept = kept
        self.thread = threading.get_ident()
        self.bounds: dict[int, PeakBounds] = {}
        self.started_seconds = time.monotonic()
        self.ended_seconds: float | None = None
