"""Names the storages of CUDA tensors after the Python objects that hold them: models, optimizers, caches and others.

The search runs none of the user's code: it selects objects by their exact type, and reads tensors through torch's base
class and other objects through the interpreter's own descriptors. The result has text and addresses only.
"""

from __future__ import annotations

import time
from typing import Any, Callable, Iterable, Iterator, Mapping, NamedTuple

from gpumem_client import torch_access
from gpumem_client.objects.interpreter import GENERATIONS, each_tracked, find_frozen, tracked_of_types
from gpumem_client.objects.referrers import NO_REFERRER, describe_referrers, instance_dictionary, items_of
from gpumem_client.objects.tensors import TensorReader, subclasses
from gpumem_client.profile.gradients import Gradients, Place
from gpumem_client.profile.model import Owner
from gpumem_client.profile.tensor_paths import (
    Model,
    NamedTensor,
    cache_types,
    cached_tensors,
    class_name,
    models_of,
    nested_tensors,
)

# Attributes in which libraries (Megatron) keep the gradient of a parameter.
_GRADIENT_ATTRIBUTES = ("main_grad",)
_CHUNK = 1024
# A search ends after this multiple of its CPU time: reports wait for it.
_SLOWEST = 3
# The number of tensors with one storage whose referrers are searched.
_IDS_MAX = 4


class Named(NamedTuple):
    """The owners of the storages that Python objects hold."""

    owners: Mapping[Place, Owner]
    """By the index of the device and the address at which the storage starts, which may lie within a block.

    The kind is `unseen` for a tensor to which no Python object refers: autograd keeps it, or other C++ code.
    """
    notes: tuple[str, ...] = ()
    """What could not be seen and why, for people."""


def name_storages(torch: Any, *, max_seconds: float, addresses_read: Callable[[int], object] | None = None) -> Named:
    """Name the storages of all CUDA tensors that Python objects hold.

    Any thread may call this, also beside training. It keeps no tensor after its return, and tensors outside of models
    for some milliseconds before. It takes about 3 s of CPU time per million objects of the process, and ends after
    `max_seconds` of it, or after three times as long if other threads or processes leave it less. It keeps the GIL for
    less time than a full garbage collection at a time.

    Gradients are read at the end of a step, for which the search waits for up to `max_seconds`, or while no thread
    allocates. Addresses change while training runs. `addresses_read` is called as soon as all are read, before the
    search for names, which takes longest, with the time when their reading began, in microseconds since the epoch.
    """
    with torch_access.without_torch_function(torch):
        return _Search(torch, max_seconds, addresses_read).run()


class _Other(NamedTuple):
    """A storage that no model, optimizer or cache has."""

    shape: str
    dtype: str
    tensors: list[int]
    """The ids of tensors with this storage."""


class _Search:
    def __init__(self, torch: Any, max_seconds: float, addresses_read: Callable[[int], object] | None) -> None:
        self._torch = torch
        self._max_seconds = max_seconds
        self._cpu_seconds, self._started_seconds = time.thread_time(), time.monotonic()
        self._addresses_read = addresses_read
        self._reader = TensorReader(torch)
        self._owners: dict[Place, Owner] = {}
        # The number of further tensors of the same kind with this storage.
        self._more: dict[Place, int] = {}
        self._seen: set[tuple[str, int]] = set()
        # The parameters of models and optimizers, by id.
        self._parameters: dict[int, NamedTensor] = {}
        self._texts: dict[tuple[Any, ...], tuple[str, str]] = {}
        self._notes: list[str] = []
        self._started_us = 0

    def run(self) -> Named:
        self._frozen = find_frozen(self._end())
        if not self._frozen.complete:
            self._notes.append("gc.freeze() hides objects, and a limit ended the search for them")
        self._read_holders()
        others = self._others()
        if self._addresses_read is not None:
            self._addresses_read(self._started_us)
        self._name(others)
        for place, count in self._more.items():
            owner = self._owners[place]
            self._owners[place] = Owner(owner.kind, f"{owner.name} and {count} more", "", owner.dtype)
        if self._late():
            used_seconds = time.thread_time() - self._cpu_seconds
            self._notes.append(f"the search for owners ended after {used_seconds:.1f} s of CPU time")
        return Named(self._owners, tuple(self._notes))

    def _read_holders(self) -> None:
        """Read models, optimizers and caches, the more specific kinds of owners first."""
        modules = frozenset(subclasses(self._torch.nn.Module))
        optimizers = frozenset(subclasses(self._torch.optim.Optimizer))
        caches = cache_types()
        found = self._instances(modules | optimizers | caches.keys())
        models = self._distinct(models_of([each for each in found if type(each) in modules]))
        holders = [each for each in found if type(each) in optimizers]
        for model in models:
            for named in model.parameters:
                self._parameters.setdefault(id(named[1]), named)
        own_parameters = list(self._own_parameters(holders))
        gradients = self._read_gradients()
        for found_parameters in (*(model.parameters for model in models), own_parameters):
            self._add("parameters", found_parameters)
        self._add_gradients(gradients)
        self._add("optimizer_state", self._states(holders))
        for model in models:
            self._add("buffers", model.buffers)
        for each in found:
            if type(each) in caches:
                self._add("kv_cache", cached_tensors(each, caches[type(each)], self._is_tensor))
        self._parameters.clear()

    def _end(self) -> float:
        """Return when to end on `time.thread_time()`, if this thread gets the same share of time as until now."""
        now_seconds = time.thread_time()
        used_seconds, elapsed_seconds = now_seconds - self._cpu_seconds, time.monotonic() - self._started_seconds
        share = used_seconds / max(used_seconds, elapsed_seconds) if used_seconds > 0 else 1.0
        left_seconds = _SLOWEST * self._max_seconds - elapsed_seconds
        return now_seconds + min(self._max_seconds - used_seconds, left_seconds * share)

    def _late(self) -> bool:
        return time.thread_time() >= self._end()

    def _is_tensor(self, value: Any) -> bool:
        return type(value) in self._reader.all_types

    def _instances(self, types: frozenset[type]) -> list[Any]:
        """Return the objects of these types."""
        # Sorted by id, so that two profiles of a process have the same order.
        found = {id(each): each for each in self._frozen.objects if type(each) in types}
        for generation in GENERATIONS:
            found.update((id(each), each) for each in tracked_of_types(generation, types))
        return [found[key] for key in sorted(found)]

    def _distinct(self, models: list[Model]) -> list[Model]:
        """Return the models with tensors on devices. If there are several, their paths start with their names."""
        models = [each for each in models if any(map(self._on_device, each.parameters + each.buffers))]
        if len(models) == 1:
            return models
        counts: dict[str, int] = {}
        distinct = []
        for name, *kinds in models:
            counts[name] = counts.get(name, 0) + 1
            prefix = f"{name}#{counts[name]}" if counts[name] > 1 else name
            distinct.append(Model(name, *([(f"{prefix}.{path}", each) for path, each in kind] for kind in kinds)))
        return distinct

    def _on_device(self, named: NamedTensor) -> bool:
        return any(map(self._reader.is_cuda, self._reader.parts(named[1])))

    def _add(self, kind: str, found: Iterable[NamedTensor]) -> None:
        """Name the storages of tensors, unless they have an owner already."""
        for at, (name, tensor) in enumerate(found):
            if at % _CHUNK == 0 and self._late():
                return
            if (kind, id(tensor)) in self._seen:
                continue  # shared by several modules
            self._seen.add((kind, id(tensor)))
            for part in self._reader.parts(tensor):
                place = self._reader.place(part)
                if place is not None:
                    self._own(kind, name, place, part)

    def _own(self, kind: str, name: str, place: Place, like: Any) -> None:
        """Name a storage. Its tensor has the shape and dtype of the tensor `like`."""
        owner = self._owners.get(place)
        if owner is None:
            self._owners[place] = Owner(kind, name, *self._shape_and_dtype(like))
        elif owner.kind == kind and owner.name != name:
            self._more[place] = self._more.get(place, 0) + 1

    def _shape_and_dtype(self, tensor: Any) -> tuple[str, str]:
        key = self._reader.shape(tensor), self._reader.dtype(tensor)
        if key not in self._texts:
            shape, dtype = key
            self._texts[key] = "x".join(map(str, shape or ())) or ("1" if shape is not None else ""), dtype
        return self._texts[key]

    def _own_parameters(self, optimizers: list[Any]) -> Iterator[NamedTensor]:
        """Yield the parameters that optimizers update and no model has, such as copies in another precision."""
        for optimizer in optimizers:
            groups = (instance_dictionary(optimizer) or {}).get("param_groups")
            for named in nested_tensors(groups, f"{class_name(optimizer)}.param_groups", self._is_tensor):
                if id(named[1]) not in self._parameters:
                    self._parameters[id(named[1])] = named
                    yield named

    def _states(self, optimizers: list[Any]) -> Iterator[NamedTensor]:
        for optimizer in optimizers:
            states = items_of((instance_dictionary(optimizer) or {}).get("state"))
            for at, (parameter, state) in enumerate(states):
                owner = self._parameters.get(id(parameter), (f"parameter {at}", None))[0]
                for name, tensor in nested_tensors(state, class_name(optimizer), self._is_tensor):
                    yield f"{name} {owner}", tensor

    def _read_gradients(self) -> Mapping[int, Place]:
        """Read where the gradients are."""
        # First of all, because that may wait for the end of a step; that time does not count.
        parameters = [tensor for _, tensor in self._parameters.values() if type(tensor) in self._reader.types]
        gradients = Gradients(self._torch, parameters)
        waits_seconds = time.monotonic()
        if gradients.read(self._max_seconds):
            self._started_us = gradients.read_at_us
        else:
            self._started_us = time.time_ns() // 1000
            self._notes.append(f"gradients are not named: no step ended within {self._max_seconds:g} s")
        self._started_seconds += time.monotonic() - waits_seconds
        return gradients.places or {}

    def _add_gradients(self, places: Mapping[int, Place]) -> None:
        """Name the gradients of the known parameters."""
        for name, tensor in self._parameters.values():
            if id(tensor) in places:
                self._own("gradients", name, places[id(tensor)], tensor)
            elif type(tensor) not in self._reader.types:
                # Python code sets the gradients of wrappers, such as a DTensor, and has the GIL.
                self._add("gradients", [(name, self._reader.base.grad.__get__(tensor))])
            attributes = instance_dictionary(tensor) or {}
            self._add("gradients", [(name, attributes[each]) for each in _GRADIENT_ATTRIBUTES if each in attributes])

    def _others(self) -> dict[Place, _Other]:
        """Return the storages that have no owner yet."""
        found: dict[Place, _Other] = {}
        # Without the time to read all models, their tensors would be among these.
        for tensor in self._tensors() if not self._late() else ():
            place = self._reader.place(tensor)
            if place is None or place in self._owners:
                continue
            other = found.get(place)
            if other is None:
                other = found[place] = _Other(*self._shape_and_dtype(tensor), [])
            if len(other.tensors) < _IDS_MAX:
                other.tensors.append(id(tensor))
        return found

    def _tensors(self) -> Iterator[Any]:
        """Yield all tensors, and release each of them before the next."""
        yield from each_tracked(self._reader.types, self._late)
        yield from (each for each in self._frozen.objects if type(each) in self._reader.types)

    def _name(self, others: Mapping[Place, _Other]) -> None:
        """Name other storages after what refers to their tensors."""
        wanted = {each for other in others.values() for each in other.tensors}
        names = describe_referrers(wanted, self._end(), self._frozen, sizes=False) if wanted else {}
        for place, other in others.items():
            found = [names[each] for each in other.tensors if each in names]
            name = next((each for each in found if each != NO_REFERRER), "")
            kind = "unseen" if found and not name else "tensors"
            self._owners[place] = Owner(kind, name or "".join(found[:1]), other.shape, other.dtype)
