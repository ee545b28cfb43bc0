"""`milestones`: logs allocated memory when the model is on the device, at the first step, and at each epoch."""

from __future__ import annotations

import logging
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from gpumem_client.guest_safety import guest_safety, log
from gpumem_client.hooks.steps import process_steps
from gpumem_client.phases.measured_block import DeviceUse
from gpumem_client.torch_access import process_statistics, without_torch_function
from gpumem_client.wire.units import ShownAsText
from gpumem_toolkit.measure.components import inner_optimizer

_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class Milestone(ShownAsText):
    """Memory at one point of the training script. There are no devices before CUDA is initialized."""

    name: str
    seconds: float
    """Seconds since the first milestone."""
    devices: tuple[DeviceUse, ...]
    """The use since the previous milestone. `peak_bytes` is the peak since the last reset."""

    def __str__(self) -> str:
        return f"{self.name}: {'; '.join(map(str, self.devices)) or 'no CUDA'}"


class Milestones(ShownAsText):
    """Records and logs the memory at the milestones of a training script. `milestones` creates it."""

    def __init__(self, level: int = logging.INFO, records: tuple[Milestone, ...] = ()) -> None:
        self.records = records
        """The milestones, the oldest first."""
        self.close: Callable[[], None] = lambda: None
        """Stops recording the first step; the records stay."""
        self._level, self._started_seconds = level, time.monotonic()

    def record(self, name: str) -> Milestone:
        """Record and log a milestone."""
        devices: list[DeviceUse] = []
        statistics = process_statistics()
        before = {each.index: each.after_bytes for each in self.records[-1].devices} if self.records else {}
        with guest_safety(lambda error: log.debug("no memory values for milestone %s: %r", name, error)):
            for index in () if statistics is None else statistics.devices():
                state = statistics.state(index) if statistics is not None else None
                if state is not None:
                    allocated = state["allocated_bytes"]
                    now, peak = allocated["current"], allocated["peak"]
                    devices.append(DeviceUse(index, before.get(index, 0), now, peak, peak))
        milestone = Milestone(name, time.monotonic() - self._started_seconds, tuple(devices))
        self.records = (*self.records, milestone)
        log.log(self._level, "%s", milestone)
        return milestone

    def epoch(self) -> Milestone:
        """Record the start of an epoch; a trainer may call this as its callback."""
        return self.record(f"epoch {1 + sum(each.name.startswith('epoch ') for each in self.records)}")

    def epochs(self, iterable: Iterable[_Item]) -> Iterator[_Item]:
        """Iterate over the epochs, not over their batches, and record the start of each: `seen.epochs(range(10))`."""
        for item in iterable:
            self.epoch()
            yield item
        self.record("end")

    def __enter__(self) -> Milestones:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Callable[..., Milestones], tuple[int, tuple[Milestone, ...]]]:
        """Make copies and pickles, for example of a trainer, contain closed milestones with the same records."""
        return Milestones, (self._level, self.records)

    def __str__(self) -> str:
        return "\n".join(map(str, self.records))


def milestones(model: Any = None, optimizer: Any = None, *, level: int = logging.INFO) -> Milestones:
    """Record and log the allocated memory at the milestones of a training script.

    The milestones are: this call, with the name of the model's device; the first step of the optimizer, which creates
    its state; each epoch; and each call of `record`. Each shows the growth since the previous milestone. The logger
    `gpumem_client` logs each, at `level`. Call it when the model is on its device.

    The script marks its epochs: `for epoch in seen.epochs(range(10))`, or a call of `seen.epoch()`. Nothing is hooked
    into the model; without an optimizer, the first step of any counts.
    """
    seen = Milestones(level)
    device = _device(model)
    parts = [f"model on {device}" if device is not None else "", "optimizer created" if optimizer is not None else ""]
    seen.record(" and ".join(filter(None, parts)) or "start")
    watched = None if optimizer is None else weakref.ref(inner_optimizer(optimizer))

    def stepped(stepping: Any) -> None:
        if watched is None or stepping is None or stepping is watched():
            seen.close()
            seen.record("first optimizer step")

    seen.close = process_steps().listen(stepped)
    return seen


def _device(model: Any) -> Any:
    torch = sys.modules.get("torch")
    if model is None or torch is None:
        return None
    with without_torch_function(torch):  # active modes of the user's code must not see the call
        return next((parameter.device for parameter in model.parameters()), None)
