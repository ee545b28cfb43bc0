"""`watch`: splits allocated bytes into parameters, gradients, optimizer state and the rest."""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from gpumem_client.allocator.reclaimable import known
from gpumem_client.hooks.steps import OneStep, Steps, process_steps
from gpumem_client.phases.observed import Observed, WatchedBytes, process_observed
from gpumem_client.torch_access import Statistics, initialized_torch, without_torch_function
from gpumem_client.wire.units import ShownAsText, human_bytes
from gpumem_toolkit.measure.tensor_bytes import HOST, Storages, bytes_of_unshared, tensors_in

COMPONENTS = ("parameters", "gradients", "optimizer_state")

_INTERVAL_SECONDS = 10.0
# Time that a count takes in one step.
_SLICE_SECONDS = 0.0005
# The number of parameters or states that are counted between two readings of the clock.
_CHUNK = 64
_WRAPPER_ATTRIBUTES = ("module", "_orig_mod", "_fsdp_wrapped_module")
_WRAPPERS_MAX = 4
# A count is valid for this time, and for three times the time between the last two counts: a job with long steps counts
# less often.
_VALID_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class ComponentBytes(ShownAsText):
    """The bytes of one device, or of host memory, by component."""

    index: int | None
    """The index of the device; None for host memory."""
    parameters: int
    gradients: int
    optimizer_state: int
    other: int | None
    """Other allocated bytes: activations, buffers, batches, rounding. None if unknown."""

    def __str__(self) -> str:
        values = ((name.replace("_", " "), getattr(self, name)) for name in (*COMPONENTS, "other"))
        place = "host" if self.index is None else f"cuda:{self.index}"
        return f"{place} " + ", ".join(f"{name} {human_bytes(value)}" for name, value in values if value is not None)


class Watch(ShownAsText):
    """Counts the bytes of one model and its optimizer, until one of them is deleted or `close` is called.

    Has weak references only. Any thread may call any method. A count runs in the thread that ends a step.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        *,
        observed: Observed | None = None,
        steps: Steps | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if model is not None and not (hasattr(model, "_parameters") and hasattr(model, "_modules")):
            raise TypeError(f"cannot watch a {type(model).__name__}: the model must be a torch.nn.Module or None")
        self._observed = observed or process_observed()
        self._clock = clock
        self._model = None if model is None else weakref.ref(model, self._on_deleted)
        inner = inner_optimizer(optimizer)
        self._optimizer = None if inner is None else weakref.ref(inner, self._on_deleted)
        self._counting = threading.Lock()
        self._step = OneStep()
        self._optimizer_reports_steps = False
        self._counted_after = 0
        self._count: ComponentCount | None = None
        self._started_seconds = float("-inf")
        self._between_starts_seconds = 0.0
        self._latest: tuple[ComponentBytes, ...] = ()
        self._closed = False
        self._stop_listening = (steps or process_steps()).listen(self._on_step)

    @property
    def latest(self) -> tuple[ComponentBytes, ...]:
        """The last complete count: each device, then host memory. Empty before the first count and without CUDA."""
        return self._latest

    def look(self) -> tuple[ComponentBytes, ...]:
        """Count now, in this thread, at about one microsecond per tensor. Empty without CUDA.

        To count gradients, call it before `zero_grad()`.
        """
        torch = initialized_torch()
        if torch is None or self._closed:
            return ()
        with self._counting:  # a step in another thread skips its slice meanwhile
            count = self._start(torch, self._clock())
            self._advance(torch, count, float("inf"))
        return self._latest

    def close(self) -> None:
        """Stop counting, and withdraw the last count from the reports."""
        self._closed = True
        self._stop_listening()
        self._count = None
        self._observed.set_components(self, None)

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Callable[[], Watch], tuple[()]]:
        """Copy or pickle as a closed watch, for example with the model that has it as an attribute."""
        return _closed_watch, ()

    def __str__(self) -> str:
        return "\n".join(map(str, self._latest)) or "no CUDA, or no step yet"

    def _on_deleted(self, _: weakref.ref[Any]) -> None:
        self.close()

    def _on_step(self, optimizer: Any) -> None:
        if not self._counts_after(optimizer):
            return
        now = self._clock()
        if self._count is None and now - self._started_seconds < _INTERVAL_SECONDS:
            return
        torch = initialized_torch()
        if torch is None or not self._counting.acquire(blocking=False):
            return
        try:
            count = self._count
            if count is None or self._counted_after != id(optimizer):
                self._counted_after = id(optimizer)
                count = self._start(torch, now)
            self._advance(torch, count, _SLICE_SECONDS)
        finally:
            self._counting.release()

    def _advance(self, torch: Any, count: ComponentCount, seconds: float) -> None:
        try:
            complete = count.advance(seconds)
        except BaseException:  # a count that Ctrl-C ends must not go on: it would seem complete
            self._count = None
            raise
        if complete:
            self._finish(torch, count)

    def _counts_after(self, optimizer: Any) -> bool:
        """Whether to count a slice at this end of a step; `optimizer` is None for a mark of the user's code."""
        # All slices are counted at the same point of a step: at another point, gradients may be released.
        watched = self._optimizer() if self._optimizer is not None else None
        if watched is None:
            return self._step.ends(optimizer)
        self._optimizer_reports_steps = self._optimizer_reports_steps or optimizer is watched
        return optimizer is (watched if self._optimizer_reports_steps else None)

    def _start(self, torch: Any, now: float) -> ComponentCount:
        if self._started_seconds != float("-inf"):
            self._between_starts_seconds = now - self._started_seconds
        self._started_seconds = now
        # The local name stays valid if `close` runs at the same time.
        count = self._count = ComponentCount(torch, self._model, self._optimizer)
        return count

    def _finish(self, torch: Any, count: ComponentCount) -> None:
        self._count = None
        counted = count.bytes()
        statistics = Statistics(torch)
        allocated = {index: known(statistics.state(index), "allocated_bytes") for index in statistics.devices()}
        valid_seconds = max(_VALID_SECONDS, 3 * self._between_starts_seconds)
        self._observed.set_components(
            self,
            WatchedBytes(
                {index: (components, allocated.get(index)) for index, components in counted.items() if index != HOST},
                time.monotonic() + valid_seconds,
                self._watched_ids(),
            ),
        )
        if self._closed:  # `close` ran in another thread before the count was set
            self._observed.set_components(self, None)
            return
        devices = [*sorted({*allocated, *counted} - {HOST}), *([HOST] if HOST in counted else [])]
        self._latest = tuple(_component_bytes(each, counted.get(each, {}), allocated.get(each)) for each in devices)

    def _watched_ids(self) -> frozenset[int]:
        """The ids of the innermost model and of the optimizer."""
        model = self._model() if self._model is not None else None
        optimizer = self._optimizer() if self._optimizer is not None else None
        return frozenset(id(one) for one in (_inner_model(model), optimizer) if one is not None)


def watch(model: Any, optimizer: Any = None) -> Watch:
    """Count the bytes of a model's parameters, gradients and optimizer state on each device.

    The result is in the reports (`gpumem_torch_component_bytes`), in `memory_summary()` and in the returned object. A
    count starts every ten seconds at most, and runs in the training thread at the end of steps, for half a millisecond
    each: some forty steps for ten thousand tensors. Where PyTorch does not report the steps (before torch 2.1, or for
    another kind of optimizer) it runs at `gpumem_client.step()`.

    Each storage counts once, also if tensors share it. A `DTensor` (FSDP2) counts with its local shard, a quantized
    tensor with its parts. Tensors that the optimizer updates and the model does not contain count as parameters.
    `other` is the rest of the allocated bytes at the end of the step: activations that are kept, buffers, batches,
    gathered parameters, communication buckets, and the allocator's rounding.

    Several watches add up. If several watches share a model or an optimizer, only one is counted: the watch that covers
    both, otherwise the most recent. The watch puts no hook on the model, and ends with it. It does nothing while CUDA
    is not initialized. Raises TypeError if the model is not a module.

    The model may be wrapped, and None counts only what the optimizer updates. The optimizer is one of `torch.optim`, a
    wrapper of one, or any object with `state` and `param_groups`.
    """
    return Watch(model, optimizer)


def _inner_model(model: Any) -> Any:
    """Return the module inside DataParallel, DistributedDataParallel, FSDP1 or a compiled module."""
    for _ in range(_WRAPPERS_MAX):
        modules = getattr(model, "_modules", {})
        wrapped = modules.keys() & _WRAPPER_ATTRIBUTES
        if len(modules) != 1 or not wrapped:
            break
        model = modules[wrapped.pop()]
    return model


def inner_optimizer(optimizer: Any) -> Any:
    """Return the optimizer of `torch.optim` inside wrappers of libraries, whose steps PyTorch reports."""
    base = getattr(sys.modules.get("torch.optim.optimizer"), "Optimizer", None)
    inner, depth = optimizer, 0
    while inner is not None and base is not None and not isinstance(inner, base) and depth < _WRAPPERS_MAX:
        inner, depth = getattr(inner, "optimizer", None) or getattr(inner, "optim", None), depth + 1
    return inner if base is not None and isinstance(inner, base) else optimizer


def _closed_watch() -> Watch:
    closed = Watch(None, None, steps=Steps())
    closed.close()
    return closed


def _component_bytes(index: int, components: Mapping[str, int], allocated: int | None) -> ComponentBytes:
    other = None if allocated is None else allocated - sum(components.values())
    return ComponentBytes(
        index=None if index == HOST else index,
        parameters=components.get("parameters", 0),
        gradients=components.get("gradients", 0),
        optimizer_state=components.get("optimizer_state", 0),
        other=other if other is not None and other >= 0 else None,
    )


class ComponentCount:
    """One count of a module, and of an object with `state` and `param_groups`. For one thread at a time."""

    def __init__(self, torch: Any, model: weakref.ref[Any] | None, optimizer: weakref.ref[Any] | None) -> None:
        self._torch = torch
        self._model = model
        self._optimizer = optimizer
        self._seen: set[int] = set()
        self._parameters = Storages(torch)
        self._gradients: dict[int, int] = {}
        self._states = Storages(torch)
        self._slices = self._count()

    def advance(self, seconds: float) -> bool:
        """Count for about `seconds`. Returns True when the count is complete."""
        end = time.perf_counter() + seconds
        with without_torch_function(self._torch):  # active modes of the user's code must not see the count
            return all(time.perf_counter() < end for _ in self._slices)

    def bytes(self) -> Mapping[int, Mapping[str, int]]:
        """Return bytes by device index (`HOST` for host memory) and component."""
        by_component = self._parameters.bytes(), self._gradients, self._states.bytes(self._parameters)
        return {
            device: {name: counted.get(device, 0) for name, counted in zip(COMPONENTS, by_component, strict=True)}
            for device in set().union(*by_component)
        }

    def _count(self) -> Iterator[None]:
        # A count of ten thousand tensors would delay a training step too long. So it runs in slices, one at the end of
        # each step, when the same objects exist. Between two slices it has weak references to modules only, and none to
        # a tensor: `torch.utils.swap_tensors` raises for a tensor with weak references. So at a `yield`, no local
        # variable may refer to a tensor, a module or a dictionary of them.
        waiting = [] if self._model is None else [self._model]
        while waiting:
            reference = waiting.pop()
            start = 0
            while self._count_module(reference, start):
                start += _CHUNK
                yield
            waiting += self._new_children(reference)
            yield
        for group in range(len(self._groups())):
            start = 0
            while self._count_group(group, start):
                start += _CHUNK
                yield
        start = 0
        while self._count_states(start):
            start += _CHUNK
            yield

    def _count_module(self, reference: weakref.ref[Any], start: int) -> bool:
        """Count some parameters of a module itself. Returns whether there may be more."""
        # Not from `parameters()`, whose generator would keep the model between two slices.
        parameters = getattr(reference(), "_parameters", {})
        self._count_parameters(islice(parameters.values(), start, start + _CHUNK))
        return len(parameters) > start + _CHUNK

    def _new_children(self, reference: weakref.ref[Any]) -> list[weakref.ref[Any]]:
        children = {
            id(child): child
            for child in getattr(reference(), "_modules", {}).values()
            if child is not None and id(child) not in self._seen
        }
        self._seen.update(children)
        return [weakref.ref(child) for child in children.values()]

    def _groups(self) -> list[Any]:
        optimizer = self._optimizer() if self._optimizer is not None else None
        return getattr(optimizer, "param_groups", None) or []

    def _count_group(self, group: int, start: int) -> bool:
        groups = self._groups()
        found = list(islice(groups[group]["params"], start, start + _CHUNK)) if group < len(groups) else []
        self._count_parameters(found)
        return bool(found)

    def _count_parameters(self, found: Iterable[Any]) -> None:
        new = {id(parameter): parameter for parameter in found if parameter is not None}
        parameters = [parameter for key, parameter in new.items() if key not in self._seen]
        self._seen.update(new)
        self._parameters.add(parameters)
        # PyTorch warns if a program reads the gradient of a tensor that is not a leaf.
        gradients = [parameter.grad for parameter in parameters if parameter.is_leaf and parameter.grad is not None]
        for device, size in bytes_of_unshared(gradients, self._torch).items():
            self._gradients[device] = self._gradients.get(device, 0) + size

    def _count_states(self, start: int) -> bool:
        optimizer = self._optimizer() if self._optimizer is not None else None
        states = getattr(optimizer, "state", None) or {}
        found = list(islice(states.values(), start, start + _CHUNK))
        self._states.add(tensors_in(found, self._torch))
        return bool(found)
