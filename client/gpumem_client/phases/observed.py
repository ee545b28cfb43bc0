"""Peaks of phases and bytes of components in this process, for the reporter and for `summary`."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from gpumem_client.guest_safety import log
from gpumem_client.hooks.process_life import after_fork_in_child, process_singleton
from gpumem_client.phases.peaks import DevicePeaks, PeakBounds, PhasePeak, Span
from gpumem_client.torch_access import DeviceState, Statistics, calling_thread, mark_thread, process_statistics
from gpumem_client.wire.protocol import MAX_LABEL_LENGTH, MAX_PHASES


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
        # The names of the phases that are reported. A forked child keeps them: a phase registers its name only once.
        self._names: set[str] = set()
        self._full = False
        self._clear()

    def _clear(self) -> None:
        # One lock guards each reading of the peaks with its evaluation. Otherwise a reset by a phase in another thread
        # would count as a reset by the user's code. Reentrant: a finalizer that runs under the lock may enter a phase.
        self._lock = threading.RLock()
        self._open: dict[int, Span] = {}
        self._devices: defaultdict[int, DevicePeaks] = defaultdict(DevicePeaks)
        self._components: dict[int, WatchedBytes] = {}

    # Peaks

    def read(self, index: int) -> DeviceState | None:
        """Read the statistics of one device, evaluate them, and return them."""
        self._survive_forks()
        with self._lock:
            return self._read(self._find_statistics(), index)

    def peak_resets(self, index: int) -> int:
        """Return the number of observed resets of a device's peaks, without resets by phases."""
        return self._devices[index].resets

    def reset_peaks(self, index: int) -> None:
        """Reset the peaks of a device and of its phases, as the user has requested."""
        statistics = self._find_statistics()
        if statistics is None:
            return
        with self._lock:
            self._read(statistics, index)
            self._reset(statistics, index)
            self._devices[index].reset()

    def lifted(self, index: int, name: str, peak_bytes: int | None) -> int | None:
        """Return a peak of the allocator as if no phase had reset it."""
        return peak_bytes if peak_bytes is None else max(peak_bytes, self._devices[index].lifted.get(name, 0))

    # Phases

    def enter(self, span: Span) -> None:
        """Start a span."""
        self._survive_forks()
        mark_thread()
        statistics = self._find_statistics()
        with self._lock:
            if statistics is not None:
                for index in statistics.devices():
                    state = self._read(statistics, index)
                    if state is None or "allocated_bytes" not in state:
                        continue
                    if span.reset_peaks:
                        self._devices[index].lift(state)
                        self._reset(statistics, index)
                        state = self._read(statistics, index) or state
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
                    self._read(statistics, index)
            finally:
                del self._open[id(span)]
            span.ended_seconds = time.monotonic()
            if span.kept and span.name in self._names:
                for index, bounds in span.bounds.items():
                    phases = self._devices[index].phases
                    phases[span.name] = bounds.peak.merged(phases.get(span.name))

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
            device = self._devices[index]
            since = dict(device.phases)
            for span in self._open.values():
                if span.kept and span.name in self._names and index in span.bounds:
                    since[span.name] = span.bounds[index].peak.merged(since.get(span.name))
            return {**device.earlier_phases, **since}

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

    def _read(self, statistics: Statistics | None, index: int) -> DeviceState | None:
        state = None if statistics is None else statistics.state(index)
        if state is not None:
            reset = self._devices[index].note(state)
            for span in self._open.values() if "allocated_bytes" in state else ():
                # A device without bounds had no context, and so no allocation, when the span started.
                bounds = span.bounds.setdefault(index, PeakBounds(0, 0))
                if reset:
                    bounds.reset(by_user=True)
                bounds.note(*_allocated(state))
        return state

    def _reset(self, statistics: Statistics, index: int) -> None:
        """Reset the peaks, right after they were read."""
        statistics.reset_peaks(index)
        for span in self._open.values():
            if index in span.bounds:
                span.bounds[index].reset(by_user=False)

    def name_phase(self, name: str) -> str:
        """Register the name of a phase and return it as a valid label value. The first `MAX_PHASES` are reported."""
        name = name.encode("utf-8", "replace").decode()[:MAX_LABEL_LENGTH] or "unnamed"
        with self._lock:
            if name in self._names or len(self._names) < MAX_PHASES:
                self._names.add(name)
                return name
            warned, self._full = self._full, True
        if not warned:
            log.warning("phase %r is measured but not reported: the limit is %d names per process", name, MAX_PHASES)
        return name

    def _survive_forks(self) -> None:
        if not self._hooked:
            self._hooked = True
            after_fork_in_child(self._clear)


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
