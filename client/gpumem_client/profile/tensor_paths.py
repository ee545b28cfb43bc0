"""Paths of the tensors in models, optimizers and KV caches, from what was read of them: ids and text only."""

from __future__ import annotations

import sys
from typing import Callable, Iterator, List, Mapping, NamedTuple, Tuple

from gpumem_client.objects.tensors import subclasses

NamedTensor = Tuple[str, int]
"""A path and the id of a tensor."""
Children = Mapping[int, List[Tuple[object, int]]]
"""By the id of a holder: the keys and ids of what it holds."""

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
_CACHE_PART = ("transformers.cache_utils", "CacheLayerMixin")
_NESTED_MAX = 4


class Model(NamedTuple):
    """A module that no other module contains."""

    name: str
    """Its class; of the innermost module that others wrap."""
    parameters: list[NamedTensor]
    buffers: list[NamedTensor]


def models_of(modules: Mapping[int, str], children: Children) -> list[Model]:
    """Return the models that these modules belong to. A module that several models share is in the first of them."""
    parts = {module: dict(children.get(module, ())) for module in modules}
    below = {child for own in parts.values() for _, child in children.get(own.get("_modules", 0), ())}
    roots = [module for module in modules if module not in below]
    seen: set[int] = set()
    # Modules that contain each other have no root, so every module is tried.
    return [_model(root, modules, parts, children, seen) for root in (*roots, *modules) if root not in seen]


def _model(
    root: int,
    modules: Mapping[int, str],
    parts: Mapping[int, Mapping[object, int]],
    children: Children,
    seen: set[int],
) -> Model:
    found = Model(modules[root], [], [])
    waiting = [(root, "")]
    while waiting:
        module, path = waiting.pop()
        own = parts.get(module)
        if own is None or module in seen:
            continue
        seen.add(module)
        name = modules[module]
        if not path:
            found = found._replace(name=name)
        for tensors, kind in ((found.parameters, "_parameters"), (found.buffers, "_buffers")):
            tensors += [(f"{path}{key}", tensor) for key, tensor in children.get(own.get(kind, 0), ())]
        wrapped = (*_TRANSPARENT, "module") if name in _PARALLEL else _TRANSPARENT
        contained = children.get(own.get("_modules", 0), [])
        waiting += [(child, path if key in wrapped else f"{path}{key}.") for key, child in reversed(contained)]
    return found


def cache_types() -> dict[type, str]:
    """Return the loaded classes with KV caches, and the attribute that has the cache: see `_CACHES`."""
    return {kind: attribute for module, name, attribute in _CACHES for kind in _loaded(module, name)}


def cache_part_types() -> list[type]:
    """Return the loaded classes of the layers of a KV cache."""
    return _loaded(*_CACHE_PART)


def nested_tensors(
    holder: int, name: str, is_tensor: Callable[[int], bool], children: Children, depth: int = 0
) -> Iterator[NamedTensor]:
    """Yield the tensors in an object and in what it holds, with their paths."""
    if is_tensor(holder):
        yield name, holder
    elif depth <= _NESTED_MAX:
        for key, child in children.get(holder, ()):
            yield from nested_tensors(child, f"{name}.{key}", is_tensor, children, depth + 1)


def _loaded(module: str, name: str) -> list[type]:
    """Return a class of a module that is loaded, and all classes that are derived from it."""
    kind = vars(sys.modules[module]).get(name) if module in sys.modules else None
    return subclasses(kind) if isinstance(kind, type) else []
