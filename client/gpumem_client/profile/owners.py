"""Names the storages of CUDA tensors after the Python objects that hold them: models, optimizers, caches and others.

The search runs none of the user's code: it selects objects by their exact type, and reads tensors through torch's base
class and other objects through the interpreter's own descriptors. The result has text and addresses only.
"""

from __future__ import annotations

import sys
import time
from itertools import compress
from typing import Any, Callable, Iterable, Iterator, Mapping, NamedTuple, Tuple

from gpumem_client import torch_access
from gpumem_client.objects.interpreter import GENERATIONS, all_frames, find_frozen, tracked_of_types
from gpumem_client.objects.referrers import NO_REFERRER, describe_referrers, instance_dictionary, items_of
from gpumem_client.objects.tensors import StorageOf, TensorReader, subclasses
from gpumem_client.profile.model import Owner

_Place = Tuple[int, int]
"""The index of a device, and the address of a storage on it."""

_TRANSPARENT = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Children of a module that wraps one other module: compiled modules, FSDP1, activation checkpointing."""
_PARALLEL = ("DistributedDataParallel", "DataParallel")
_GRADIENT_ATTRIBUTES = ("main_grad",)
"""Attributes in which libraries (Megatron) keep the gradient of a parameter."""
_CACHES = (
    ("transformers.cache_utils", "Cache", ""),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner", "kv_caches"),
    ("vllm.v1.worker.gpu.model_runner", "GPUModelRunner", "kv_caches"),
    ("sglang.srt.mem_cache.memory_pool", "KVCache", ""),
)
"""Classes with KV caches: module, name, and the attribute that has the cache; empty if all attributes belong to it."""
_CACHE_PARTS = (("transformers.cache_utils", "CacheLayerMixin"), ("transformers.cache_utils", "Cache"))
_NESTED_MAX = 4
_CHUNK = 1024
_IDS_MAX = 4
"""The number of tensors with one storage whose referrers are searched."""
_BACKWARD = {"_engine_run_backward", "backward", "grad"}
_WAIT_SECONDS = 0.005


class Named(NamedTuple):
    """The owners of the storages that Python objects hold."""

    owners: Mapping[_Place, Owner]
    """By the index of the device and the address at which the storage starts, which may lie within a block.

    The kind `unseen` is that of a tensor to which no Python object refers: autograd keeps it, or other C++ code.
    """
    notes: tuple[str, ...] = ()
    """What could not be seen and why, for people."""


def name_storages(torch: Any, *, max_seconds: float, addresses_read: Callable[[], None] | None = None) -> Named:
    """Name the storages of all CUDA tensors that Python objects hold.

    Any thread may call this, also beside training. It keeps no tensor after its return, and few for some milliseconds
    before. It takes about 1 s of CPU time per million objects of the process, and `max_seconds` at most. It keeps the
    GIL for up to 0.2 s per million objects at a time, as a full garbage collection does.

    The addresses change while training runs. `addresses_read` is called as soon as all are read, before the search
    for names, which takes longest: a snapshot that is taken there fits best.
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
    def __init__(self, torch: Any, max_seconds: float, addresses_read: Callable[[], None] | None) -> None:
        self._torch = torch
        self._max_seconds = max_seconds
        self._end = time.thread_time() + max_seconds
        self._addresses_read = addresses_read
        self._reader = TensorReader(torch)
        self._owners: dict[_Place, Owner] = {}
        self._more: dict[_Place, int] = {}
        """The number of further tensors of the same kind with this storage."""
        self._seen: set[tuple[str, int]] = set()
        self._parameters: dict[int, tuple[str, Any]] = {}
        """Names of the parameters of modules and optimizers, and the parameters, by id."""
        self._notes: list[str] = []

    def run(self) -> Named:
        self._frozen = find_frozen(self._end)
        if not self._frozen.complete:
            self._notes.append("gc.freeze() hides objects, and a limit ended the search for them")
        module, optimizer = self._torch.nn.Module, self._torch.optim.Optimizer
        modules, optimizers = frozenset(subclasses(module)), frozenset(subclasses(optimizer))
        caches = {kind: name for *place, name in _CACHES for kind in _loaded(*place)}
        found = self._instances(modules | optimizers | caches.keys())
        entries = list(self._entries_of_modules([each for each in found if type(each) in modules]))
        optimizers_found = [each for each in found if type(each) in optimizers]
        caches_found = [each for each in found if type(each) in caches]
        found.clear()
        self._add("parameters", (entry[1:] for entry in entries if entry[0] == "parameters"))
        self._add("parameters", self._own_parameters(optimizers_found))
        self._add("gradients", self._gradients())
        self._add("optimizer_state", self._states(optimizers_found))
        self._add("buffers", (entry[1:] for entry in entries if entry[0] == "buffers"))
        self._add("kv_cache", _cached(caches_found, caches))
        for each in (entries, optimizers_found, caches_found, self._parameters):
            each.clear()
        others = self._others()
        if self._addresses_read is not None:
            self._addresses_read()
        self._name(others)
        for place, count in self._more.items():
            owner = self._owners[place]
            self._owners[place] = Owner(owner.kind, f"{owner.name} and {count} more", "", owner.dtype)
        if self._late():
            self._notes.append(f"the search for owners ended after {self._max_seconds:g} s of CPU time")
        return Named(self._owners, tuple(self._notes))

    def _late(self) -> bool:
        return time.thread_time() > self._end

    def _instances(self, types: Iterable[type]) -> list[Any]:
        """Return the objects of these types, sorted by id, so that two profiles of a process have the same order."""
        types = frozenset(types)
        found = {id(each): each for each in self._frozen.objects if type(each) in types}
        for generation in GENERATIONS:
            found.update((id(each), each) for each in tracked_of_types(generation, types))
        return [found[key] for key in sorted(found)]

    def _add(self, kind: str, found: Iterable[tuple[str, Any]]) -> None:
        """Name the storages of tensors, unless they have an owner of a more specific kind."""
        for at, (name, tensor) in enumerate(found):
            if at % _CHUNK == 0 and self._late():
                return
            if (kind, id(tensor)) in self._seen:
                continue  # shared by several modules
            self._seen.add((kind, id(tensor)))
            for part in self._reader.parts(tensor):
                storage = self._reader.storage(part)
                if storage is None:
                    continue
                place = storage[:2]
                owner = self._owners.get(place)
                if owner is None:
                    self._owners[place] = Owner(kind, name, self._shape(part, storage), self._reader.dtype(part))
                elif owner.kind == kind and owner.name != name:
                    self._more[place] = self._more.get(place, 0) + 1

    def _shape(self, tensor: Any, storage: StorageOf) -> str:
        """Return the shape of a tensor; if its storage is larger, the number of elements that the storage has."""
        shape = self._reader.shape(tensor)
        size = self._reader.base.element_size(tensor)
        if shape is None or self._reader.base.numel(tensor) * size < storage.bytes:
            shape = (storage.bytes // size,)
        return "x".join(map(str, shape)) or "1"

    def _entries_of_modules(self, modules: list[Any]) -> Iterator[tuple[str, str, Any]]:
        """Yield the kind, name and tensor of all parameters and buffers."""
        dictionaries = {id(module): instance_dictionary(module) or {} for module in modules}
        children = {id(child) for own in dictionaries.values() for child in _values(own, "_modules")}
        roots = [module for module in modules if id(module) not in children]
        seen: set[int] = set()
        # Modules that contain each other have no root, so every module is tried.
        found = [_tree(root, dictionaries, seen) for root in (*roots, *modules) if id(root) not in seen]
        on_devices = [each for each in found if any(self._on_device(tensor) for _, _, tensor in each[1])]
        counts: dict[str, int] = {}
        for name, entries in found:
            prefix = ""
            if len(on_devices) > 1:
                counts[name] = counts.get(name, 0) + 1
                prefix = f"{name}#{counts[name]}." if counts[name] > 1 else f"{name}."
            for kind, path, tensor in entries:
                if kind == "parameters":
                    self._parameters.setdefault(id(tensor), (prefix + path, tensor))
                yield kind, prefix + path, tensor

    def _on_device(self, tensor: Any) -> bool:
        return any(map(self._reader.is_cuda, self._reader.parts(tensor)))

    def _own_parameters(self, optimizers: list[Any]) -> Iterator[tuple[str, Any]]:
        """Yield the parameters that optimizers update and no module has, such as copies in another precision."""
        for optimizer in optimizers:
            groups = (instance_dictionary(optimizer) or {}).get("param_groups")
            for at, group in enumerate(groups if type(groups) is list else ()):
                for name, parameter in _tensors(group, self._is_tensor, f"{_name(optimizer)}.param_groups.{at}"):
                    if id(parameter) not in self._parameters:
                        self._parameters[id(parameter)] = name, parameter
                        yield name, parameter

    def _states(self, optimizers: list[Any]) -> Iterator[tuple[str, Any]]:
        for optimizer in optimizers:
            states = (instance_dictionary(optimizer) or {}).get("state")
            for at, (key, state) in enumerate(items_of(states)):
                owner = self._parameters.get(id(key), (f"parameter {at}", None))[0]
                for name, tensor in _tensors(state, self._is_tensor, _name(optimizer)):
                    yield f"{name} {owner}", tensor

    def _gradients(self) -> Iterator[tuple[str, Any]]:
        """Yield the gradients of the known parameters.

        Autograd's threads replace gradients without the GIL. To read one at that moment may crash the process.
        """
        base = self._reader.base
        parameters = list(self._parameters.values())
        last = time.monotonic() + self._max_seconds
        for start in range(0, len(parameters), _CHUNK):
            names, tensors = zip(*parameters[start : start + _CHUNK])
            leaves = list(map(base.is_leaf.__get__, tensors))  # torch warns about gradients of other tensors
            while _backward_runs():
                if time.monotonic() > last:
                    self._notes.append("gradients are not named: a backward pass ran all the time")
                    return
                time.sleep(_WAIT_SECONDS)
            gradients = list(map(base.grad.__get__, compress(tensors, leaves)))
            yield from ((name, each) for name, each in zip(compress(names, leaves), gradients) if each is not None)
            for name, tensor in zip(names, tensors):
                attributes = instance_dictionary(tensor) or {}
                yield from ((name, attributes[each]) for each in _GRADIENT_ATTRIBUTES if each in attributes)

    def _is_tensor(self, value: Any) -> bool:
        return type(value) in self._reader.all_types

    def _others(self) -> dict[_Place, _Other]:
        """Return the storages that have no owner yet."""
        found: dict[_Place, _Other] = {}
        for tensor in self._tensors():
            storage = self._reader.storage(tensor)
            if storage is None or storage[:2] in self._owners:
                continue
            other = found.get(storage[:2])
            if other is None:
                other = found[storage[:2]] = _Other(self._shape(tensor, storage), self._reader.dtype(tensor), [])
            if len(other.tensors) < _IDS_MAX:
                other.tensors.append(id(tensor))
        return found

    def _tensors(self) -> Iterator[Any]:
        """Yield all tensors, and release each of them before the next."""
        for generation in GENERATIONS:
            found = tracked_of_types(generation, self._reader.types)
            found.reverse()
            while found and not (len(found) % _CHUNK == 0 and self._late()):
                yield found.pop()
        yield from (each for each in self._frozen.objects if type(each) in self._reader.types)

    def _name(self, others: Mapping[_Place, _Other]) -> None:
        wanted = {each for other in others.values() for each in other.tensors}
        names = describe_referrers(wanted, self._end, self._frozen, sizes=False) if wanted else {}
        for place, other in others.items():
            found = [names[each] for each in other.tensors if each in names]
            name = next((each for each in found if each != NO_REFERRER), None)
            unseen = name is None and bool(found)
            kind, name = ("unseen", NO_REFERRER) if unseen else ("tensors", name or "")
            self._owners[place] = Owner(kind, name, other.shape, other.dtype)


def _tree(
    root: Any, dictionaries: Mapping[int, Mapping[str, Any]], seen: set[int]
) -> tuple[str, list[tuple[str, str, Any]]]:
    """Return the class of a root module, and the kind, path and tensor of its parameters and buffers."""
    name, entries = "", []
    waiting = [(root, "")]
    while waiting:
        module, path = waiting.pop()
        if id(module) in seen or id(module) not in dictionaries:
            continue
        seen.add(id(module))
        own = dictionaries[id(module)]
        if not path:
            name = _name(module)  # of the innermost module that others wrap
        for kind, dictionary in (("parameters", "_parameters"), ("buffers", "_buffers")):
            entries += [
                (kind, path + key, tensor) for key, tensor in items_of(own.get(dictionary)) if tensor is not None
            ]
        parallel = _name(module) in _PARALLEL
        below = [
            (child, path if key in _TRANSPARENT or (parallel and key == "module") else f"{path}{key}.")
            for key, child in items_of(own.get("_modules"))
        ]
        waiting += reversed(below)
    return name, entries


def _cached(caches: list[Any], attributes: Mapping[type, str]) -> Iterator[tuple[str, Any]]:
    """Yield the names and tensors of KV caches."""
    parts = {kind for place in _CACHE_PARTS for kind in _loaded(*place)}
    tensor = sys.modules["torch"].Tensor
    for cache in caches:
        own = instance_dictionary(cache) or {}
        attribute = attributes[type(cache)]
        name = _name(cache)
        values = own.get(attribute) if attribute else own
        name = f"{name}.{attribute}" if attribute else name
        yield from _tensors(values, lambda value: tensor in type(value).__mro__, name, parts)


def _tensors(
    value: Any, is_tensor: Callable[[Any], bool], name: str, parts: Iterable[type] = (), depth: int = 0
) -> Iterator[tuple[str, Any]]:
    """Yield the tensors in dictionaries, lists, tuples and objects of the types `parts`, with their paths."""
    if is_tensor(value):
        yield name, value
        return
    if depth > _NESTED_MAX:
        return
    if type(value) in parts:
        value = instance_dictionary(value)
    items = enumerate(list(value)) if type(value) in (list, tuple) else items_of(value)
    for key, each in items:
        yield from _tensors(each, is_tensor, f"{name}.{key}", parts, depth + 1)


def _values(own: Mapping[str, Any], name: str) -> list[Any]:
    return [value for _, value in items_of(own.get(name))]


def _name(instance: Any) -> str:
    return type(instance).__qualname__


def _loaded(module: str, name: str) -> list[type]:
    """Return a class of a module that is loaded, and all classes that are derived from it."""
    kind = vars(sys.modules[module]).get(name) if module in sys.modules else None
    return subclasses(kind) if isinstance(kind, type) else []


def _backward_runs() -> bool:
    """Whether a thread waits for autograd's threads."""
    return any(
        frame.f_code.co_name in _BACKWARD and "/torch/autograd/" in frame.f_code.co_filename for frame in all_frames()
    )
