"""Where a training script's memory goes before and between its steps: a short list, taken down by hooks."""

from __future__ import annotations

import logging
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from gpumem_exporter.client.allocator.statistics import Statistics, initialised_torch
from gpumem_exporter.client.allocator.torch_access import without_torch_function
from gpumem_exporter.client.hooks.guest_safety import raised_by_signal_handler
from gpumem_exporter.client.hooks.model_forward import before_forwards
from gpumem_exporter.client.hooks.steps import Steps, process_steps
from gpumem_exporter.client.log import log
from gpumem_exporter.client.measure.observed import Observed, process_observed
from gpumem_exporter.client.sizes import human_bytes, human_growth

__all__ = ["DeviceMilestone", "Milestone", "Milestones", "milestones"]

_Item = TypeVar("_Item")

_KEPT = 1000
_FORWARDS = 10
"""A model that is still on the host at this forward is not waited for any longer."""


@dataclass(frozen=True, slots=True)
class DeviceMilestone:
    """One device's allocator at a milestone."""

    index: int
    allocated_bytes: int
    reserved_bytes: int
    peak_bytes: int
    """Of the allocated bytes, since whoever last reset it."""
    growth_bytes: int
    """Allocated now and not at the milestone before."""


@dataclass(frozen=True, slots=True)
class Milestone:
    """A moment of the program; without devices where CUDA was not initialised."""

    name: str
    seconds: float
    """Since the first one."""
    devices: tuple[DeviceMilestone, ...]

    def __str__(self) -> str:
        told = "; ".join(
            f"cuda:{device.index} allocated {human_bytes(device.allocated_bytes)}"
            f" ({human_growth(device.growth_bytes)}), peak {human_bytes(device.peak_bytes)}"
            f", reserved {human_bytes(device.reserved_bytes)}"
            for device in self.devices
        )
        return f"{self.name}: {told or 'no CUDA'}"


class Milestones:
    """Takes down and logs what is allocated at the milestones of one training script. `milestones` makes one.

    Holds weak references alone. Any thread may call any method.

    Args:
        model: a module, or None.
        optimizer: an optimizer of `torch.optim`, or None for any.
        level: at which each is logged.
        observed: where peaks are known.
        steps: who tells of steps.
    """

    def __init__(
        self,
        model: Any = None,
        optimizer: Any = None,
        *,
        level: int = logging.INFO,
        observed: Observed | None = None,
        steps: Steps | None = None,
    ) -> None:
        self._observed = observed or process_observed()
        self._level = level
        self._begun_seconds = time.monotonic()
        self._records: deque[Milestone] = deque(maxlen=_KEPT)
        self._epochs = 0
        self._forwards = 0
        self._stop_forwards: Callable[[], None] = _nothing
        place = _place(model)
        self.record(" and ".join(filter(None, (place, "optimizer made" if optimizer is not None else ""))) or "begin")
        if model is not None:
            self._model = weakref.ref(model, lambda _: self.close())
            if not place:
                self._stop_forwards = before_forwards(self._look_at_forward)
        self._optimizer = None if optimizer is None else weakref.ref(optimizer)
        self._stop_listening = (steps or process_steps()).listen(self._on_step)

    @property
    def records(self) -> tuple[Milestone, ...]:
        """Those so far, oldest first; the last thousand."""
        return tuple(self._records)

    def record(self, name: str) -> Milestone:
        """A milestone of the program's own."""
        try:
            devices = self._devices()
        except Exception as error:  # a guest breaks nothing
            if raised_by_signal_handler(error):
                raise
            log.debug("nothing is known at %s: %r", name, error)
            devices = ()
        milestone = Milestone(name, time.monotonic() - self._begun_seconds, devices)
        self._records.append(milestone)
        log.log(self._level, "%s", milestone)
        return milestone

    def epoch(self) -> Milestone:
        """Record the start of an epoch; a trainer may call this as its callback."""
        self._epochs += 1
        return self.record(f"epoch {self._epochs}")

    def epochs(self, iterable: Iterable[_Item]) -> Iterator[_Item]:
        """Iterate over the epochs, not over their batches, and record the start of each: `seen.epochs(range(10))`."""
        for item in iterable:
            self.epoch()
            yield item
        self.record("end")

    def close(self) -> None:
        """End the milestones; the records stay. A hook on forward passes leaves torch at the next one."""
        self._stop_forwards()
        self._stop_listening()

    def __enter__(self) -> Milestones:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Callable[[], Milestones], tuple[()], tuple[Milestone, ...]]:
        """What it is copied or pickled with, such as a trainer that keeps it, gets one that is closed."""
        return _closed, (), self.records

    def __setstate__(self, records: tuple[Milestone, ...]) -> None:
        self._records = deque(records, maxlen=_KEPT)

    def __str__(self) -> str:
        return "\n".join(map(str, self._records))

    def _devices(self) -> tuple[DeviceMilestone, ...]:
        torch = initialised_torch()
        if torch is None:
            return ()
        before = {device.index: device.allocated_bytes for device in self._records[-1].devices} if self._records else {}
        statistics = Statistics(torch)
        found = []
        for index in statistics.devices():
            state = self._observed.look(index, statistics.state)
            if state is None:
                continue
            allocated, peak = (state["allocated_bytes"]["all"][figure] for figure in ("current", "peak"))
            found.append(
                DeviceMilestone(
                    index=index,
                    allocated_bytes=allocated,
                    reserved_bytes=state["reserved_bytes"]["all"]["current"],
                    peak_bytes=self._observed.lifted(index, "allocated_bytes", peak) or 0,
                    growth_bytes=allocated - before.get(index, 0),
                )
            )
        return tuple(found)

    def _look_at_forward(self, module: Any) -> bool:
        """Before each forward pass, until the model's first one on a device; whether there is more to wait for."""
        if module is not self._model():
            return True
        self._forwards += 1
        place = _place(module)
        if place:
            self.record(place)
        return not place and self._forwards < _FORWARDS

    def _on_step(self, optimizer: Any) -> None:
        watched = self._optimizer() if self._optimizer is not None else None
        if watched is not None and optimizer is not None and optimizer is not watched:
            return
        self._stop_listening()
        self._stop_forwards()  # a model that steps without it would have the hook called at every forward
        self.record("first optimizer step")


def milestones(model: Any = None, optimizer: Any = None, *, level: int = logging.INFO) -> Milestones:
    """Take down and log what is allocated at a training script's milestones.

    They are: now (and whether the model is on a device by now); the model's first forward on a device, if it moves
    there later; the first step of the optimizer, which makes its state; each epoch; and whatever the program names with
    `record`. Each has what has grown since the one before. `print()` shows the list; each is logged, too, by the logger
    `gpumem_exporter.client`.

    The script says where an epoch starts: `for epoch in seen.epochs(range(10))` around its loop, or a call of
    `seen.epoch()`, for example from a trainer's callback.

    The milestones hold weak references only and put no hook on the model or the optimizer themselves, so both can be
    copied and pickled. They end with the model, or with `close()`.

    Args:
        model: a module, wrapped or not.
        optimizer: one of `torch.optim`; without it the first step of any counts.
        level: at which each milestone is logged.
    """
    return Milestones(model, optimizer, level=level)


def _nothing() -> None:
    """Stands for a hook that there is not."""


def _closed() -> Milestones:
    closed = Milestones(level=logging.NOTSET, steps=Steps())
    closed.close()
    return closed


def _place(model: Any) -> str:
    """`model on cuda:0`, by its first parameter on a device; empty while there is none."""
    torch = sys.modules.get("torch")
    if model is None or torch is None:
        return ""
    with without_torch_function(torch):  # a mode that the program has on is for its own calls
        device = next((parameter.device for parameter in model.parameters() if parameter.is_cuda), None)
    return "" if device is None else f"model on {device}"
