"""Detects memory that grows from step to step, and names the objects that keep it."""

from __future__ import annotations

import functools
import logging
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gpumem_client.guest_safety import GuestLog
from gpumem_client.hooks.steps import OneStep, process_steps
from gpumem_client.torch_access import process_statistics
from gpumem_client.wire.units import ShownAsText, human_bytes
from gpumem_toolkit.leaks.suspects import SuspectSearch
from gpumem_toolkit.leaks.trend import Growing, Trend

_log = GuestLog(logging.getLogger("gpumem_toolkit"), None)
_Memory = tuple[int | None, int | None]


@dataclass(frozen=True, slots=True)
class Leak(ShownAsText):
    """Memory of one device that grows with the steps."""

    device: int
    bytes_per_step: float
    steps: int
    """Length of the window in which the growth was measured."""
    leaked_bytes: int
    """Growth in that window."""
    suspects: tuple[str, ...] = ()
    """Kinds of tensors that grew in number, and what refers to them; the likeliest cause first. Empty without
    `name_suspects`."""
    steps_left: int | None = None
    """Steps until the device is full at this rate."""

    def __str__(self) -> str:
        rate, leaked = human_bytes(round(self.bytes_per_step)), human_bytes(self.leaked_bytes)
        left = f"; the device is full in {self.steps_left} steps" if self.steps_left is not None else ""
        first = f"memory leak: cuda:{self.device} grows by {rate} per step ({leaked} in {self.steps} steps){left}"
        return "\n  ".join((first, *self.suspects))


@dataclass(slots=True)
class _Device:
    """The state of one device: it grows if `growing` is set, and its leak was reported if `leak` is set."""

    trend: Trend
    growing: Growing | None = None
    search: SuspectSearch | None = None
    leak: Leak | None = None


class LeakDetector:
    """Compares the allocated bytes at the same point of each step. Only the training thread may call it.

    `leak_detector` creates it and describes the arguments.
    """

    def __init__(self, on_leak: Callable[[Leak], None], *, name_suspects: bool = True, **bounds: int) -> None:
        self._on_leak = on_leak
        self._name_suspects = name_suspects
        self._devices: dict[int, _Device] = defaultdict(lambda: _Device(Trend(**bounds)))
        self._step = OneStep()
        self._stop_listening: Callable[[], None] = lambda: None
        self.steps = 0
        """Number of steps that were examined."""

    @property
    def leaks(self) -> tuple[Leak, ...]:
        """The leaks that are known now, at most one per device; without those whose growth has stopped."""
        return tuple(device.leak for device in list(self._devices.values()) if device.leak is not None)

    def watch_steps(self) -> None:
        """Examine the memory after each step of an optimizer, or at each `gpumem_client.step()`."""
        self._stop_listening()
        self._stop_listening = process_steps().listen(self._on_step)
        _active.add(self)

    def stop(self) -> None:
        """Stop the detection."""
        self._stop_listening()
        self._stop_listening = lambda: None
        _active.discard(self)

    def look(self) -> tuple[Leak, ...]:
        """Examine the memory now, and from now on only in this method. Takes 15 µs per device. Returns `leaks`."""
        self._step.ends(None)
        self._examine()
        return self.leaks

    def add(self, device: int, allocated_bytes: int, memory: Callable[[], _Memory] = lambda: (None, None)) -> None:
        """Add the allocated bytes of a device after a step. `memory` returns its free and total bytes."""
        state = self._devices[device]
        slope = state.trend.add(allocated_bytes, lambda: memory()[1])
        if state.growing is None:
            if slope is not None:
                state.growing = Growing(slope)
                # Counting at each step would cost milliseconds: tensors are counted only once the memory grows.
                state.search = SuspectSearch(slope.steps) if self._name_suspects else None
        elif not state.growing.goes_on(allocated_bytes):
            if state.leak is not None:
                _log.warning("no memory leak: cuda:%d does not grow any more; the earlier report is withdrawn", device)
            state.growing = state.search = state.leak = None
            state.trend.restart()
        elif state.leak is None:
            # Batches that become longer and a cache that has filled grow, too: the report waits for a kind that grows.
            suspects = state.search.step() if state.search is not None else ()
            if suspects or state.search is None:
                state.search, slope, free = None, state.growing.slope, memory()[0]
                steps_left = None if free is None else int(free / slope.per_step)
                state.leak = Leak(device, slope.per_step, slope.steps, slope.grown, suspects, steps_left)
                self._on_leak(state.leak)

    def __reduce__(self) -> tuple[Callable[[], LeakDetector], tuple[()]]:
        """Make copies and pickles, for example of a trainer, contain a detector that listens to no steps."""
        return functools.partial(LeakDetector, _log_leak), ()

    def _on_step(self, optimizer: Any) -> None:
        if self._step.ends(optimizer):
            self._examine()

    def _examine(self) -> None:
        statistics = process_statistics()
        if statistics is None:
            return
        self.steps += 1
        for device in statistics.devices():
            state = statistics.state(device)
            if state is not None:
                self.add(device, state["allocated_bytes"]["current"], functools.partial(_memory, device))


# The detectors of this process: the diagnosis of an out-of-memory error reads their leaks.
_active: weakref.WeakSet[LeakDetector] = weakref.WeakSet()


def known_leak(device: int) -> Leak | None:
    """Return the leak that a detector of this process knows on a device."""
    return next((leak for detector in list(_active) for leak in detector.leaks if leak.device == device), None)


def leak_detector(
    *,
    on_leak: Callable[[Leak], None] | None = None,
    warm_up_steps: int = 20,
    least_growth: int = 1 << 20,
    name_suspects: bool = True,
) -> LeakDetector:
    """Report memory that grows from step to step, from now on until `stop()` of the returned detector.

    The detector examines the memory after each step of an optimizer (torch 2.1 or later), at each
    `gpumem_client.step()`, or at each call of `look()`. That takes 15 µs per device, and one or two milliseconds at
    every eighth step while memory rises. A steady leak of one percent of the device in 1,000 steps is found after about
    130 steps, a slower or irregular one later, and one of half a percent of the device in each step after 60. Warm-up,
    spikes, a sawtooth and a cache that fills up are not reported. If the growth stops after a report, a warning says
    so, and the leak is no longer among `leaks` and in the advice of `oom_guard`.

    Once the memory of a device grows, the detector counts the live tensors, and again some steps later. It reports a
    leak once the number of tensors of a kind has grown, and names these kinds and what refers to them
    (`lingering_tensors` describes the cost). So batches that become longer are no leak, and neither is one tensor that
    becomes longer: `oom_guard` explains that one. Nothing happens while CUDA is not initialized.

    `on_leak` is called once for each leak, in the training thread; by default a warning is logged. The first
    `warm_up_steps` are ignored, and so is a growth of less than `least_growth` bytes. Without `name_suspects`, no
    tensors are counted.
    """
    detector = LeakDetector(
        on_leak or _log_leak, warm_up_steps=warm_up_steps, least_growth=least_growth, name_suspects=name_suspects
    )
    detector.watch_steps()
    return detector


def _log_leak(leak: Leak) -> None:
    _log.warning("%s", leak)


def _memory(device: int) -> _Memory:
    """Return the free and the total bytes of a device."""
    try:
        free, total = sys.modules["torch"].cuda.cudart().cudaMemGetInfo(device)
    except RuntimeError:
        return None, None
    return int(free), int(total)
