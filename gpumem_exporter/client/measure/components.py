"""What the allocated bytes are for: parameters, gradients, optimizer state, and the rest."""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gpumem_exporter.client.allocator.statistics import Statistics, initialised_torch
from gpumem_exporter.client.hooks.steps import OneStep, Steps, process_steps
from gpumem_exporter.client.measure.component_walk import COMPONENTS, ComponentWalk
from gpumem_exporter.client.measure.observed import Observed, ToldComponents, process_observed
from gpumem_exporter.client.measure.portions import Portions
from gpumem_exporter.client.measure.tensor_bytes import HOST
from gpumem_exporter.client.sizes import human_bytes

__all__ = ["ComponentBytes", "Watch", "watch"]

_INTERVAL_SECONDS = 10.0
"""A count begins this long after the last one did, or later."""
_SLICE_SECONDS = 0.0005
"""How long a count keeps one step waiting."""
_WRAPPED = ("module", "_orig_mod", "_fsdp_wrapped_module")
_WRAPPERS_MAX = 4
_GOOD_INTERVALS = 6.0
"""A count is told until it is this many times the interval old, or the time between the last two."""


@dataclass(frozen=True, slots=True)
class ComponentBytes:
    """The bytes of one device by what they are for, or those in the host's memory."""

    index: int | None
    """The device's, None for the host's memory."""
    parameters: int
    gradients: int
    optimizer_state: int
    other: int | None
    """The rest of what the allocator holds: activations, buffers, batches, its rounding. None where it is not known."""

    def __str__(self) -> str:
        figures = ((name.replace("_", " "), getattr(self, name)) for name in (*COMPONENTS, "other"))
        told = ", ".join(f"{name} {human_bytes(value)}" for name, value in figures if value is not None)
        return f"{'host' if self.index is None else f'cuda:{self.index}'} {told}"


class Watch:
    """Counts the bytes of one model and its optimizer, at steps, until the model is gone or `close` is called.

    Holds weak references alone. Any thread may call any method; a count runs in the thread that ends a step.

    Args:
        model: a module, or None.
        optimizer: one of `torch.optim`, something round one, anything with `state` and `param_groups`, or None.
        interval_seconds: between two counts at least.
        observed: where it is told.
        steps: who tells of steps.
        clock: monotonic seconds.

    Raises:
        TypeError: the model is no module.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        *,
        interval_seconds: float = _INTERVAL_SECONDS,
        observed: Observed | None = None,
        steps: Steps | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if model is not None and not (hasattr(model, "_parameters") and hasattr(model, "_modules")):
            raise TypeError(f"a {type(model).__name__} is watched; it has to be a torch.nn.Module, or None")
        self._observed = observed or process_observed()
        self._interval_seconds = interval_seconds
        self._clock = clock
        self._model = None if model is None else weakref.ref(model, self._gone)
        inner = _inner_optimizer(optimizer)
        self._optimizer = None if inner is None else weakref.ref(inner, self._gone)
        self._busy = threading.Lock()
        self._step = OneStep()
        self._tells = False
        self._place = 0
        self._walk: ComponentWalk | None = None
        self._portions: Portions | None = None
        self._begun_seconds = float("-inf")
        self._apart_seconds = 0.0
        self._latest: tuple[ComponentBytes, ...] = ()
        self._closed = False
        self._stop = (steps or process_steps()).listen(self._on_step)

    @property
    def latest(self) -> tuple[ComponentBytes, ...]:
        """The last whole count: each device, then the host's memory; empty before the first, and without CUDA."""
        return self._latest

    def look(self) -> tuple[ComponentBytes, ...]:
        """Count all of it now, in this thread. Empty without CUDA.

        That takes a microsecond a tensor the first time, and a third of that later, where most is as it was. Call it
        where gradients are there, if they are to be counted: before `zero_grad()`.
        """
        torch = initialised_torch()
        if torch is None or self._closed:
            return ()
        with self._busy:
            walk = self._begin(torch, self._clock())
            walk.go_on(float("inf"))
            self._finish(torch, walk)
        return self._latest

    def close(self) -> None:
        """Watch no more; what was told is told no more."""
        self._closed = True
        self._stop()
        self._walk = self._portions = None
        self._observed.tell_components(self, None)

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Callable[[], Watch], tuple[()]]:
        """What it is copied or pickled with, such as a model that has it as an attribute, gets one that is closed."""
        return _closed, ()

    def __str__(self) -> str:
        return "\n".join(map(str, self._latest)) or "no CUDA, or no step yet"

    def _gone(self, _: weakref.ref[Any]) -> None:
        """The model or its optimizer is no more: what was counted is freed."""
        self.close()

    def _on_step(self, optimizer: Any) -> None:
        if not self._counts_after(optimizer):
            return
        now = self._clock()
        if self._walk is None and now - self._begun_seconds < self._interval_seconds:
            return
        torch = initialised_torch()
        if torch is None or not self._busy.acquire(blocking=False):
            return
        try:
            if self._walk is None or self._place != id(optimizer):
                self._place = id(optimizer)
                walk = self._begin(torch, now)
            else:
                walk = self._walk
            if walk.go_on(_SLICE_SECONDS):
                self._finish(torch, walk)
        finally:
            self._busy.release()

    def _counts_after(self, optimizer: Any) -> bool:
        """Whether slices are made there; None for the program's mark.

        They are made at one place of a step: where it is marked, gradients may have gone that the optimizer saw.
        """
        watched = self._optimizer() if self._optimizer is not None else None
        if watched is None:
            return self._step.ends(optimizer)
        self._tells = self._tells or optimizer is watched
        return optimizer is (watched if self._tells else None)

    def _watched(self) -> frozenset[int]:
        """The identities of the model, of whatever it is wrapped in, and of the optimizer."""
        model = self._model() if self._model is not None else None
        optimizer = self._optimizer() if self._optimizer is not None else None
        return frozenset(id(one) for one in (_inner_model(model), optimizer) if one is not None)

    def _begin(self, torch: Any, now: float) -> ComponentWalk:
        if self._begun_seconds != float("-inf"):
            self._apart_seconds = now - self._begun_seconds
        self._begun_seconds = now
        # by local names: whoever closes it takes away the others, at any time
        portions = self._portions = self._portions or Portions(torch)
        walk = self._walk = ComponentWalk(torch, self._model, self._optimizer, portions)
        return walk

    def _finish(self, torch: Any, walk: ComponentWalk) -> None:
        self._walk = None
        counted = walk.bytes()
        statistics = Statistics(torch)
        allocated: dict[int, int | None] = {}
        for index in statistics.devices():
            state = statistics.state(index)
            allocated[index] = None if state is None else state["allocated_bytes"]["all"]["current"]
        told = {index: (components, allocated.get(index)) for index, components in counted.items() if index != HOST}
        good_seconds = max(_GOOD_INTERVALS * self._interval_seconds, 3 * self._apart_seconds)
        self._observed.tell_components(self, ToldComponents(told, time.monotonic() + good_seconds, self._watched()))
        if self._closed:  # meanwhile: what it told before that was taken back, and this was not
            self._observed.tell_components(self, None)
            return
        devices = sorted({*allocated, *counted} - {HOST})
        self._latest = tuple(
            _told(index, counted.get(index, {}), allocated.get(index))
            for index in (*devices, *([HOST] if HOST in counted else []))
        )


def watch(model: Any, optimizer: Any = None) -> Watch:
    """Have the bytes of a model's parameters, gradients and optimizer state counted, for each device.

    They are in the reports (`gpumem_torch_component_bytes`), in `summary()` and in what this returns. The count is made
    in the training thread at the end of a step of that optimizer (at `gpumem.step()` where it tells of none: before
    torch 2.1, or where it is not one of `torch.optim`), at most every ten seconds, in slices of half a millisecond: at
    ten thousand tensors some twenty steps make the first count, and some ten a later one. A later one sees for each
    parameter and state that it still lies where it lay, and measures what does not, and gradients, which come and go.
    No tensor is left out of that: whatever has been done to one, the count is right.

    Counted are storages, each once: tied weights, views into a flat buffer and parts of buckets do not count twice. Of
    a `DTensor` (FSDP2) it is the local shard, of a quantised tensor its parts, of a state in 8 bits its bytes as they
    are. What is offloaded to the host's memory is counted apart and not reported. What the optimizer updates beside the
    model's parameters (copies in full precision, a second model) counts as parameters. `other` is the rest of what the
    allocator has handed out at the step's end: activations that are kept, buffers, batches, gathered parameters, the
    buckets of `DistributedDataParallel` where gradients are no views into them, and the allocator's rounding.

    Several models and optimizers may be watched: their bytes add up. Of watches with the same model or optimizer one is
    told.

    Weak references only; no hook on the model. It ends with the model or the optimizer, or with `close()`. Does nothing
    as long as CUDA is not initialised.

    Args:
        model: a module, wrapped or not; None for what the optimizer updates alone.
        optimizer: one of `torch.optim`, something that a library has put round one, or anything with `state` and
            `param_groups`.

    Raises:
        TypeError: the model is no module.
    """
    return Watch(model, optimizer)


def _inner_model(model: Any) -> Any:
    """The program's own module in DataParallel, DistributedDataParallel, FSDP1 or what torch.compile makes."""
    for _ in range(_WRAPPERS_MAX):
        modules = getattr(model, "_modules", {})
        wrapped = modules.keys() & _WRAPPED
        if len(modules) != 1 or not wrapped:
            break
        model = modules[wrapped.pop()]
    return model


def _closed() -> Watch:
    closed = Watch(None, None, steps=Steps())
    closed.close()
    return closed


def _inner_optimizer(optimizer: Any) -> Any:
    """The optimizer of `torch.optim` inside whatever a library has put round it; it alone tells of its steps."""
    base = getattr(sys.modules.get("torch.optim.optimizer"), "Optimizer", None)
    inner, depth = optimizer, 0
    while inner is not None and base is not None and not isinstance(inner, base) and depth < 4:
        inner, depth = getattr(inner, "optimizer", None) or getattr(inner, "optim", None), depth + 1
    return inner if base is not None and isinstance(inner, base) else optimizer


def _told(index: int, components: Mapping[str, int], allocated: int | None) -> ComponentBytes:
    rest = None if allocated is None else allocated - sum(components.values())
    return ComponentBytes(
        index=None if index == HOST else index,
        parameters=components.get("parameters", 0),
        gradients=components.get("gradients", 0),
        optimizer_state=components.get("optimizer_state", 0),
        other=rest if rest is not None and rest >= 0 else None,
    )
