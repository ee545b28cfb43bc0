"""What the program's own phases and watches have found out, kept for the reporter and for `summary`.

One lock guards it: a reading and what follows from it belong together, or a reset in another thread would be taken for
somebody else's. Whoever holds it reads statistics (10 µs) and nothing slower, and waits for nobody. What watches have
counted needs no lock: a watch ends wherever the garbage collector runs, and must not wait there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gpumem_exporter.client import process_state
from gpumem_exporter.client.allocator.peaks import PeakWatch
from gpumem_exporter.client.allocator.statistics import Statistics, initialised_torch
from gpumem_exporter.client.hooks.calling_thread import calling_thread, mark_thread
from gpumem_exporter.client.hooks.lifecycle import after_fork_in_child
from gpumem_exporter.client.log import log
from gpumem_exporter.client.measure.peak_bounds import PeakBounds
from gpumem_exporter.wire.protocol import MAX_LABEL_LENGTH

__all__ = ["MAX_PHASES", "Observed", "PhasePeak", "Stretch", "ToldComponents", "process_observed"]

MAX_PHASES = 64
"""Names kept, as many as the exporter takes of one device. Phases under further names are measured, and not kept."""
_LIFTED = ("allocated_bytes", "reserved_bytes")


@dataclass(frozen=True, slots=True)
class PhasePeak:
    """The largest peak of allocated bytes in a phase, over its runs since the allocator's peaks were last reset."""

    at_least_bytes: int
    at_most_bytes: int | None
    """None where somebody reset the allocator's peaks while the phase ran."""

    @property
    def exact(self) -> bool:
        """The two bounds meet."""
        return self.at_least_bytes == self.at_most_bytes


@dataclass(frozen=True, slots=True)
class ToldComponents:
    """What one watch has counted."""

    devices: Mapping[int, tuple[Mapping[str, int], int | None]]
    """By device: bytes by component, and the allocator's allocated bytes at that moment."""
    good_until_seconds: float
    """On the monotonic clock: after that it is too old to be told."""
    of: frozenset[int] = frozenset()
    """What was counted: the identities of the model and the optimizer."""


class Stretch:
    """One run of a phase or of a measured block: which devices it saw, and the bounds of their peaks.

    Args:
        name: told to whoever asks what runs.
        reset_peaks: let the allocator's peaks begin anew at its begin.
        kept: it counts in the table of phases.
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


class Observed:
    """The phases, peaks and components of one process. Any thread may call anything.

    Args:
        statistics: what to read; None until CUDA is initialised.
    """

    def __init__(self, statistics: Callable[[], Statistics | None] | None = None) -> None:
        self._find_statistics = statistics or self._of_torch
        self._found: tuple[Any, Statistics] | None = None
        self._hooked = False
        self._begin()

    def _begin(self) -> None:
        # Reentrant: a finalizer that runs inside may enter a phase itself.
        self._lock = threading.RLock()
        self._watch = PeakWatch()
        self._open: dict[int, Stretch] = {}
        self._peaks_now: dict[int, int] = {}
        self._lifted: dict[tuple[int, str], int] = {}
        # In a forked child the names stay: whoever has named a phase does not name it again.
        self._phases: dict[str, dict[int, PhasePeak]] = {name: {} for name in getattr(self, "_phases", ())}
        self._outdated: set[tuple[str, int]] = set()
        self._full = False
        self._components: dict[int, ToldComponents] = {}

    # Peaks

    def look(self, index: int, read: Callable[[int], Mapping[str, Any] | None]) -> Mapping[str, Any] | None:
        """Read one device's statistics with `read`, note what they tell, and return them."""
        self._survive_forks()
        with self._lock:
            state = read(index)
            if state is not None:
                self._note(index, state)
            return state

    def peak_resets(self, index: int) -> int:
        """How often the peaks of a device were seen to have been reset by others than phases that asked for it."""
        return self._watch.resets(index)

    def reset_peaks(
        self, index: int, read: Callable[[int], Mapping[str, Any] | None], reset: Callable[[int], object]
    ) -> None:
        """Let the peaks of a device, and of the phases on it, begin anew, because somebody has asked for that."""
        with self._lock:
            state = read(index)
            if state is not None:
                self._note(index, state)
            reset(index)
            self._watch.reset(index)
            self._forget_peaks(index)
            if state is not None and "allocated_bytes" in state:
                allocated, peak = _allocated(state)
                self._bounds_of(index, lambda bounds: bounds.reset_by_us(peak, allocated))

    def lifted(self, index: int, name: str, peak_bytes: int | None) -> int | None:
        """A peak of the allocator as it would be if no phase had reset it."""
        return peak_bytes if peak_bytes is None else max(peak_bytes, self._lifted.get((index, name), 0))

    # Phases

    def enter(self, stretch: Stretch) -> None:
        """A stretch begins."""
        self._survive_forks()
        mark_thread()
        statistics = self._find_statistics()
        with self._lock:
            if statistics is not None:
                for index in statistics.devices():
                    state = statistics.state(index)
                    if state is None or "allocated_bytes" not in state:
                        continue
                    self._note(index, state)
                    if stretch.reset_peaks:
                        state = self._reset(index, state, statistics)
                    stretch.bounds[index] = PeakBounds(*_allocated(state))
            self._open[id(stretch)] = stretch

    def leave(self, stretch: Stretch) -> None:
        """It has ended; its bounds stand from now on."""
        statistics = self._find_statistics()
        with self._lock:
            if self._open.get(id(stretch)) is not stretch:
                return  # begun before a fork, or never
            try:
                for index in statistics.devices() if statistics is not None else ():
                    state = statistics.state(index) if statistics is not None else None
                    if state is not None:
                        self._note(index, state)
            finally:
                del self._open[id(stretch)]
            stretch.ended_seconds = time.monotonic()
            stretch.peaks = {index: self._peak(index, bounds) for index, bounds in stretch.bounds.items()}
            if stretch.kept:
                self._keep(stretch)

    def current_phase(self) -> str | None:
        """The innermost phase of this thread, else of the one that it works for; None outside of phases.

        What a thread does that works for itself belongs to no other's phase. Raises nothing.
        """
        with self._lock:
            innermost = {stretch.thread: stretch.name for stretch in self._open.values() if stretch.kept}
        caller = calling_thread()
        own = innermost.get(threading.get_ident())
        return own if own is not None or caller is None else innermost.get(caller)

    def phases(self, index: int) -> Mapping[str, PhasePeak]:
        """The peak of each phase on a device, of those that run now, too."""
        with self._lock:
            known = {name: peaks[index] for name, peaks in self._phases.items() if index in peaks}
            for stretch in self._open.values():
                if stretch.kept and stretch.name in self._phases and index in stretch.bounds:
                    peak = self._peak(index, stretch.bounds[index])
                    before = known.get(stretch.name)
                    outdated = before is None or (stretch.name, index) in self._outdated
                    known[stretch.name] = peak if outdated or before is None else _larger(before, peak)
            return known

    # Components

    def tell_components(self, key: object, told: ToldComponents | None) -> None:
        """What a watch has counted last, in place of what it told before; None once it has nothing to say any more."""
        if told is None:
            self._components.pop(id(key), None)
        else:
            self._components[id(key)] = told

    def components(self, index: int) -> Mapping[str, int]:
        """Bytes of a device by component, over all that is watched; empty where nothing is, or long not at a step.

        Of watches that have the model or the optimizer in common one counts: the one of both, or the latest.
        `other` is what the allocator held beside them when the last of them was counted. It is left out where that
        would be less than nothing: then some of them lie outside of the allocator's memory.
        """
        now = time.monotonic()
        fresh = _each_once(told for told in list(self._components.values()) if now < told.good_until_seconds)
        counted = [(told, told.devices[index]) for told in fresh if index in told.devices]
        if not counted:
            return {}
        total: dict[str, int] = {}
        for _, (components, _) in counted:
            for name, value in components.items():
                total[name] = total.get(name, 0) + value
        _, (_, allocated) = max(counted, key=lambda each: each[0].good_until_seconds)
        if allocated is not None and allocated >= sum(total.values()):
            total["other"] = allocated - sum(total.values())
        return total

    # Inside

    def _note(self, index: int, state: Mapping[str, Any]) -> None:
        resets = self._watch.resets(index)
        self._watch.look(index, state)
        if "allocated_bytes" not in state:
            return
        allocated, peak = _allocated(state)
        self._peaks_now[index] = peak
        reset = self._watch.resets(index) != resets
        if reset:
            self._forget_peaks(index)
        for stretch in self._open.values():
            bounds = stretch.bounds.get(index)
            if bounds is None:  # it had no context when the stretch began: nothing was allocated on it, ever
                bounds = stretch.bounds[index] = PeakBounds(0, 0)
            if reset:
                bounds.reset_by_others(allocated, peak)
            else:
                bounds.look(allocated, peak)

    def _reset(self, index: int, state: Mapping[str, Any], statistics: Statistics) -> Mapping[str, Any]:
        """Let the peaks begin anew, remember what they were, and return the statistics after it."""
        for name in _LIFTED:
            if name in state:
                key = index, name
                self._lifted[key] = max(self._lifted.get(key, 0), state[name]["all"]["peak"])
        _, peak = _allocated(state)
        statistics.reset_peaks(index)
        after = statistics.state(index) or state
        self._watch.forget(index)
        self._bounds_of(index, lambda bounds: bounds.reset_by_us(peak, _allocated(after)[0]))
        self._note(index, after)
        return after

    def _forget_peaks(self, index: int) -> None:
        self._lifted = {key: lifted for key, lifted in self._lifted.items() if key[0] != index}
        self._outdated.update((name, index) for name in self._phases)

    def _bounds_of(self, index: int, change: Callable[[PeakBounds], None]) -> None:
        for stretch in self._open.values():
            if index in stretch.bounds:
                change(stretch.bounds[index])

    def _peak(self, index: int, bounds: PeakBounds) -> PhasePeak:
        return PhasePeak(bounds.at_least, bounds.at_most(self._peaks_now.get(index, 0)))

    def _keep(self, stretch: Stretch) -> None:
        phases = self._phases.get(stretch.name)
        if phases is None:
            return
        for index, peak in stretch.peaks.items():
            before = phases.get(index)
            outdated = (stretch.name, index) in self._outdated
            phases[index] = peak if before is None or outdated else _larger(before, peak)
            self._outdated.discard((stretch.name, index))

    def name_phase(self, name: str) -> str:
        """The name under which a phase is kept: one that can be a label's value. There is room for `MAX_PHASES`."""
        name = name.encode("utf-8", "replace").decode()[:MAX_LABEL_LENGTH] or "unnamed"
        with self._lock:
            if name in self._phases:
                return name
            if len(self._phases) < MAX_PHASES:
                self._phases[name] = {}
                return name
            told, self._full = self._full, True
        if not told:
            log.warning("phase %r and all further names are measured and not reported: %d are kept", name, MAX_PHASES)
        return name

    def _of_torch(self) -> Statistics | None:
        torch = initialised_torch()
        if torch is None:
            return None
        if self._found is None or self._found[0] is not torch:
            self._found = torch, Statistics(torch)
        return self._found[1]

    def _survive_forks(self) -> None:
        if not self._hooked:
            self._hooked = True
            after_fork_in_child(self._begin)


def _allocated(state: Mapping[str, Any]) -> tuple[int, int]:
    figures = state["allocated_bytes"]["all"]
    return figures["current"], figures["peak"]


def _each_once(told: Iterable[ToldComponents]) -> list[ToldComponents]:
    """Without those that have something in common with another: its bytes would be told twice."""
    chosen: list[ToldComponents] = []
    for one in sorted(told, key=lambda one: len(one.of))[::-1]:
        if all(one.of.isdisjoint(other.of) for other in chosen):
            chosen.append(one)
    return chosen


def _larger(one: PhasePeak, other: PhasePeak) -> PhasePeak:
    at_most = (
        None
        if one.at_most_bytes is None or other.at_most_bytes is None
        else max(one.at_most_bytes, other.at_most_bytes)
    )
    return PhasePeak(max(one.at_least_bytes, other.at_least_bytes), at_most)


def process_observed() -> Observed:
    """The one of this process."""
    return process_state.observed()
