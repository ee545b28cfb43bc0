"""Records every allocation of PyTorch code that runs on fake tensors.

A dispatch mode receives the results of each operator below autograd. A new storage is an allocation; the end of the
storage's life is a free. PyTorch's `MemTracker` works the same way but keeps only sums. The caching allocator depends
on the order of events.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from gpumem_exporter.training.planning.kernels import Kernels
from gpumem_exporter.training.planning.trace import Trace

__all__ = ["Tracer"]


_SINGLE_USE = 2
"""The use count of a storage with a single tensor, including the reference of this code."""


class Tracer(TorchDispatchMode):
    """Records into `trace` while the mode is active. Not thread-safe; autograd runs CPU graphs in the calling thread.

    Args:
        kernels: the temporaries of the operators' CUDA kernels.

    Attributes:
        kind: the kind of the next allocations (see trace.KINDS).
        in_backward: whether a backward pass runs.
        ignore_scalars: skip tensors without dimensions, because an optimizer's step counts stay on the host.
    """

    def __init__(self, kernels: Kernels) -> None:
        super().__init__()
        self.trace = Trace()
        self.kind = "activations"
        self.in_backward = False
        self.ignore_scalars = False
        self._kernels = kernels
        self._numbers: dict[int, int] = {}  # the number of the allocation, by storage
        self._storages: dict[int, int] = {}  # the number of storages that share an allocation, by its number

    def mark(self, tensors: Iterable[torch.Tensor], kind: str) -> None:
        """Set the kind of tensors. New ones are allocated now, as `.to(device)` does."""
        for tensor in tensors:
            self._record(tensor, kind)
            number = self._numbers.get(tensor.untyped_storage()._cdata)
            if number is not None:
                self.trace.kinds[number] = kind

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._adds_in_place(func, args):
            self._share(result, args[0])
        tensors = [tensor for tensor in tree_iter(result) if isinstance(tensor, torch.Tensor)]
        for tensor in reversed(tensors) if func is torch.ops.aten.native_dropout.default else tensors:
            self._record(tensor, self.kind)
        temporaries = [self.trace.allocate(n, "temporaries") for n in self._kernels.temporaries(func, args, result)]
        for number in reversed(temporaries):
            self.trace.free(number)
        return result

    def _record(self, tensor: torch.Tensor, kind: str) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._numbers or (self.ignore_scalars and tensor.dim() == 0):
            return
        size_bytes = int(storage.nbytes())
        if size_bytes:
            self._follow(storage, self.trace.allocate(size_bytes, kind))

    def _adds_in_place(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Whether autograd on a device adds a gradient in place (`InputBuffer::accumulate`).

        It does so if nothing else refers to the existing gradient, but never for tensor subclasses, such as fake
        tensors. In a recomputed forward pass, gradients are enabled.
        """
        if not self.in_backward or func is not torch.ops.aten.add.Tensor or torch.is_grad_enabled():
            return False
        if torch._C._current_autograd_node() is None:
            return False
        old, new = args[:2]
        if not (isinstance(new, torch.Tensor) and old.shape == new.shape and old.dtype == new.dtype):
            return False
        unshared = torch._C._storage_Use_Count(old.untyped_storage()._cdata) <= _SINGLE_USE
        return unshared and old._use_count() <= new._use_count()

    def _share(self, result: torch.Tensor, old: torch.Tensor) -> None:
        number = self._numbers.get(old.untyped_storage()._cdata)
        if number is not None:
            self._follow(result.untyped_storage(), number)

    def _follow(self, storage: Any, number: int) -> None:
        self._numbers[storage._cdata] = number
        self._storages[number] = self._storages.get(number, 0) + 1
        weakref.finalize(storage, self._free, storage._cdata, number).atexit = False

    def _free(self, key: int, number: int) -> None:
        if self._numbers.get(key) == number:
            del self._numbers[key]
        self._storages[number] -= 1
        if not self._storages[number]:
            self.trace.free(number)
