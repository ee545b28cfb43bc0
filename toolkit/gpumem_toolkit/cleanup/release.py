"""Moves or frees what the user's code no longer needs on a device."""

from __future__ import annotations

import copy
import gc
import sys
from typing import Any

from gpumem_client.allocator.allocator import no_cuda
from gpumem_client.release import clear_cache
from gpumem_client.torch_access import initialized_torch, tensors_of_module


def release_model(model: Any = None, optimizer: Any = None) -> int:
    """Free the device memory of a model and an optimizer, also if other objects refer to them. Returns the bytes freed.

    Parameters, gradients and buffers become empty, and the optimizer loses its state. Neither can be used afterwards:
    save first what you need. Tensors that were made from them (`state_dict`, views, averaged weights) keep their
    memory. Then garbage and cache are released as in `clear_cache`.
    """
    torch = initialized_torch()
    if torch is None:
        no_cuda("release_model")
        return 0
    # In place, because the caller, a trainer or a scheduler may still refer to both.
    if optimizer is not None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        optimizer.state.clear()
    if model is not None:
        for module in model.modules():
            _empty(torch, module)
    gc.collect()
    return clear_cache()


def _empty(torch: Any, module: Any) -> None:
    for tensors in tensors_of_module(module):
        for name, tensor in list(tensors.items()):
            if tensor is None:
                continue
            tensor.grad = None
            if type(tensor) in (torch.Tensor, torch.nn.Parameter):
                # This also frees the memory if an optimizer or DDP refers to the same tensor.
                tensor.data = torch.empty(0, dtype=tensor.dtype)
            else:
                tensors[name] = None  # a DTensor or a quantized tensor: its parts cannot be replaced


def to_cpu(tree: Any) -> Any:
    """Return a copy of a tree of dictionaries, lists and tuples in which each CUDA tensor is on the host, detached.

    Use it for values that outlive a step, such as outputs and losses. A tensor that occurs twice is copied once. All
    other objects stay the same. The call waits for the device, as any copy to the host does.
    """
    torch = sys.modules.get("torch")
    return tree if torch is None else _copied(tree, torch, {})


def _copied(tree: Any, torch: Any, done: dict[int, Any]) -> Any:
    known = done.get(id(tree))
    if known is not None:
        return known
    result: Any = tree
    if isinstance(tree, torch.Tensor):
        result = tree.detach().to("cpu") if tree.is_cuda else tree
    elif isinstance(tree, dict):
        items = {key: _copied(value, torch, done) for key, value in tree.items()}
        result = items if type(tree) is dict else _like(tree, items)
    elif isinstance(tree, tuple):
        parts = [_copied(value, torch, done) for value in tree]
        result = type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
    elif isinstance(tree, list):
        result = [_copied(value, torch, done) for value in tree]
    done[id(tree)] = result
    return result


def _like(tree: Any, items: dict[Any, Any]) -> Any:
    """Return a mapping of the same class if it can be copied (OrderedDict, defaultdict, ModelOutput)."""
    try:
        result = copy.copy(tree)
        for key, value in items.items():
            result[key] = value
    except Exception:  # noqa: BLE001 - a class of another library: a plain dictionary has the same content
        return items
    return result
