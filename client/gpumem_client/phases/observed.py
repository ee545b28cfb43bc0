"""Peaks of phases and bytes of components in this process, for the reporter and for `summary`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from gpumem_client.guest_safety import log
from gpumem_client.hooks.process_life import after_fork_in_child, process_singleton
from gpumem_client.phases.peaks import PeakBounds, PeakWatch, PhasePeak, Span
from gpumem_client.torch_access import DeviceState, Statistics, calling_thread, mark_thread, process_statistics
from gpumem_client.wire.protocol import MAX_LABEL_LENGTH, MAX_PHASES

_LIFTED = ("allocated_bytes", "reserved_bytes")


@dataclass(frozen=True)
class WatchedBytes:
    """The last count of a watch."""

    devices: Mapping[int, tuple[Mapping[str, int], int | None]]
    """By device: bytes by component, and the allocated bytes at the same time."""
    valid_until_seconds: float
    """Time on the monotonic clock after which the count is too old for the reports."""
    watched_ids: frozenset[int] = frozenset()
    """Ids of the model and the optimizer that were counted."""


class Observed:
    """The phases, peaks and components of one process. Any thread may call any method.

    `statistics` returns the statistics to read, or None before CUDA is initialized.
    """

    def __init__(self, statistics: Callable[[], Statistics | None] | None = None) -> None:
        self._find_statistics = statistics or process_statistics
        self._hooked = False
        self._clear()

    def _clear(self) -> None:
        # One lock guards each reading of the peaks with its evaluation. Otherwise a reset by a phase in another thread
        # would count as a reset by the user's code. Reentrant: a finalizer that runs under the lock may enter a phase.
        self._lock = threading.RLock()
        self._watch = PeakWatch()
        self._open: dict[int, Span] = {}
        self._peaks_now: dict[int, int] = {}
        self._lifted: dict[tuple[int, str], int] = {}
        # A forked child keeps the names, because a phase registers its name only once.
        self._phases: dict[str, dict[int, PhasePeak]] = {name: {} for name in getattr(self, "_phases", ())}
        self._outdated: set[tuple[str, int]] = set()
        self._full = False
        self._components: dict[int, WatchedBytes] = {}

    # Peaks

    def read(self, index: int) -> DeviceState | None:
        """Read the statistics of one device, evaluate them, and return them."""
        self._survive_forks()
        statistics = self._find_statistics()
        with self._lock:
            state = None if statistics is None else statistics.state(index)
            if state is not None:
                self._note(index, state)
            return state

    def peak_resets(self, index: int) -> int:
        """Return the number of observed resets of a device's peaks, without resets by phases."""
        return self._watch.resets(index)

    def reset_peaks(self, index: int) -> None:
        """Reset the peaks of a device and of its phases, as the user has requested."""
        statistics = self._find_statistics()
        if statistics is None:
            return
        with self._lock:
            state = statistics.state(index)
            if state is not None:
                self._note(index, state)
            statistics.reset_peaks(index)
            self._watch.reset(index)
            self._forget_peaks(index)
            if state is not None and "allocated_bytes" in state:
                allocated, peak = _allocated(state)
                self._bounds_of(index, lambda bounds: bounds.reset_by_exporter(peak, allocated))

    def lifted(self, index: int, name: str, peak_bytes: int | None) -> int | None:
        """Return a peak of the allocator as if no phase had reset it."""
        return peak_bytes if peak_bytes is None else max(peak_bytes, self._lifted.get((index, name), 0))

    # Phases

    def enter(self, span: Span) -> None:
        """Start a span."""
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
                    if span.reset_peaks:
                        state = self._reset(index, state, statistics)
                    span.bounds[index] = PeakBounds(*_allocated(state))
            self._open[id(span)] = span

    def leave(self, span: Span) -> None:
        """End a span. Its bounds do not change afterwards."""
        statistics = self._find_statistics()
        with self._lock:
            if self._open.get(id(span)) is not span:
                return  # started before a fork, or not at all
            try:
                for index in statistics.devices() if statistics is not None else ():
                    state = statistics.state(index) if statistics is not None else None
                    if state is not None:
                        self._note(index, state)
            finally:
                del self._open[id(span)]
            span.ended_seconds = time.monotonic()
            span.peaks = {index: self._peak(index, bounds) for index, bounds in span.bounds.items()}
            if span.kept:
                self._keep(span)

    def current_phase(self) -> str | None:
        """Return the innermost phase of this thread, or of the thread for which autograd runs it; else None."""
        with self._lock:
            innermost = {span.thread: span.name for span in self._open.values() if span.kept}
        caller = calling_thread()
        own = innermost.get(threading.get_ident())
        return own if own is not None or caller is None else innermost.get(caller)

    def phases(self, index: int) -> Mapping[str, PhasePeak]:
        """Return the peak of each phase on a device, including phases that run now."""
        with self._lock:
            known = {name: peaks[index] for name, peaks in self._phases.items() if index in peaks}
            outdated = {name for name, device in self._outdated if device == index}
            for span in self._open.values():
                if span.kept and span.name in self._phases and index in span.bounds:
                    before = None if span.name in outdated else known.get(span.name)
                    outdated.discard(span.name)  # a phase may run several times at once
                    known[span.name] = _merged(before, self._peak(index, span.bounds[index]))
            return known

    # Components

    def set_components(self, watch: object, counted: WatchedBytes | None) -> None:
        """Replace the count of a watch; None removes it."""
        # Without the lock: a watch may end inside the garbage collector, which must not wait.
        if counted is None:
            self._components.pop(id(watch), None)
        else:
            self._components[id(watch)] = counted

    def components(self, index: int) -> Mapping[str, int]:
        """Return the bytes of a device by component, summed over all watches; empty without a valid count.

        If several watches share a model or an optimizer, only one is counted: a watch that covers both, otherwise the
        most recent. `other` is the rest of the allocated bytes at the last count; it may be missing.
        """
        if not self._components:
            return {}
        now = time.monotonic()
        valid = _without_shared(each for each in list(self._components.values()) if now < each.valid_until_seconds)
        counts = [each.devices[index] for each in valid if index in each.devices]
        total: dict[str, int] = {}
        for components, _ in counts:
            for name, value in components.items():
                total[name] = total.get(name, 0) + value
        allocated = counts[-1][1] if counts else None
        # The rest would be negative if some components lie outside the allocator's memory.
        if allocated is not None and allocated >= sum(total.values()):
            total["other"] = allocated - sum(total.values())
        return total

    # Internal

    def _note(self, index: int, state: DeviceState) -> None:
        resets = self._watch.resets(index)
        self._watch.note(index, state)
        if "allocated_bytes" not in state:
            return
        allocated, peak = _allocated(state)
        self._peaks_now[index] = peak
        reset = self._watch.resets(index) != resets
        if reset:
            self._forget_peaks(index)
        for span in self._open.values():
            bounds = span.bounds.get(index)
            if bounds is None:  # the device had no context, and so no allocation, when the span started
                bounds = span.bounds[index] = PeakBounds(0, 0)
            if reset:
                bounds.reset_by_user(allocated, peak)
            else:
                bounds.note(allocated, peak)

    def _reset(self, index: int, state: DeviceState, statistics: Statistics) -> DeviceState:
        """Reset the peaks for a phase, remember their values, and return the statistics after that."""
        for name in _LIFTED:
            if name in state:
                key = index, name
                self._lifted[key] = max(self._lifted.get(key, 0), state[name]["peak"])
        _, peak = _allocated(state)
        statistics.reset_peaks(index)
        after = statistics.state(index) or state
        self._watch.forget(index)
        self._bounds_of(index, lambda bounds: bounds.reset_by_exporter(peak, _allocated(after)[0]))
        self._note(index, after)
        return after

    def _forget_peaks(self, index: int) -> None:
        self._lifted = {key: lifted for key, lifted in self._lifted.items() if key[0] != index}
        self._outdated.update((name, index) for name in self._phases)

    def _bounds_of(self, index: int, change: Callable[[PeakBounds], None]) -> None:
        for span in self._open.values():
            if index in span.bounds:
                change(span.bounds[index])

    def _peak(self, index: int, bounds: PeakBounds) -> PhasePeak:
        return PhasePeak(bounds.at_least, bounds.at_most(self._peaks_now.get(index, 0)))

    def _keep(self, span: Span) -> None:
        phases = self._phases.get(span.name)
        if phases is None:
            return
        for index, peak in span.peaks.items():
            before = None if (span.name, index) in self._outdated else phases.get(index)
            phases[index] = _merged(before, peak)
            self._outdated.discard((span.name, index))

    def name_phase(self, name: str) -> str:
        """Register the name of a phase and return it as a valid label value. The first `MAX_PHASES` are reported."""
        name = name.encode("utf-8", "replace").decode()[:MAX_LABEL_LENGTH] or "unnamed"
        with self._lock:
            if name in self._phases:
                return name
            if len(self._phases) < MAX_PHASES:
                self._phases[name] = {}
                return name
            warned, self._full = self._full, True
        if not warned:
            log.warning("phase %r is measured but not reported: the limit is %d names per process", name, MAX_PHASES)
        return name

    def _survive_forks(self) -> None:
        if not self._hooked:
            self._hooked = True
            after_fork_in_child(self._clear)


def _merged(before: PhasePeak | None, peak: PhasePeak) -> PhasePeak:
    """Return the peak of several runs of a phase."""
    if before is None:
        return peak
    most: int | None = None
    if before.at_most_bytes is not None and peak.at_most_bytes is not None:
        most = max(before.at_most_bytes, peak.at_most_bytes)
    return PhasePeak(max(before.at_least_bytes, peak.at_least_bytes), most)


def _allocated(state: DeviceState) -> tuple[int, int]:
    values = state["allocated_bytes"]
    return values["current"], values["peak"]


def _without_shared(counts: Iterable[WatchedBytes]) -> list[WatchedBytes]:
    """Return the counts that share no model or optimizer, the most recent last."""
    chosen: list[WatchedBytes] = []
    for one in sorted(counts, key=lambda each: (len(each.watched_ids), each.valid_until_seconds), reverse=True):
        if all(one.watched_ids.isdisjoint(other.watched_ids) for other in chosen):
            chosen.append(one)
    return sorted(chosen, key=lambda each: each.valid_until_seconds)


def process_observed() -> Observed:
    """Return the instance of this process, which has one allocator."""
    return process_singleton("observed", Observed)
