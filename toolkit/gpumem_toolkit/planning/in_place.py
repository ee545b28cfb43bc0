"""Operators that PyTorch runs in place on a device, but not under a dispatch mode.

Autograd adds gradients of the same tensor in place if nothing else refers to the first one (`input_buffer.cpp`). The
backward passes of indexing and `gather` fill new tensors in place. Under a dispatch mode they call the operators that
return a new tensor (`TensorSubclassLikeUtils.h`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["InPlace"]

_Counts: TypeAlias = "tuple[int, int, int]"
_aten: Any = torch.ops.aten
_OPERATORS = frozenset({_aten.add.Tensor, _aten.index_put.default, _aten.scatter_add.default})


class InPlace:
    """Recognizes the calls. Create it outside of dispatch modes, because it runs a backward pass."""

    def __init__(self) -> None:
        with torch.enable_grad(), FakeTensorMode(), _Counter() as counter:
            shared = torch.empty(2, requires_grad=True).exp()
            index = torch.zeros(2, dtype=torch.int64)
            torch.stack((shared.exp(), shared.tanh(), shared[index], shared.gather(0, index))).sum().backward()
        self._unshared = counter.counts  # of tensors that only autograd has; they depend on the release of PyTorch

    def target(self, func: Any, args: tuple[Any, ...]) -> Tensor | None:
        """Return the first argument if a device would change it in place, otherwise None."""
        if func not in _OPERATORS or torch.is_grad_enabled() or not isinstance(args[0], Tensor):
            return None
        return args[0] if _count(args) == self._unshared[func] and _is_dense(args[0]) else None


def _count(args: tuple[Any, ...]) -> _Counts:
    """Count the references to the first argument: its Python object, tensor and storage."""
    first = args[0]
    return sys.getrefcount(first), first._use_count(), torch._C._storage_Use_Count(first.untyped_storage()._cdata)


def _is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill the memory without gaps, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[Any, _Counts] = {}

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _OPERATORS:
            self.counts[func] = _count(args)
        return func(*args, **(kwargs or {}))
