"""Names the storages of CUDA tensors after what holds them: models, optimizers, caches, and variables.

The reading refers to no object of the job while another thread runs, so it keeps nothing alive, and it runs none of the
user's code. What refers to the other tensors is searched only on request.
"""

from __future__ import annotations

import gc
import math
import re
import sys
import time
from typing import Any, Callable, Dict, Iterable, Iterator, Mapping, NamedTuple, Tuple

from gpumem_client import torch_access
from gpumem_client.objects.holders import Holders, ids_of, name_of_class
from gpumem_client.objects.referrers import GRAPH, NO_REFERRER, describe_referrers
from gpumem_client.objects.tensors import TensorReader, subclasses
from gpumem_client.profile.aggregate import Naming, Place
from gpumem_client.profile.gradients import Gradients
from gpumem_client.profile.heap_blocks import resting
from gpumem_client.profile.profile_types import Owner
from gpumem_client.uninterrupted import Slices

TESTED_TORCH = ((2, 9), (2, 15))
"""The first and the last release of torch with which CI runs the tests. Owners are searched with these only."""
# The longest wait for the end of a step, at which gradients can be read.
_GRADIENT_SECONDS = 2.0
# The number of tensors with one storage whose referrers are searched, and the number of storages, the largest first.
_IDS_MAX, _SEARCHED_MAX = 4, 5000
_DEPTH_MAX, _KEY_MAX = 4, 60
# What models and optimizers keep in these attributes has names of its own.
_NAMED_ATTRIBUTES = frozenset({"_parameters", "_buffers", "_modules", "state", "param_groups"})


def name_storages(
    torch: Any,
    slices: Slices,
    *,
    addresses_read: Callable[[], object] = lambda: None,
    gradient_seconds: float = _GRADIENT_SECONDS,
    search_seconds: float = 0.0,
) -> Naming:
    """Name the storages of all CUDA tensors that Python objects hold.

    Any thread may call this, also beside training. It first waits up to `gradient_seconds` for the end of a step, at
    which the gradients are read, and then keeps the GIL for about as long as a full garbage collection does.

    Addresses change while training runs. `addresses_read` is called as soon as all are read. After that, what refers to
    the tensors without an owner is searched for up to `search_seconds`.
    """
    version = re.match(r"(\d+)\.(\d+)", str(torch.__version__))
    if version is None or not TESTED_TORCH[0] <= (int(version[1]), int(version[2])) <= TESTED_TORCH[1]:
        addresses_read()
        first, last = (".".join(map(str, each)) for each in TESTED_TORCH)
        why = f"owners are not named with torch {torch.__version__}: tested are {first} to {last}"
        return Naming(0, 0, {}, notes=(why,))
    gradients = Gradients(torch, gradient_seconds, slices.stopping)
    started_us = gradients.read_at_us or time.time_ns() // 1000
    modules, optimizers = subclasses(torch.nn.Module), subclasses(torch.optim.Optimizer)
    with torch_access.without_torch_function(torch):
        types = (*modules, *optimizers, *cache_types(), *_loaded(*_CACHE_PART))
        read = Holders(torch, TensorReader(torch), types, slices)
    ended_us = time.time_ns() // 1000
    addresses_read()
    owners = _Owners(read)
    named_optimizers = owners.instances(optimizers)
    owners.add_models(owners.instances(modules), named_optimizers, gradients)
    owners.add_caches()
    owners.add_variables()
    notes = []
    if gc.get_freeze_count():
        notes.append("gc.freeze() hides objects from the search for owners")
    if read.unread:
        notes.append(f"{read.unread:,} containers were not searched for tensors: there are too many beside them")
    missing = len(named_optimizers.keys() - gradients.optimizers)
    if missing:
        why = f"made a step within {gradient_seconds:g} s" if gradient_seconds > 0 else "could be waited for"
        notes.append(f"gradients are not named: of {len(named_optimizers)} optimizers, {missing} {why}")
    if search_seconds > 0:
        notes += owners.search(torch, slices, search_seconds)
    return Naming(started_us, ended_us, owners.found(), owners.graph, tuple(notes))


class _Owners:
    """The owners of storages, found in what was read. Refers to no object of the job."""

    def __init__(self, read: Holders) -> None:
        self._read = read
        # By id: the place, the shape and the dtype as texts, and the bytes.
        self._tensors: dict[int, tuple[Place, tuple[str, str], int]] = {}
        self._owners: dict[Place, Owner] = {}
        # The number of further tensors of the same kind with this storage.
        self._more: dict[Place, int] = {}
        texts: dict[Any, tuple[str, str]] = {}
        for each, device, address, item_bytes, shape, dtype in resting(read.tensors):
            key = tuple(shape), dtype
            if key not in texts:
                texts[key] = "x".join(map(str, shape)) or "1", str(dtype).replace("torch.", "")
            self._tensors[each] = (device, address), texts[key], item_bytes * math.prod(shape)
        self._wrapped = dict(read.wrapped)
        self._containers = dict(read.containers)
        # The containers whose tensors have names.
        self._named: set[int] = set()
        self._children: dict[int, dict[object, int]] = {}
        self.graph = ""
        for holder, key, child in resting(read.children):
            self._children.setdefault(holder, {})[key] = child

    def instances(self, types: Iterable[type]) -> dict[int, str]:
        """Return the names of the classes of the found instances of these types, by id."""
        wanted = ids_of(types)
        # Sorted, so that two profiles of a process have the same order.
        found = sorted((each, name_of_class(kind)) for each, kind in self._read.instances if id(kind) in wanted)
        return dict(found)

    def add_models(self, modules: Mapping[int, str], optimizers: Mapping[int, str], gradients: Gradients) -> None:
        """Name parameters, gradients, optimizer states and buffers, the more specific kinds of owners first."""
        models = self._distinct(models_of(modules, self._children))
        parameters: dict[int, str] = {}
        for model in models:
            for name, tensor in model.parameters:
                parameters.setdefault(tensor, name)
        for optimizer, name in optimizers.items():
            for path, tensor in self._nested(self._child(optimizer, "param_groups"), f"{name}.param_groups"):
                parameters.setdefault(tensor, path)
        self._add("parameters", ((name, tensor) for tensor, name in parameters.items()))
        for tensor, name in parameters.items():
            for place in gradients.places.get(tensor, ()):
                self._own("gradients", name, place, tensor)
        self._add("optimizer_state", self._states(optimizers, parameters))
        for model in models:
            self._add("buffers", model.buffers)

    def add_caches(self) -> None:
        """Name the tensors of KV caches."""
        for kind, attribute in cache_types().items():
            for cache, name in self.instances([kind]).items():
                holder, path = (self._child(cache, attribute), f"{name}.{attribute}") if attribute else (cache, name)
                self._add("kv_cache", self._nested(holder, path))

    def add_variables(self) -> None:
        """Name the tensors in global variables, in attributes, and in local variables, and in containers there."""
        functions = len(self._read.frames)
        for number, module in enumerate(self._read.globals):
            for name, child in self._children.get(-1 - functions - number, {}).items():
                self._add_below(child, f"{name}, a global of {module}")
        for instance, kind in sorted(self._read.instances, key=lambda each: each[0]):
            for name, child in self._children.get(instance, {}).items():
                if name not in _NAMED_ATTRIBUTES:
                    self._add_below(child, f"attribute {name} of a {name_of_class(kind)}")
        for number, (file, line, function) in enumerate(self._read.frames):
            for name, child in self._children.get(-1 - number, {}).items():
                self._add_below(child, f"local variable {name} at {file}:{line} in {function}")

    def search(self, torch: Any, slices: Slices, seconds: float) -> list[str]:
        """Name the other tensors after what refers to them. Returns notes."""
        wanted: dict[Place, list[int]] = {}
        for each in sorted(self._tensors, key=lambda each: -self._tensors[each][2]):
            place = self._tensors[each][0]
            if place not in self._owners and len(wanted.setdefault(place, [])) < _IDS_MAX:
                wanted[place].append(each)
        searched = list(wanted)[:_SEARCHED_MAX]
        ids = [each for place in searched for each in wanted[place]]
        end_seconds = time.monotonic() + seconds
        found = describe_referrers(
            ids,
            slices,
            lambda: time.monotonic() >= end_seconds,
            sizes=False,
            nodes=torch_access.node_types(torch),
            tensors=subclasses(torch.Tensor),
        )
        self.graph = found.get(GRAPH, "")
        for place in searched:
            names = [found[each] for each in wanted[place] if each in found]
            name = next((each for each in names if each not in (NO_REFERRER, self.graph)), "")
            if names:
                self._own("tensors" if name else "unseen", name or names[0], place, wanted[place][0])
        missing = len(wanted) - sum(place in self._owners for place in wanted)
        return [f"the search ended before it named {missing:,} tensors"] if missing else []

    def found(self) -> dict[Place, Owner]:
        """Return the owners of all storages of tensors."""
        found = {place: Owner("unsearched", "", *texts) for place, texts, _ in self._tensors.values()}
        found.update(self._owners)
        for place, count in self._more.items():
            owner = found[place]
            found[place] = Owner(owner.kind, f"{owner.name} and {count} more", "", owner.dtype)
        return found

    def _distinct(self, models: list[Model]) -> list[Model]:
        """Return the models with tensors on devices. If there are several, their paths start with their names."""
        models = [model for model in models if any(self._parts(each) for _, each in model.parameters + model.buffers)]
        if len(models) == 1:
            return models
        counts: dict[str, int] = {}
        distinct = []
        for name, *kinds in models:
            counts[name] = counts.get(name, 0) + 1
            prefix = f"{name}#{counts[name]}" if counts[name] > 1 else name
            distinct.append(Model(name, *([(f"{prefix}.{path}", each) for path, each in kind] for kind in kinds)))
        return distinct

    def _states(self, optimizers: Mapping[int, str], parameters: Mapping[int, str]) -> Iterator[NamedTensor]:
        for optimizer, kind in optimizers.items():
            states = self._children.get(self._child(optimizer, "state"), {})
            for at, (parameter, state) in enumerate(states.items()):
                owner = parameters.get(parameter, f"parameter {at}")  # type: ignore[call-overload]
                for name, tensor in self._nested(state, kind):
                    yield f"{name} {owner}", tensor

    def _child(self, holder: int, key: str) -> int:
        return self._children.get(holder, {}).get(key, 0)

    def _nested(self, each: int, name: str, depth: int = 0) -> Iterator[NamedTensor]:
        """Yield the tensors in an object and in what it holds, with their paths."""
        if self._is_tensor(each):
            yield name, each
        elif depth <= _DEPTH_MAX:
            for key, child in self._children.get(each, {}).items():
                yield from self._nested(child, f"{name}.{key}", depth + 1)

    def _is_tensor(self, each: int) -> bool:
        return each in self._tensors or (each in self._wrapped and each not in self._containers)

    def _parts(self, each: int, depth: int = 0) -> list[int]:
        """Return the tensors with memory that a tensor consists of: itself, or what a wrapper wraps."""
        if each in self._tensors:
            return [each]
        below = self._wrapped.get(each, ()) if depth <= _DEPTH_MAX else ()
        return [part for child in below for part in self._parts(child, depth + 1)]

    def _add_below(self, each: int, name: str, depth: int = 0) -> None:
        """Name the tensors in a variable, and in the containers in it."""
        if self._is_tensor(each):
            self._add("tensors", [(name, each)])
        elif each in self._containers and each not in self._named and depth <= _DEPTH_MAX:
            self._named.add(each)
            kind = self._containers[each].__name__
            for key, child in self._children.get(each, {}).items():
                under = f" under {key[:_KEY_MAX]!r}" if type(key) is str else ""
                self._add_below(child, f"{kind}{under} in {name}", depth + 1)

    def _add(self, kind: str, found: Iterable[NamedTensor]) -> None:
        """Name the storages of tensors, unless they have an owner already."""
        seen: set[int] = set()
        for name, tensor in resting(found):
            if tensor not in seen:  # shared by several modules
                seen.add(tensor)
                for part in self._parts(tensor):
                    self._own(kind, name, self._tensors[part][0], part)

    def _own(self, kind: str, name: str, place: Place, like: int) -> None:
        """Name a storage. Its tensor has the shape and dtype of the tensor `like`."""
        owner = self._owners.get(place)
        if owner is None:
            parts = self._parts(like)
            self._owners[place] = Owner(kind, name, *(self._tensors[parts[0]][1] if parts else ("", "")))
        elif owner.kind == kind and kind != "tensors" and owner.name != name:
            self._more[place] = self._more.get(place, 0) + 1


NamedTensor = Tuple[str, int]
"""A path and the id of a tensor."""
Children = Mapping[int, Dict[object, int]]
"""By the id of a holder: the ids of what it holds, by key."""

# Children of a module that wraps one other module: compiled modules, FSDP1, activation checkpointing. They are left out
# of paths, so that a parameter has the name that the model's author gave it.
_TRANSPARENT = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_PARALLEL = ("DistributedDataParallel", "DataParallel")
# Classes with KV caches: module, name, and the attribute that has the cache; empty if all attributes belong to it.
_CACHES = (
    ("transformers.cache_utils", "Cache", ""),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner", "kv_caches"),
    ("vllm.v1.worker.gpu.model_runner", "GPUModelRunner", "kv_caches"),
    ("sglang.srt.mem_cache.memory_pool", "KVCache", ""),
)
# The layers of a cache, which are instances in it.
_CACHE_PART = ("transformers.cache_utils", "CacheLayerMixin")


class Model(NamedTuple):
    """A module that no other module contains."""

    name: str
    """Its class; of the innermost module that others wrap."""
    parameters: list[NamedTensor]
    buffers: list[NamedTensor]


def models_of(modules: Mapping[int, str], children: Children) -> list[Model]:
    """Return the models that these modules belong to. A module that several models share is in the first of them."""

    def parts(module: int, attribute: str) -> Mapping[object, int]:
        return children.get(children.get(module, {}).get(attribute, 0), {})

    below = {child for module in modules for child in parts(module, "_modules").values()}
    models, seen = [], set()
    # Modules that contain each other have no root, so every module is tried.
    for root in (*(module for module in modules if module not in below), *modules):
        if root in seen:
            continue
        found = Model(modules[root], [], [])
        waiting = [(root, "")]
        while waiting:
            module, path = waiting.pop()
            if module in seen or module not in modules:
                continue
            seen.add(module)
            name = modules[module]
            found = found if path else found._replace(name=name)
            for tensors, kind in ((found.parameters, "_parameters"), (found.buffers, "_buffers")):
                tensors += [(f"{path}{key}", tensor) for key, tensor in parts(module, kind).items()]
            wrapped = (*_TRANSPARENT, "module") if name in _PARALLEL else _TRANSPARENT
            contained = reversed([*parts(module, "_modules").items()])
            waiting += [(child, path if key in wrapped else f"{path}{key}.") for key, child in contained]
        models.append(found)
    return models


def cache_types() -> dict[type, str]:
    """Return the loaded classes with KV caches, and the attribute that has the cache: see `_CACHES`."""
    return {kind: attribute for module, name, attribute in _CACHES for kind in _loaded(module, name)}


def _loaded(module: str, name: str) -> list[type]:
    """Return a class of a module that is loaded, and all classes that are derived from it."""
    kind = vars(sys.modules[module]).get(name) if module in sys.modules else None
    return subclasses(kind) if isinstance(kind, type) else []
