"""Counts the bytes of a model and its optimizer a little at a time.

A walk over ten thousand tensors takes some milliseconds of Python, more than a step should wait. So it is done in
slices, each at the end of a step: there, every step leaves the same things behind. Between two slices it holds weak
references alone, so that it keeps no tensor, module or optimizer alive.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from gpumem_exporter.client._tensor_bytes import Storages, own_bytes

__all__ = ["COMPONENTS", "ComponentWalk"]

COMPONENTS = ("parameters", "gradients", "optimizer_state")

_CHUNK = 64
"""Parameters, or states of as many, between two looks at the clock."""
_NESTING_MAX = 4


class ComponentWalk:
    """One count. One thread at a time.

    Args:
        torch: the program's.
        model: a module, or none.
        optimizer: what has `state` and `param_groups`, or none.
        clock: seconds.
    """

    def __init__(
        self,
        torch: Any,
        model: weakref.ref[Any] | None,
        optimizer: weakref.ref[Any] | None,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._torch = torch
        self._model = model
        self._optimizer = optimizer
        self._clock = clock
        self._references: list[weakref.ref[Any]] = []
        self._seen: set[int] = set()
        self._parameters = Storages(torch)
        self._states = Storages(torch)
        self._gradients: dict[int, int] = {}
        self._work = self._all()

    def bytes(self) -> Mapping[int, Mapping[str, int]]:
        """By device index (`HOST` for the host's memory) and component, once all is counted."""
        counted = self._parameters.bytes(), self._gradients, self._states.bytes(self._parameters)
        return {
            device: {name: told.get(device, 0) for name, told in zip(COMPONENTS, counted, strict=True)}
            for device in {*counted[0], *counted[1], *counted[2]}
        }

    def go_on(self, seconds: float) -> bool:
        """Count for about that long; True once all is counted."""
        end = self._clock() + seconds
        return all(self._clock() < end for _ in self._work)

    def _all(self) -> Iterator[None]:
        # No local variable of these generators may refer to a tensor, a module or a dictionary of them at a `yield`.
        yield from self._modules()
        yield from self._groups()
        for start in range(0, len(self._references), _CHUNK):
            self._count_parameters(start)
            yield
        for start in range(0, len(self._references), _CHUNK):
            self._count_gradients(start)
            yield
        start = 0
        while self._count_states(start):
            start += _CHUNK
            yield

    def _modules(self) -> Iterator[None]:
        if self._model is None:
            return
        stack: list[weakref.ref[Any]] = [self._model]
        visited: set[int] = set()
        count = 0
        while stack:
            stack += self._module(stack.pop()(), visited)
            count += 1
            if count % _CHUNK == 0:
                yield

    def _module(self, module: Any, visited: set[int]) -> list[weakref.ref[Any]]:
        """Take a module's own parameters down; returns its children."""
        if module is None or id(module) in visited:
            return []
        visited.add(id(module))
        if module._parameters:
            self._take([parameter for parameter in module._parameters.values() if parameter is not None])
        return [weakref.ref(child) for child in module._modules.values() if child is not None]

    def _groups(self) -> Iterator[None]:
        """What the optimizer updates beside the model's parameters: another module's, or copies in full precision."""
        group = start = 0
        while (more := self._group(group, start)) is not None:
            group, start = (group, start + _CHUNK) if more else (group + 1, 0)
            yield

    def _group(self, group: int, start: int) -> bool | None:
        """Whether there may be more in that group; None where there is no such group."""
        optimizer = self._optimizer() if self._optimizer is not None else None
        groups = getattr(optimizer, "param_groups", None) or ()
        if group >= len(groups):
            return None
        found = list(islice(groups[group]["params"], start, start + _CHUNK))
        self._take(found)
        return bool(found)

    def _take(self, parameters: Iterable[Any]) -> None:
        for parameter in parameters:
            if id(parameter) not in self._seen:
                self._seen.add(id(parameter))
                self._references.append(weakref.ref(parameter))

    def _of(self, start: int) -> list[Any]:
        found = [reference() for reference in self._references[start : start + _CHUNK]]
        return [parameter for parameter in found if parameter is not None]

    def _count_parameters(self, start: int) -> None:
        self._parameters.add(self._of(start))

    def _count_gradients(self, start: int) -> None:
        gradients = [parameter.grad for parameter in self._of(start) if parameter.is_leaf]
        told = own_bytes([gradient for gradient in gradients if gradient is not None], self._torch)
        for device, nbytes in told.items():
            self._gradients[device] = self._gradients.get(device, 0) + nbytes

    def _count_states(self, start: int) -> bool:
        """Whether there were any from there on. The states are found by their place: that needs no reference."""
        optimizer = self._optimizer() if self._optimizer is not None else None
        states = list(islice((getattr(optimizer, "state", None) or {}).values(), start, start + _CHUNK))
        tensors: list[Any] = []
        self._gather(states, tensors, 0)
        self._states.add(tensors)
        return bool(states)

    def _gather(self, values: Iterable[Any], tensors: list[Any], depth: int) -> None:
        tensor = self._torch.Tensor
        for value in values:
            if isinstance(value, tensor):
                tensors.append(value)
            elif depth < _NESTING_MAX:
                if isinstance(value, dict):
                    self._gather(value.values(), tensors, depth + 1)
                elif isinstance(value, (list, tuple)):
                    self._gather(value, tensors, depth + 1)
