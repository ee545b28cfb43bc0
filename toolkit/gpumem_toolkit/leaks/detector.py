"""Detects memory that grows from step to step, and names the objects that keep it."""

from __future__ import annotations

import functools
import gc
import logging
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from gpumem_client.guest_safety import GuestLog
from gpumem_client.hooks.steps import OneStep, process_steps
from gpumem_client.objects.referrers import NO_REFERRER
from gpumem_client.torch_access import Statistics, initialized_torch
from gpumem_client.wire.units import ShownAsText, human_bytes
from gpumem_toolkit.leaks.live_tensors import LingeringTensors, TensorGroup, walk
from gpumem_toolkit.leaks.trend import Growing, Trend

_log = GuestLog(logging.getLogger("gpumem_toolkit"), None)

_SEARCHES = {16: 3, 32: 2, 48: 1}
"""For each recount, in steps after the first count: the number of new tensors that makes a kind a suspect.

A leak need not keep a tensor at each step: the later recounts accept fewer.
"""
_LAST_SEARCH = max(_SEARCHES)
_SUSPECTS_MAX = 3
_SHAPES_MAX = 3


@dataclass(frozen=True, slots=True)
class Leak(ShownAsText):
    """Memory of one device that grows with the steps."""

    device: int
    bytes_per_step: float
    lower_bytes_per_step: float
    """Lower bound of `bytes_per_step`; wrong in about one of a million tests."""
    upper_bytes_per_step: float
    steps: int
    """Length of the window in which the growth was measured."""
    leaked_bytes: int
    """Growth in that window."""
    suspects: tuple[str, ...] = ()
    """Kinds of tensors that grew in number, and what refers to them; the likeliest cause first."""
    steps_left: int | None = None
    """Steps until the device is full at this rate."""
    hidden_objects: int = 0
    """Objects that `gc.freeze()` hides from the search for suspects."""

    def __str__(self) -> str:
        rate, leaked = human_bytes(round(self.bytes_per_step)), human_bytes(self.leaked_bytes)
        left = f"; the device is full in {self.steps_left} steps" if self.steps_left is not None else ""
        hidden = f" (gc.freeze() hides {self.hidden_objects:,} objects)" if self.hidden_objects else ""
        suspects = self.suspects or (f"no kind of tensor that Python objects hold grew in number{hidden}",)
        first = f"memory leak: cuda:{self.device} grows by {rate} per step ({leaked} in {self.steps} steps){left}"
        return "\n  ".join((first, *suspects))


@dataclass(slots=True)
class _Device:
    """The state of one device: it grows if `growing` is set, and its leak was reported if `leak` is set."""

    trend: Trend
    growing: Growing | None = None
    count_before: LingeringTensors | None = None
    steps_since_count: int = 0
    leak: Leak | None = None


class LeakDetector:
    """Compares the allocated bytes at the same point of each step. Only the training thread may call it.

    `leak_detector` creates it and describes the arguments.
    """

    def __init__(self, on_leak: Callable[[Leak], None], *, name_suspects: bool = True, **bounds: int) -> None:
        self._on_leak = on_leak
        self._new_trend = functools.partial(Trend, **bounds)
        self._name_suspects = name_suspects
        self._statistics: Statistics | None = None
        self._devices: dict[int, _Device] = {}
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

    def add(
        self, device: int, allocated_bytes: int, free_bytes: Callable[[], int | None] = lambda: None
    ) -> Leak | None:
        """Add the allocated bytes of a device after a step. Returns a leak once the search for its suspects ends."""
        if device not in self._devices:
            self._devices[device] = _Device(self._new_trend())
        state = self._devices[device]
        slope = state.trend.add(allocated_bytes)
        if state.growing is None:
            if slope is None:
                return None
            state.growing = Growing(slope)
            # Counting at each step would cost milliseconds: tensors are counted only once the memory grows.
            state.count_before, state.steps_since_count = self._count(), 0
            return self._report(device, state, free_bytes) if state.count_before is None else None
        if not state.growing.goes_on(allocated_bytes):
            if state.leak is not None:
                _log.warning("no memory leak: cuda:%d does not grow any more; the earlier report is withdrawn", device)
            state.growing = state.leak = state.count_before = None
            return None
        if state.count_before is None or state.leak is not None:
            return None
        state.steps_since_count += 1
        least = _SEARCHES.get(state.steps_since_count)
        if least is None:
            return None
        found = self._suspects(state.count_before, least)
        if not found and state.steps_since_count < _LAST_SEARCH:
            return None
        return self._report(device, state, free_bytes, found)

    def __reduce__(self) -> tuple[Callable[[], LeakDetector], tuple[()]]:
        """Make copies and pickles, for example of a trainer, contain a detector that listens to no steps."""
        return functools.partial(LeakDetector, _log_leak), ()

    def _on_step(self, optimizer: Any) -> None:
        if self._step.ends(optimizer):
            self._examine()

    def _examine(self) -> None:
        torch = initialized_torch()
        if torch is None:
            return
        if self._statistics is None:
            self._statistics = Statistics(torch)
        self.steps += 1
        for device in self._statistics.devices():
            state = self._statistics.state(device)
            if state is not None:
                self.add(device, state["allocated_bytes"]["current"], functools.partial(_free_bytes, torch, device))

    def _count(self, *, referrers: bool = False) -> LingeringTensors | None:
        torch = initialized_torch()
        return None if torch is None or not self._name_suspects else walk(torch, referrers=referrers)

    def _suspects(self, before: LingeringTensors, least: int) -> tuple[Growth, ...]:
        # The search for referrers takes 2 s per million objects, a count 0.1 s: search only if there is a suspect.
        after = self._count()
        if after is None or not grown(before, after, least=least):
            return ()
        return grown(before, self._count(referrers=True) or after, least=least)

    def _report(
        self, device: int, state: _Device, free_bytes: Callable[[], int | None], found: tuple[Growth, ...] = ()
    ) -> Leak:
        assert state.growing is not None  # noqa: S101 - add() has set it
        slope, free = state.growing.slope, free_bytes()
        state.count_before = None
        state.leak = Leak(
            device,
            slope.slope,
            slope.lower,
            slope.upper,
            slope.steps,
            slope.grown,
            descriptions(found),
            None if free is None else int(free / slope.slope),
            gc.get_freeze_count(),
        )
        self._on_leak(state.leak)
        return state.leak


_active: weakref.WeakSet[LeakDetector] = weakref.WeakSet()
"""The detectors of this process: the diagnosis of an out-of-memory error reads their leaks."""


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
    130 steps, a slower or irregular one later. Warm-up, spikes, a sawtooth and a cache that fills up are not reported.
    If the growth stops after a report, a warning says so, and the leak is no longer among `leaks` and in the advice of
    `oom_guard`.

    Once a device leaks, the detector counts the live tensors, and again some steps later. It names the kinds that grew
    and what refers to them (`lingering_tensors` describes the cost). Nothing happens while CUDA is not initialized.

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


def _free_bytes(torch: Any, device: int) -> int | None:
    try:
        return int(torch.cuda.cudart().cudaMemGetInfo(device)[0])
    except RuntimeError:
        return None


@dataclass(frozen=True, slots=True)
class Growth:
    """The growth of one kind of tensors between two counts."""

    group: TensorGroup
    more: int
    more_bytes: int
    more_nodes: int
    """Nodes of the autograd graphs that these tensors keep."""

    def __str__(self) -> str:
        nodes = f", with {self.more_nodes} more nodes in their autograd graph" if self.more_nodes else ""
        return f"{self.more} more: {self.group}{nodes}" if self.more else f"{self.group}{nodes}"

    @property
    def held_by_graph(self) -> bool:
        """Whether only an autograd graph keeps the tensors."""
        return bool(self.group.referrers) and all(each == NO_REFERRER for each in self.group.referrers)


def grown(before: LingeringTensors, after: LingeringTensors, *, least: int) -> tuple[Growth, ...]:
    """Return the kinds that grew by `least` tensors or graph nodes, the likeliest cause first.

    If no single shape grew enough, shapes with the same number of dimensions are compared together, for batches of many
    lengths. The result then has the largest of them.
    """
    none = TensorGroup((), "", 0, 0, 0)  # a kind that the first count did not have
    counted = {group.kind: group for group in before.groups}
    growths: list[Growth] = []
    by_rank: dict[tuple[int, str, int, bool], list[Growth]] = defaultdict(list)
    for group in after.groups:
        was = counted.get(group.kind, none)
        more_nodes = max(0, group.graph_nodes - was.graph_nodes)
        growths.append(Growth(group, group.count - was.count, group.bytes - was.bytes, more_nodes))
        by_rank[(len(group.shape), *group.kind[1:])].append(growths[-1])
    found = [growth for growth in growths if growth.more >= least or growth.more_nodes >= least]
    for alike in by_rank.values() if not found else ():
        if sum(growth.more for growth in alike) >= least:
            found += _by_bytes(growth for growth in alike if growth.more > 0)[:_SHAPES_MAX]
    return _ranked(found)


def frequent(counted: LingeringTensors, *, least: int) -> tuple[Growth, ...]:
    """Return the kinds with `least` tensors or graph nodes, except for models and optimizers. Needs one count."""
    return _ranked(
        Growth(group, 0, 0, group.graph_nodes if group.graph_nodes >= least else 0)
        for group in counted.groups
        if max(group.count, group.graph_nodes) >= least
        and not any("attribute _parameters of" in each or "attribute state of" in each for each in group.referrers)
    )


def descriptions(growths: Iterable[Growth]) -> tuple[str, ...]:
    """Return the text of the first suspects."""
    return tuple(map(str, growths))[:_SUSPECTS_MAX]


def _by_bytes(growths: Iterable[Growth]) -> list[Growth]:
    return sorted(growths, key=lambda growth: -growth.more_bytes)


def _ranked(growths: Iterable[Growth]) -> tuple[Growth, ...]:
    """Sort by bytes. If only an autograd graph keeps some tensors, the tensors that keep the graph come first."""
    growths = list(growths)
    by_graph = any(growth.held_by_graph for growth in growths)

    def rank(growth: Growth) -> tuple[int, bool, int]:
        nodes = growth.more_nodes if by_graph and not growth.held_by_graph else 0
        return -nodes, growth.held_by_graph, -(growth.more_bytes or growth.group.bytes)

    return tuple(sorted(growths, key=rank))
