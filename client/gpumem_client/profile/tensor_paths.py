"""Paths of the tensors in models, and the classes of KV caches."""

from __future__ import annotations

import sys
from typing import Dict, Mapping, NamedTuple, Tuple

from gpumem_client.objects.tensors import subclasses

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


def cache_part_types() -> list[type]:
    """Return the loaded classes of the layers of a KV cache."""
    return _loaded(*_CACHE_PART)


def _loaded(module: str, name: str) -> list[type]:
    """Return a class of a module that is loaded, and all classes that are derived from it."""
    kind = vars(sys.modules[module]).get(name) if module in sys.modules else None
    return subclasses(kind) if isinstance(kind, type) else []
