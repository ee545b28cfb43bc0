"""Counts the bytes of a model and its optimizer a little at a time.

A walk over ten thousand tensors takes some milliseconds, more than a step should wait. So it is done in slices, each
at the end of a step: there, every step leaves the same things behind. Between two slices it holds weak references
alone, so that it keeps no tensor, module or optimizer alive.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from itertools import compress, islice
from operator import attrgetter
from typing import Any

from gpumem_exporter.client.allocator.torch_access import without_torch_function
from gpumem_exporter.client.measure.model_structure import Structure, values_of
from gpumem_exporter.client.measure.portions import Portion, Portions
from gpumem_exporter.client.measure.tensor_bytes import own_bytes

__all__ = ["COMPONENTS", "ComponentWalk"]

COMPONENTS = ("parameters", "gradients", "optimizer_state")

_STATES_CHUNK = 64
"""The states of so many parameters are counted between two looks at the clock."""
_NESTING_MAX = 4

_grad = attrgetter("grad")
_is_leaf = attrgetter("is_leaf")


class ComponentWalk:
    """One count. One thread at a time.

    Args:
        torch: the program's.
        model: a module, or none.
        optimizer: what has `state` and `param_groups`, or none.
        portions: what earlier counts of the same have found, and this one will.
        clock: seconds.
    """

    def __init__(
        self,
        torch: Any,
        model: weakref.ref[Any] | None,
        optimizer: weakref.ref[Any] | None,
        portions: Portions,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._torch = torch
        self._model = model
        self._optimizer = optimizer
        self._portions = portions
        self._clock = clock
        self._parameters: list[Portion] = []
        self._states: list[Portion] = []
        self._gradients: dict[int, int] = {}
        self._work = self._all()

    def bytes(self) -> Mapping[int, Mapping[str, int]]:
        """By device index (`HOST` for the host's memory) and component, once all is counted."""
        parameters, states = self._portions.bytes(self._parameters, self._states)
        counted = parameters, self._gradients, states
        return {
            device: {name: told.get(device, 0) for name, told in zip(COMPONENTS, counted, strict=True)}
            for device in {*parameters, *self._gradients, *states}
        }

    def go_on(self, seconds: float) -> bool:
        """Count for about that long; True once all is counted."""
        end = self._clock() + seconds
        with without_torch_function(self._torch):  # a mode that the program has on is for its own calls
            return all(self._clock() < end for _ in self._work)

    def _all(self) -> Iterator[None]:
        # No local variable of this generator may refer to a tensor, a module or a dictionary of them at a `yield`.
        structure = self._portions.structure
        if structure is None or not (yield from structure.holds()):
            structure = Structure(self._model, self._optimizer)
            yield from structure.find()
            self._portions.structure = structure
        for part in structure.parts:
            self._count_parameters(structure.parameters(part))
            yield
        while self._count_states(len(self._states)):
            yield

    def _count_parameters(self, parameters: list[Any]) -> None:
        self._parameters.append(self._portions.take("parameters", len(self._parameters), parameters))
        # PyTorch warns whoever asks another than a leaf for its gradient
        leaves = compress(parameters, map(_is_leaf, parameters))
        gradients = [gradient for gradient in map(_grad, leaves) if gradient is not None]
        for device, nbytes in own_bytes(gradients, self._torch).items():
            self._gradients[device] = self._gradients.get(device, 0) + nbytes

    def _count_states(self, place: int) -> bool:
        """Whether there were any from there on. The states are found by their place: that needs no reference."""
        optimizer = self._optimizer() if self._optimizer is not None else None
        states = getattr(optimizer, "state", None) or {}
        found = list(islice(states.values(), place * _STATES_CHUNK, (place + 1) * _STATES_CHUNK))
        if found:
            self._states.append(self._portions.take("states", place, self._tensors(found)))
        return bool(found)

    def _tensors(self, values: list[Any]) -> list[Any]:
        """Those among the values, and in dictionaries, lists and tuples among them."""
        tensor = self._torch.Tensor
        tensors: list[Any] = []
        for _ in range(_NESTING_MAX + 1):
            kinds = list(map(type, values))
            if kinds.count(dict) == len(kinds):
                # as the garbage collector asks for them: a dictionary has to tell it of every value. It may tell of
                # keys that are no strings, too: a tensor among those is a parameter, and counts as one alone
                values = gc.get_referents(*values)
            elif kinds.count(tensor) == len(kinds):
                return tensors + values
            else:
                tensors += [value for value in values if isinstance(value, tensor)]
                values = values_of(value for value in values if isinstance(value, (dict, list, tuple)))
        return tensors
