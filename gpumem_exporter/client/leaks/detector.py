"""Finds memory that grows from step to step, and names who holds it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from gpumem_exporter.client.allocator.statistics import Statistics, initialised_torch
from gpumem_exporter.client.hooks.steps import OneStep, process_steps
from gpumem_exporter.client.leaks.live_tensors import Kind, LingeringTensors, allocating_frames, walk
from gpumem_exporter.client.leaks.suspects import Growth, growing, held, suspicions, worth_asking
from gpumem_exporter.client.leaks.trend import Slope, Trend
from gpumem_exporter.client.log import log
from gpumem_exporter.client.sizes import human_bytes

__all__ = ["Leak", "LeakDetector", "known_leak", "leak_detector"]


_WALK_SECONDS = 0.5
_WALK_OBJECTS = 5_000_000
_WALK_GROUPS = 10_000
_NAMING = ((16, 3), (32, 2), (48, 1))
"""So many steps after the first walk, a kind of tensors that has so many more is named; after the last, or no one."""
_CAME_BACK = 0.25
"""What fell back to within this share of its growth was no leak."""


@dataclass(frozen=True, slots=True)
class Leak:
    """Memory that grows with the steps, surely."""

    device: int
    bytes_per_step: float
    lower_bytes_per_step: float
    """It is less by a chance of three in a million."""
    upper_bytes_per_step: float
    steps: int
    """How long it was looked at before it was sure."""
    leaked_bytes: int
    """In that time."""
    suspects: tuple[str, ...] = ()
    """Kinds of tensors that became more, and who holds them; the likeliest culprit first."""
    frames: tuple[str, ...] = ()
    """Where they were allocated, if the allocator's history is recorded."""
    steps_left: int | None = None
    """Until the device is full, at this rate."""

    def __str__(self) -> str:
        left = (
            f"; at this rate cuda:{self.device} is full in {self.steps_left} steps"
            if self.steps_left is not None
            else ""
        )
        suspects = "".join(f"\n  {suspect}" for suspect in self.suspects)
        frames = "".join(f"\n  {frame}" for frame in self.frames)
        none = "" if self.suspects else "\n  no kind of tensors that Python holds became more"
        return (
            f"a leak: cuda:{self.device} holds {human_bytes(round(self.bytes_per_step))} more after each step"
            f" ({human_bytes(self.leaked_bytes)} in {self.steps} steps){left}{none}{suspects}{frames}"
        )


class LeakDetector:
    """Looks at what is allocated at the same point of each step. `leak_detector` makes one.

    One thread at a time: the one that trains.

    Args:
        on_leak: called once for each leak, with it.
        warm_up_steps: steps at the start that tell nothing.
        least_growth: growth over the time looked at that is worth telling, in bytes.
        name_suspects: walk over the live tensors when a leak is sure.
    """

    def __init__(
        self,
        on_leak: Callable[[Leak], None],
        *,
        warm_up_steps: int = 20,
        least_growth: int = 1 << 20,
        name_suspects: bool = True,
    ) -> None:
        self._on_leak = on_leak
        self._warm_up_steps = warm_up_steps
        self._least_growth = least_growth
        self._name_suspects = name_suspects
        self._statistics: Statistics | None = None
        self._watched: dict[int, _Watched] = {}
        self._step = OneStep()
        self._stop: Callable[[], None] = lambda: None
        self._steps = 0

    @property
    def steps(self) -> int:
        """How many it has looked at."""
        return self._steps

    @property
    def leaks(self) -> tuple[Leak, ...]:
        """What it is sure of now, at most one for each device."""
        return tuple(watched.leak for watched in list(self._watched.values()) if watched.leak is not None)

    def watch_steps(self) -> None:
        """Look after each step of an optimizer, or at each `client.step()`."""
        self._stop()
        self._stop = process_steps().listen(self._stepped)
        _live.add(self)

    def stop(self) -> None:
        """Look no more."""
        self._stop()
        self._stop = lambda: None
        _live.discard(self)

    def look(self) -> tuple[Leak, ...]:
        """Look now, where the program says so; from then on only there. Costs 15 µs a device. Returns `leaks`."""
        self._step.ends(None)
        self._look()
        return self.leaks

    def add(
        self, device: int, allocated_bytes: int, free_bytes: Callable[[], int | None] = lambda: None
    ) -> Leak | None:
        """Take one device's figure of one step. Returns a leak in the step in which it has become sure and named."""
        watched = self._watched.get(device)
        if watched is None:
            trend = Trend(warm_up_steps=self._warm_up_steps, least_growth=self._least_growth)
            watched = self._watched[device] = _Watched(device, trend)
        leak = watched.add(allocated_bytes, free_bytes, self._walk, self._frames)
        if leak is not None:
            self._on_leak(leak)
        return leak

    def __reduce__(self) -> tuple[Callable[[], LeakDetector], tuple[()]]:
        """What it is copied or pickled with, such as a trainer that keeps it, gets one that nobody tells of steps."""
        return _unwatched, ()

    def _stepped(self, optimizer: Any) -> None:
        if self._step.ends(optimizer):
            self._look()

    def _look(self) -> None:
        torch = initialised_torch()
        if torch is None:
            return
        if self._statistics is None:
            self._statistics = Statistics(torch)
        self._steps += 1
        for device in self._statistics.devices():
            state = self._statistics.state(device)
            if state is not None:
                allocated: int = state["allocated_bytes"]["all"]["current"]
                self.add(device, allocated, lambda device=device: _free(torch, device))  # type: ignore[misc]

    def _walk(self, only: Collection[Kind] | None = None) -> LingeringTensors | None:
        """Count all kinds, or find out who holds some."""
        torch = initialised_torch()
        if torch is None or not self._name_suspects:
            return None
        referrers = only is not None
        return walk(torch, 0, _WALK_GROUPS, _WALK_SECONDS, _WALK_OBJECTS, referrers=referrers, only=only)

    def _frames(self, found: tuple[Growth, ...]) -> tuple[str, ...]:
        torch = initialised_torch()
        sizes = {growth.group.bytes // growth.group.count for growth in found if growth.group.count}
        return allocating_frames(torch, sizes) if torch is not None else ()


class _Watched:
    """One device."""

    def __init__(self, device: int, trend: Trend) -> None:
        self.leak: Leak | None = None
        self._device = device
        self._trend = trend
        self._sure: Slope | None = None
        self._before: LingeringTensors | None = None
        self._steps_since = 0
        self._floor = 0.0

    def add(
        self,
        allocated: int,
        free_bytes: Callable[[], int | None],
        look_around: Callable[..., LingeringTensors | None],
        frames: Callable[[tuple[Growth, ...]], tuple[str, ...]],
    ) -> Leak | None:
        slope = self._trend.add(allocated)
        if self._sure is not None:
            if allocated < self._floor:  # it all came back
                self._sure = self.leak = self._before = None
                return None
            return self._name(free_bytes, look_around, frames) if self.leak is None else None
        if slope is not None:
            self._sure = slope
            self._floor = allocated - (1 - _CAME_BACK) * slope.grown
            self._before = look_around()
            self._steps_since = 0
            if self._before is None:
                return self._found(slope, free_bytes, (), ())
        return None

    def _name(
        self,
        free_bytes: Callable[[], int | None],
        look_around: Callable[..., LingeringTensors | None],
        frames: Callable[[tuple[Growth, ...]], tuple[str, ...]],
    ) -> Leak | None:
        self._steps_since += 1
        least = dict(_NAMING).get(self._steps_since)
        if least is None or self._sure is None or self._before is None:
            return None
        now = look_around()
        found = growing(self._before, now, least=least) if now is not None else ()
        if not found and self._steps_since < _NAMING[-1][0]:
            return None
        holders = look_around(worth_asking(found)) if found else None
        if holders is not None:
            found = held(found, holders)
        return self._found(self._sure, free_bytes, suspicions(found), frames(found))

    def _found(
        self, slope: Slope, free_bytes: Callable[[], int | None], suspects: tuple[str, ...], frames: tuple[str, ...]
    ) -> Leak:
        free = free_bytes()
        self._before = None
        self.leak = Leak(
            device=self._device,
            bytes_per_step=slope.slope,
            lower_bytes_per_step=slope.lower,
            upper_bytes_per_step=slope.upper,
            steps=slope.steps,
            leaked_bytes=slope.grown,
            suspects=suspects,
            frames=frames,
            steps_left=None if free is None else int(free / slope.slope),
        )
        return self.leak


_live: weakref.WeakSet[LeakDetector] = weakref.WeakSet()
"""Those that watch this process, so that an out-of-memory error can be told what they know."""


def known_leak(device: int) -> Leak | None:
    """What a detector of this process is sure of on a device."""
    return next((leak for detector in list(_live) for leak in detector.leaks if leak.device == device), None)


def leak_detector(
    *,
    on_leak: Callable[[Leak], None] | None = None,
    warm_up_steps: int = 20,
    least_growth: int = 1 << 20,
    name_suspects: bool = True,
) -> LeakDetector:
    """Watch for memory that grows from step to step, from now on; `stop()` ends it.

    It looks after each step of an optimizer (from torch 2.1 on), or at each `client.step()`, or where the program calls
    `look()`; at 15 µs a device, a millisecond or two every eighth step while memory rises. It is sure after about 130
    steps of a steady leak of one percent of the device in 1,000 steps, later of a slower one or where memory goes up
    and down by itself without a period, and not before: warm-up, spikes, a sawtooth and what only fills up are no leak.
    Then it walks over the live tensors, once, and twice some steps later, and names the kinds that became more and who
    holds them (`lingering_tensors` tells what that costs).
    Costs nothing where CUDA is not initialised.

    Args:
        on_leak: called once for each leak, in the program's thread; by default it is logged as a warning.
        warm_up_steps: steps at the start that tell nothing.
        least_growth: growth over the time looked at that is worth telling, in bytes.
        name_suspects: whether to walk.
    """
    detector = LeakDetector(
        on_leak or (lambda leak: log.warning("%s", leak)),
        warm_up_steps=warm_up_steps,
        least_growth=least_growth,
        name_suspects=name_suspects,
    )
    detector.watch_steps()
    return detector


def _unwatched() -> LeakDetector:
    return LeakDetector(lambda leak: log.warning("%s", leak))


def _free(torch: Any, device: int) -> int | None:
    try:
        return int(torch.cuda.cudart().cudaMemGetInfo(device)[0])
    except RuntimeError:
        return None
