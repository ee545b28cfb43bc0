"""Paths of the tensors in models, optimizers and KV caches.

Reads them through the interpreter's own descriptors, so it runs none of the user's code.
"""

from __future__ import annotations

import sys
from typing import Any, Callable, Collection, Iterator, Mapping, NamedTuple, Tuple

from gpumem_client.objects.referrers import instance_dictionary, items_of
from gpumem_client.objects.tensors import subclasses

NamedTensor = Tuple[str, Any]

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
_CACHE_PARTS = (("transformers.cache_utils", "CacheLayerMixin"), ("transformers.cache_utils", "Cache"))
_NESTED_MAX = 4


class Model(NamedTuple):
    """A module that no other module contains."""

    name: str
    """Its class; of the innermost module that others wrap."""
    parameters: list[NamedTensor]
    buffers: list[NamedTensor]


def models_of(modules: Collection[Any]) -> list[Model]:
    """Return the models that these modules belong to. A module that several models share is in the first of them."""
    dictionaries = {id(module): instance_dictionary(module) or {} for module in modules}
    below = {id(child) for own in dictionaries.values() for _, child in items_of(own.get("_modules"))}
    roots = [module for module in modules if id(module) not in below]
    seen: set[int] = set()
    # Modules that contain each other have no root, so every module is tried.
    return [_model(root, dictionaries, seen) for root in (*roots, *modules) if id(root) not in seen]


def _model(root: Any, dictionaries: Mapping[int, Mapping[str, Any]], seen: set[int]) -> Model:
    found = Model(class_name(root), [], [])
    waiting = [(root, "")]
    while waiting:
        module, path = waiting.pop()
        own = dictionaries.get(id(module))
        if own is None or id(module) in seen:
            continue
        seen.add(id(module))
        if not path:
            found = found._replace(name=class_name(module))
        for tensors, kind in ((found.parameters, "_parameters"), (found.buffers, "_buffers")):
            tensors += [(path + key, tensor) for key, tensor in items_of(own.get(kind)) if tensor is not None]
        wrapped = (*_TRANSPARENT, "module") if class_name(module) in _PARALLEL else _TRANSPARENT
        children = items_of(own.get("_modules"))
        waiting += [(child, path if key in wrapped else f"{path}{key}.") for key, child in reversed(children)]
    return found


def cache_types() -> dict[type, str]:
    """Return the loaded classes with KV caches, and the attribute that has the cache: see `_CACHES`."""
    return {kind: attribute for module, name, attribute in _CACHES for kind in _loaded(module, name)}


def cached_tensors(cache: Any, attribute: str, is_tensor: Callable[[Any], bool]) -> Iterator[NamedTensor]:
    """Yield the tensors of a KV cache."""
    parts = [kind for place in _CACHE_PARTS for kind in _loaded(*place)]
    own = instance_dictionary(cache) or {}
    if attribute:
        return nested_tensors(own.get(attribute), f"{class_name(cache)}.{attribute}", is_tensor, parts)
    return nested_tensors(own, class_name(cache), is_tensor, parts)


def nested_tensors(
    value: Any, name: str, is_tensor: Callable[[Any], bool], parts: Collection[type] = (), depth: int = 0
) -> Iterator[NamedTensor]:
    """Yield the tensors in dictionaries, lists, tuples and instances of the types `parts`, with their paths."""
    if is_tensor(value):
        yield name, value
    elif depth <= _NESTED_MAX:
        value = instance_dictionary(value) if type(value) in parts else value
        items = enumerate(list(value)) if type(value) in (list, tuple) else items_of(value)
        for key, each in items:
            yield from nested_tensors(each, f"{name}.{key}", is_tensor, parts, depth + 1)


def class_name(instance: Any) -> str:
    """Return the name of the class of an instance."""
    return type(instance).__qualname__


def _loaded(module: str, name: str) -> list[type]:
    """Return a class of a module that is loaded, and all classes that are derived from it."""
    kind = vars(sys.modules[module]).get(name) if module in sys.modules else None
    return subclasses(kind) if isinstance(kind, type) else []
