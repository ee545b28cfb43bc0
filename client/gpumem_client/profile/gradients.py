"""Reads where gradients are: at the end of a step, in the thread that trains."""

from __future__ import annotations

import threading
import time
from typing import Any, Callable, Iterator

from gpumem_client import torch_access
from gpumem_client.guest_safety import guest_safety
from gpumem_client.hooks.steps import process_steps
from gpumem_client.objects.holders import is_derived
from gpumem_client.objects.referrers import instance_dictionary
from gpumem_client.objects.tensors import TensorReader
from gpumem_client.profile.aggregate import Place

# The longest time between two looks at whether the reporter stops.
_LOOK_SECONDS = 0.05
# Attributes in which libraries (Megatron) keep the gradient of a parameter.
_ATTRIBUTES = ("main_grad",)


class Gradients:
    """The gradients of the parameters of one optimizer or more.

    They are read at the end of the next step, if one ends within `seconds`. Refers to nothing meanwhile.
    """

    def __init__(self, torch: Any, seconds: float, stopping: Callable[[], bool]) -> None:
        self._torch = torch
        self.places: dict[int, list[Place]] = {}
        """By the id of a parameter."""
        self.optimizers: set[int] = set()
        """The ids of the optimizers whose gradients were read."""
        self.read_at_us = 0
        """The time before the first ones were read, in microseconds since the epoch."""
        if seconds <= 0:
            return
        # Autograd's threads set gradients without the GIL, and to read one at that moment crashes the process. At the
        # end of its step an optimizer's gradients belong to the thread that made the step.
        done = threading.Event()

        @guest_safety()
        def read(optimizer: Any) -> None:
            if optimizer is not None and id(optimizer) not in self.optimizers:
                self.read_at_us = self.read_at_us or time.time_ns() // 1000
                self._read(optimizer)
                self.optimizers.add(id(optimizer))
                done.set()

        end_seconds = time.monotonic() + seconds
        stop = process_steps().listen(read)
        try:
            while not stopping() and time.monotonic() < end_seconds and not done.wait(min(_LOOK_SECONDS, seconds)):
                pass
        finally:
            stop()

    def _read(self, optimizer: Any) -> None:
        with torch_access.without_torch_function(self._torch):
            reader = TensorReader(self._torch)
            for parameter in _parameters(optimizer):
                if type(parameter) not in reader.all_types or not reader.base.is_leaf.__get__(parameter):
                    continue  # torch warns about gradients of others
                attributes = instance_dictionary(parameter) or {}
                found = [reader.base.grad.__get__(parameter), *(attributes.get(each) for each in _ATTRIBUTES)]
                places = [reader.place(part) for each in found for part in reader.parts(each)]
                self.places[id(parameter)] = [each for each in places if each is not None]


def _parameters(optimizer: Any) -> Iterator[Any]:
    groups = (instance_dictionary(optimizer) or {}).get("param_groups")
    for group in groups if type(groups) is list else ():
        parameters = dict.get(group, "params") if is_derived(type(group), dict) else None
        yield from parameters if type(parameters) is list else ()
