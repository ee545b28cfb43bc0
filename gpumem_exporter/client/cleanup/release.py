"""Takes what a program has done with off the device."""

from __future__ import annotations

import gc
import sys
from typing import Any

from gpumem_exporter.client.allocator.attached import no_cuda
from gpumem_exporter.client.allocator.statistics import initialised_torch
from gpumem_exporter.client.cleanup.clear import clear_cache

__all__ = ["release_model", "to_cpu"]


def release_model(model: Any = None, optimizer: Any = None) -> int:
    """Free a model's and an optimizer's device memory, whoever still refers to them. Returns the bytes freed.

    Parameters, gradients and buffers become empty, and the optimizer's state goes: neither can be used any more, so
    save first what is to be kept. Tensors that the program made of them (`state_dict`, views, averaged weights)
    keep theirs. Then the garbage and the cache go, as in `clear_cache`.

    Args:
        model: a `torch.nn.Module`, wrapped ones included.
        optimizer: a `torch.optim.Optimizer`.
    """
    torch = initialised_torch()
    if torch is None:
        no_cuda("release_model")
        return 0
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
    for held in (module._parameters, module._buffers):
        for name, tensor in list(held.items()):
            if tensor is None:
                continue
            tensor.grad = None
            if type(tensor) in (torch.Tensor, torch.nn.Parameter):
                # Whoever holds the same tensor object (an optimizer, a reducer of DDP's) is freed of its memory, too.
                tensor.data = torch.empty(0, dtype=tensor.dtype)
            else:
                held[name] = None  # a DTensor, a quantised one: its parts cannot be exchanged


def to_cpu(tree: Any) -> Any:
    """The same tree of dictionaries, lists and tuples with each CUDA tensor copied to the host, without its graph.

    What is kept of a step (outputs, losses) then holds no device memory. A tensor that stands in it twice is copied
    once. Everything else stays as it is. Waits for the device, as any copy to the host does.
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
    """A mapping of the same class where that can be copied (OrderedDict, defaultdict, ModelOutput)."""
    import copy

    try:
        result = copy.copy(tree)
        for key, value in items.items():
            result[key] = value
    except Exception:  # noqa: BLE001 - classes of other libraries: a plain dictionary carries the same
        return items
    return result
