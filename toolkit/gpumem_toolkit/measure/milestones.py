"""`milestones`: records allocated memory when the model moves to the device, at the first step, and at each epoch."""

from __future__ import annotations

import logging
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from gpumem_client.guest_safety import guest_safety, log
from gpumem_client.hooks.steps import Steps, process_steps
from gpumem_client.phases.observed import process_observed
from gpumem_client.torch_access import process_statistics, without_torch_function
from gpumem_client.wire.units import ShownAsText, human_bytes, human_growth
from gpumem_toolkit.measure.components import inner_optimizer

_Item = TypeVar("_Item")

_KEPT = 1000
# After this number of forward calls on the host, the hook is removed: it costs each module of the process a call.
_FORWARDS = 10


@dataclass(frozen=True, slots=True)
class DeviceMilestone:
    """One device's allocator at a milestone."""

    index: int
    allocated_bytes: int
    reserved_bytes: int
    peak_bytes: int
    """Peak of the allocated bytes since the last reset by the user's code."""
    growth_bytes: int
    """Allocated bytes minus those at the previous milestone."""


@dataclass(frozen=True, slots=True)
class Milestone(ShownAsText):
    """Memory at one point of the training script. There are no devices before CUDA is initialized."""

    name: str
    seconds: float
    """Seconds since the first milestone."""
    devices: tuple[DeviceMilestone, ...]

    def __str__(self) -> str:
        devices = "; ".join(
            f"cuda:{device.index} allocated {human_bytes(device.allocated_bytes)}"
            f" ({human_growth(device.growth_bytes)}), peak {human_bytes(device.peak_bytes)}"
            f", reserved {human_bytes(device.reserved_bytes)}"
            for device in self.devices
        )
        return f"{self.name}: {devices or 'no CUDA'}"


class Milestones(ShownAsText):
    """Records and logs the memory at the milestones of a training script. `milestones` creates it.

    Any thread may call any method.
    """

    def __init__(
        self, model: Any = None, optimizer: Any = None, *, level: int = logging.INFO, steps: Steps | None = None
    ) -> None:
        self._observed = process_observed()
        self._level = level
        self._started_seconds = time.monotonic()
        self._records: deque[Milestone] = deque(maxlen=_KEPT)
        self._epochs = 0
        self._forwards = 0
        self._stop_forwards: Callable[[], None] = lambda: None
        # The model until it is on a device.
        self._on_host: weakref.ref[Any] | None = None
        location = _location(model)
        self._record(
            " and ".join(filter(None, (location, "optimizer created" if optimizer is not None else ""))) or "start"
        )
        if model is not None:
            self._model = weakref.ref(model, lambda _: self.close())
            if not location:
                self._on_host = self._model
                self._stop_forwards = before_forwards(self._look_at_forward)
        self._optimizer = None if optimizer is None else weakref.ref(inner_optimizer(optimizer))
        self._stop_listening = (steps or process_steps()).listen(self._on_step)

    @property
    def records(self) -> tuple[Milestone, ...]:
        """The last 1,000 milestones, the oldest first."""
        return tuple(self._records)

    def record(self, name: str) -> Milestone:
        """Record and log a milestone, and before it the move of the model to a device, if that is new."""
        with guest_safety(lambda error: log.debug("the device of the model is not known: %r", error)):
            self._notice_move()
        return self._record(name)

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
        """Stop recording; the records stay."""
        self._stop_forwards()
        self._stop_listening()

    def __enter__(self) -> Milestones:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Callable[[], Milestones], tuple[()], tuple[Milestone, ...]]:
        """Make copies and pickles, for example of a trainer, contain closed milestones with the same records."""
        return _closed, (), self.records

    def __setstate__(self, records: tuple[Milestone, ...]) -> None:
        self._records = deque(records, maxlen=_KEPT)

    def __str__(self) -> str:
        return "\n".join(map(str, self._records))

    def _notice_move(self) -> None:
        model = self._on_host() if self._on_host is not None else None
        location = _location(model)
        if location:
            self._on_host = None
            self._record(location)

    def _record(self, name: str) -> Milestone:
        devices: tuple[DeviceMilestone, ...] = ()
        with guest_safety(lambda error: log.debug("no memory values for milestone %s: %r", name, error)):
            devices = self._devices()
        milestone = Milestone(name, time.monotonic() - self._started_seconds, devices)
        self._records.append(milestone)
        log.log(self._level, "%s", milestone)
        return milestone

    def _devices(self) -> tuple[DeviceMilestone, ...]:
        statistics = process_statistics()
        if statistics is None:
            return ()
        before = {device.index: device.allocated_bytes for device in self._records[-1].devices} if self._records else {}
        found = []
        for index in statistics.devices():
            state = self._observed.read(index, statistics.state)
            if state is None:
                continue
            allocated, peak = (state["allocated_bytes"][metric] for metric in ("current", "peak"))
            found.append(
                DeviceMilestone(
                    index=index,
                    allocated_bytes=allocated,
                    reserved_bytes=state["reserved_bytes"]["current"],
                    peak_bytes=self._observed.lifted(index, "allocated_bytes", peak) or 0,
                    growth_bytes=allocated - before.get(index, 0),
                )
            )
        return tuple(found)

    def _look_at_forward(self, module: Any) -> bool:
        """Record the model's first forward pass on a device; returns whether to wait for another one."""
        if module is not self._model():
            return True
        self._forwards += 1
        self._notice_move()
        return self._on_host is not None and self._forwards < _FORWARDS

    def _on_step(self, optimizer: Any) -> None:
        watched = self._optimizer() if self._optimizer is not None else None
        if watched is not None and optimizer is not None and optimizer is not watched:
            return
        self._stop_listening()
        self._stop_forwards()  # the hook would stay for all later forward calls
        self.record("first optimizer step")


def milestones(model: Any = None, optimizer: Any = None, *, level: int = logging.INFO) -> Milestones:
    """Record and log the allocated memory at the milestones of a training script.

    The milestones are: this call; the model's move to a device, if the model is still on the host now; the first step
    of the optimizer, which creates its state; each epoch; and each call of `record`. Each shows the growth since the
    previous milestone. The move is recorded right before the next milestone, or at the model's first forward pass on
    the device. The logger `gpumem_client` logs each, at `level`.

    The script marks its epochs: `for epoch in seen.epochs(range(10))`, or a call of `seen.epoch()`. There are no hooks
    on the model or the optimizer; without an optimizer, the first step of any counts. The milestones end with the
    model, or with `close()`.
    """
    return Milestones(model, optimizer, level=level)


def _closed() -> Milestones:
    closed = Milestones(level=logging.NOTSET, steps=Steps())
    closed.close()
    return closed


def _location(model: Any) -> str:
    """Return `model on cuda:0`, by its first parameter on a device, or an empty string."""
    torch = sys.modules.get("torch")
    if model is None or torch is None:
        return ""
    with without_torch_function(torch):  # active modes of the user's code must not see the call
        device = next((parameter.device for parameter in model.parameters() if parameter.is_cuda), None)
    return "" if device is None else f"model on {device}"


def before_forwards(callback: Callable[[Any], bool]) -> Callable[[], None]:
    """Call `callback(module)` before each forward pass of any module, until it returns False.

    Returns a function that ends the calls; the hook leaves torch at the next forward pass.
    """
    # A hook on the model itself would be pickled with it.
    register = getattr(sys.modules.get("torch.nn.modules.module"), "register_module_forward_pre_hook", None)
    ended = False

    @guest_safety()
    def before(module: Any, _arguments: Any) -> None:
        nonlocal ended
        if ended or not callback(module):
            ended = True
            handle.remove()

    # Does not remove the hook: a garbage collection may call this while a forward pass copies the hooks, where a
    # removal would raise.
    def end() -> None:
        nonlocal ended
        ended = True

    handle: Any = None if register is None else register(before)
    return end
