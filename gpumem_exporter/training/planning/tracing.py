"""Writes down every allocation of PyTorch code that runs on fake tensors.

A dispatch mode sees each operator below autograd with its results; a storage that it has not seen is an allocation, and
the end of that storage's life a free, exactly when reference counting frees it on a device. PyTorch's own `MemTracker`
works the same way, but keeps sums only, and the order of events is what an allocator's behaviour depends on.
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

_ALONE = 2
"""Holders of a storage that one tensor has: that tensor, and Python while it looks."""


class Tracer(TorchDispatchMode):
    """Records into `trace` while it is entered. Not thread-safe; autograd runs CPU graphs in the calling thread.

    Args:
        kernels: knows what the operators' CUDA kernels allocate for themselves.

    Attributes:
        kind: what allocations are for from now on (see trace.KINDS).
        in_backward: autograd is at work.
        ignore_scalars: leave tensors without dimensions out: an optimizer's step counts stay on the host.
    """

    def __init__(self, kernels: Kernels) -> None:
        super().__init__()
        self.trace = Trace()
        self.kind = "activations"
        self.ignore_scalars = False
        self.in_backward = False
        self._kernels = kernels
        self._numbers: dict[int, int] = {}
        self._holders: dict[int, int] = {}

    def hold(self, tensors: Iterable[torch.Tensor], kind: str) -> None:
        """Tell what tensors are for; those not seen yet are allocated here and now, as `.to(device)` does."""
        for tensor in tensors:
            self._see(tensor, kind)
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
            self._see(tensor, self.kind)
        temporaries = [self.trace.allocate(n, "temporaries") for n in self._kernels.temporaries(func, args, result)]
        for number in reversed(temporaries):
            self.trace.free(number)
        return result

    def _see(self, tensor: torch.Tensor, kind: str) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._numbers or (self.ignore_scalars and tensor.dim() == 0):
            return
        size_bytes = int(storage.nbytes())
        if size_bytes:
            self._follow(storage, self.trace.allocate(size_bytes, kind))

    def _adds_in_place(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Whether autograd, adding a gradient to one that it has, would write into the latter.

        It does so where nobody else holds that one (`InputBuffer::accumulate`), but never with tensors of a subclass,
        which fake ones are. In a recomputed forward pass, gradients are enabled.
        """
        if not self.in_backward or func is not torch.ops.aten.add.Tensor or torch.is_grad_enabled():
            return False
        if torch._C._current_autograd_node() is None:
            return False
        old, new = args[:2]
        if not (isinstance(new, torch.Tensor) and old.shape == new.shape and old.dtype == new.dtype):
            return False
        alone = torch._C._storage_Use_Count(old.untyped_storage()._cdata) <= _ALONE
        return alone and old._use_count() <= new._use_count()

    def _share(self, result: torch.Tensor, old: torch.Tensor) -> None:
        number = self._numbers.get(old.untyped_storage()._cdata)
        if number is not None:
            self._follow(result.untyped_storage(), number)

    def _follow(self, storage: Any, number: int) -> None:
        self._numbers[storage._cdata] = number
        self._holders[number] = self._holders.get(number, 0) + 1
        weakref.finalize(storage, self._gone, storage._cdata, number).atexit = False

    def _gone(self, key: int, number: int) -> None:
        if self._numbers.get(key) == number:
            del self._numbers[key]
        self._holders[number] -= 1
        if not self._holders[number]:
            self.trace.free(number)
