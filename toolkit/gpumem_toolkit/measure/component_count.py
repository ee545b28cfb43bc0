"""Counts the bytes of a model and its optimizer in short slices.

A count of ten thousand tensors would delay a training step too long. So it runs in slices, one at the end of each step,
when the same objects exist. Between two slices it has weak references to modules only, and none to a tensor:
`torch.utils.swap_tensors` raises for a tensor with weak references.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from gpumem_client.torch_access import without_torch_function
from gpumem_toolkit.measure.tensor_bytes import Storages, bytes_of_unshared, tensors_in

COMPONENTS = ("parameters", "gradients", "optimizer_state")

_CHUNK = 64
"""The number of parameters or states that are counted between two readings of the clock."""


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
        # At a `yield`, no local variable may refer to a tensor, a module or a dictionary of them.
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
