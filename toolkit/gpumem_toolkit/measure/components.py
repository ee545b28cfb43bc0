"""`watch`: splits allocated bytes into parameters, gradients, optimizer state and the rest."""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gpumem_client.allocator.reclaimable import known
from gpumem_client.hooks.steps import OneStep, Steps, process_steps
from gpumem_client.phases.observed import Observed, WatchedBytes, process_observed
from gpumem_client.torch_access import Statistics, initialized_torch, without_torch_function
from gpumem_client.wire.units import ShownAsText, human_bytes
from gpumem_toolkit.measure.tensor_bytes import HOST, Storages, bytes_of_unshared, tensors_in

_nothing: Callable[[], None] = lambda: None  # noqa: E731
COMPONENTS = ("parameters", "gradients", "optimizer_state")

_INTERVAL_SECONDS = 10.0
# A count that takes long runs less often: its cost is a thousandth of the time at most.
_COST_RATIO = 1000
_WRAPPER_ATTRIBUTES = ("module", "_orig_mod", "_fsdp_wrapped_module")
_WRAPPERS_MAX = 4
# A count is valid for this time, and for three times the time between the last two counts, as in a job with long steps.
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

    Has weak references only. A count runs in the thread that ends a step; only that thread may call `look`.
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
        self._model: Callable[[], Any] = _nothing if model is None else weakref.ref(model, self._on_deleted)
        inner = inner_optimizer(optimizer)
        self._optimizer: Callable[[], Any] = _nothing if inner is None else weakref.ref(inner, self._on_deleted)
        self._counting = threading.Lock()
        self._step = OneStep()
        self._optimizer_reports_steps = False
        self._counted_seconds: float | None = None
        self._due_seconds = float("-inf")
        self._latest: tuple[ComponentBytes, ...] = ()
        self._closed = False
        self._stop_listening = (steps or process_steps()).listen(self._on_step)

    @property
    def latest(self) -> tuple[ComponentBytes, ...]:
        """The last complete count: each device, then host memory. Empty before the first count and without CUDA."""
        return self._latest

    def look(self) -> tuple[ComponentBytes, ...]:
        """Count now, at about one microsecond per tensor. Empty without CUDA.

        Call it in the thread that trains: it reads gradients. To count them, call it before `zero_grad()`.
        """
        torch = initialized_torch()
        if torch is None or self._closed:
            return ()
        with self._counting:  # a step in another thread does not count meanwhile
            self._count(torch)
        return self._latest

    def close(self) -> None:
        """Stop counting, and withdraw the last count from the reports."""
        self._closed = True
        self._stop_listening()
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
        if not self._counts_after(optimizer) or self._clock() < self._due_seconds:
            return
        torch = initialized_torch()
        if torch is not None and self._counting.acquire(blocking=False):
            try:
                self._count(torch)
            finally:
                self._counting.release()

    def _counts_after(self, optimizer: Any) -> bool:
        """Whether this is the end of a step at which to count; `optimizer` is None for a mark of the user's code."""
        # All counts are at the same point of a step: at another point, gradients may be released.
        watched = self._optimizer()
        if watched is None:
            return self._step.ends(optimizer)
        self._optimizer_reports_steps = self._optimizer_reports_steps or optimizer is watched
        return optimizer is (watched if self._optimizer_reports_steps else None)

    def _count(self, torch: Any) -> None:
        now, started = self._clock(), time.perf_counter()
        between = 0.0 if self._counted_seconds is None else now - self._counted_seconds
        with without_torch_function(torch):  # active modes of the user's code must not see the count
            counted = count_components(torch, self._model(), self._optimizer())
        self._counted_seconds = now
        self._due_seconds = now + max(_INTERVAL_SECONDS, _COST_RATIO * (time.perf_counter() - started))
        statistics = Statistics(torch)
        allocated = {index: known(statistics.state(index), "allocated_bytes") for index in statistics.devices()}
        self._observed.set_components(
            self,
            WatchedBytes(
                {index: (components, allocated.get(index)) for index, components in counted.items() if index != HOST},
                time.monotonic() + max(_VALID_SECONDS, 3 * between, 2 * (self._due_seconds - now)),
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
        both = _inner_model(self._model()), self._optimizer()
        return frozenset(id(one) for one in both if one is not None)


def watch(model: Any, optimizer: Any = None) -> Watch:
    """Count the bytes of a model's parameters, gradients and optimizer state on each device.

    The result is in the reports (`gpumem_torch_component_bytes`), in `memory_summary()` and in the returned object. A
    count runs in the training thread at the end of a step, every ten seconds at most, and takes about one microsecond
    per tensor; a long count runs less often, for a thousandth of the time. Where PyTorch does not report the steps
    (before torch 2.1, or for another kind of optimizer) it runs at `gpumem_client.step()`.

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


def count_components(torch: Any, model: Any, optimizer: Any) -> Mapping[int, Mapping[str, int]]:
    """Count a module, and an object with `state` and `param_groups`: bytes by device index (or `HOST`) and component.

    Keeps no reference: `torch.utils.swap_tensors` raises even for a tensor with a weak reference.
    """
    modules: dict[int, Any] = {}
    waiting = [model]
    while waiting:
        module = waiting.pop()
        if module is not None and id(module) not in modules:
            modules[id(module)] = module
            waiting += getattr(module, "_modules", {}).values()
    found = [each for module in modules.values() for each in getattr(module, "_parameters", {}).values()]
    for group in getattr(optimizer, "param_groups", None) or ():
        found += group["params"]
    parameters = list({id(each): each for each in found if each is not None}.values())
    # PyTorch warns if a program reads the gradient of a tensor that is not a leaf.
    gradients = [each.grad for each in parameters if each.is_leaf and each.grad is not None]
    states = list((getattr(optimizer, "state", None) or {}).values())
    storages = Storages(torch, parameters)
    by_component = (
        storages.bytes(),
        bytes_of_unshared(gradients, torch),
        Storages(torch, tensors_in(states, torch)).bytes(storages),
    )
    return {
        device: {name: counted.get(device, 0) for name, counted in zip(COMPONENTS, by_component, strict=True)}
        for device in set().union(*by_component)
    }
