"""Reads where the gradients of parameters are, while other threads may train."""

from __future__ import annotations

import sys
import threading
import time
from functools import partial
from itertools import chain, compress, repeat, starmap
from operator import attrgetter, is_not
from typing import Any, Iterator, Sequence, Tuple

from gpumem_client import torch_access
from gpumem_client.hooks.steps import process_steps
from gpumem_client.objects.interpreter import all_frames

Place = Tuple[int, int]
"""The index of a device, and the address of a storage on it."""

# A thread that changes gradients frees or allocates memory at least as often as this.
_QUIET_SECONDS = 0.02
# Functions of torch that change gradients.
_BACKWARD = frozenset({"_engine_run_backward", "backward", "grad", "zero_grad"})
_ENGINE = "_engine_run_backward"


class Gradients:
    """The gradients of plain parameters, none of which has a class of its own."""

    def __init__(self, torch: Any, parameters: Sequence[Any]) -> None:
        self._torch = torch
        self._base = torch_access.tensor_base_class(torch)
        is_leaf = self._base.is_leaf.__get__
        self._parameters = [each for each in parameters if is_leaf(each)]  # torch warns about gradients of others
        self.places: dict[int, Place] | None = None
        """By the id of the parameter; None until they were read."""
        self.read_at_us = 0
        """The time before they were read, in microseconds since the epoch."""

    def read(self, seconds: float) -> bool:
        """Wait until the gradients can be read. Returns False if they could not, after `seconds`."""
        # Autograd's threads set a gradient without the GIL, and torch's setter releases the GIL. To read a gradient at
        # that moment crashes the process. So gradients are read at the end of a step, in the thread that trains, or
        # while no thread allocates.
        done = threading.Event()

        def read_at_end_of_step(_optimizer: Any) -> None:
            if self.places is None and self._read():
                done.set()

        stop = process_steps().listen(read_at_end_of_step)
        last = time.monotonic() + seconds
        try:
            allocations = self._allocations()
            while not done.wait(_QUIET_SECONDS):
                before, allocations = allocations, self._allocations()
                if allocations == before and self._read():
                    return True
                if time.monotonic() >= last:
                    return False
        finally:
            stop()
        return True

    def _allocations(self) -> list[Any]:
        statistics = torch_access.Statistics(self._torch)
        states = [statistics.state(index) or {} for index in statistics.devices()]
        counts = [state.get("allocation") or state.get("allocated_bytes") or {} for state in states]
        return [(count.get("allocated"), count.get("freed")) for count in counts]

    def _read(self) -> bool:
        """Read all gradients. Returns False during a backward pass."""
        if any(frame.f_code.co_name == _ENGINE for frame in all_frames()):
            # `_quiet` sees only innermost functions, and a backward pass may run the user's functions in its thread.
            return False
        with torch_access.without_torch_function(self._torch):
            gradient = self._base.grad.__get__
            # Each `list` is one call of a C function: no other thread gets the GIL between the look at the threads and
            # the reading of the gradients.
            quiet = partial(_quiet, len(self._parameters))
            has = list(map(partial(is_not, None), map(gradient, compress(self._parameters, quiet()))))
            found = list(compress(self._parameters, has))
            places: dict[int, Place] = {}
            self.read_at_us = time.time_ns() // 1000
            for chosen in [found] if self._is_dense(found) else [[each] for each in found]:
                places.update(self._places_of(chosen))
            if len(has) == len(self._parameters):
                self.places = places
                return True
            return False

    def _is_dense(self, parameters: list[Any]) -> bool:
        sparse = map(self._base.is_sparse.__get__, map(self._base.grad.__get__, _while_quiet(parameters)))
        try:
            return not any(sparse)
        except TypeError:  # a gradient is not there any more
            return False

    def _places_of(self, parameters: list[Any]) -> dict[int, Place]:
        base = self._base
        reads = (base.get_device, base.data_ptr, base.storage_offset, base.element_size)
        gradients = (map(each, map(base.grad.__get__, _while_quiet(parameters))) for each in reads)
        try:
            read = list(zip(map(id, parameters), *gradients))
        except (RuntimeError, TypeError):  # sparse, or not there any more
            return {}
        return {key: (device, address - offset * size) for key, device, address, offset, size in read if address}


def _while_quiet(parameters: list[Any]) -> Iterator[Any]:
    return compress(parameters, _quiet(len(parameters)))


def _quiet(count: int) -> Iterator[bool]:
    """Yield `count` times whether no thread changes gradients. Looks when the first value is taken."""
    frames = map(dict.values, starmap(sys._current_frames, ((),)))
    names = map(partial(map, attrgetter("f_code.co_name")), frames)
    return chain.from_iterable(map(repeat, map(_BACKWARD.isdisjoint, names), (count,)))
