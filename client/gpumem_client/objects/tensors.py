"""Reads CUDA tensors without running code of their classes: device, storage, shape and dtype."""

from __future__ import annotations

import gc
from typing import Any

from gpumem_client import torch_access

_DEPTH_MAX = 4


class TensorReader:
    """Reads tensors through torch's base class. Only within `torch_access.without_torch_function`."""

    def __init__(self, torch: Any) -> None:
        self.base = torch_access.tensor_base_class(torch)
        self._address = torch_access.storage_address(torch)
        self.all_types = frozenset(subclasses(torch.Tensor))
        # The types whose tensors have a storage that can be read. The others wrap tensors of these types.
        self.types = frozenset(
            kind
            for kind in self.all_types
            if not any(
                "__torch_dispatch__" in base.__dict__ for base in kind.__mro__[: kind.__mro__.index(torch.Tensor)]
            )
        )

    def parts(self, value: Any, depth: int = 0) -> list[Any]:
        """Return the readable tensors that a tensor consists of: itself, or what a wrapper such as a DTensor wraps."""
        kind = type(value)
        if kind in self.types:
            return [value]
        if depth > _DEPTH_MAX or not (kind in self.all_types or kind is dict):
            return []
        # A wrapper has its tensors in slots or in its dictionary.
        return [part for each in gc.get_referents(value) for part in self.parts(each, depth + 1)]

    def is_cuda(self, tensor: Any) -> bool:
        """Whether a tensor is on a CUDA device."""
        found: bool = self.base.is_cuda.__get__(tensor)
        return found

    def place(self, tensor: Any) -> tuple[int, int] | None:
        """Return the device of a tensor on a CUDA device, and the address at which its storage starts.

        Any thread may call this while others train. None without memory, and for sparse tensors.
        """
        if not self.is_cuda(tensor):
            return None
        # Not from `untyped_storage`: its Python object, released beside autograd's threads, crashes the process with
        # torch 2.15 ("use_count() == 1 INTERNAL ASSERT FAILED").
        try:
            address = self._address(tensor)
        except (RuntimeError, NotImplementedError):
            return None  # the parts of a sparse tensor are separate tensors
        return (self.base.get_device(tensor), address) if address else None

    def shape(self, tensor: Any) -> tuple[int, ...] | None:
        """Return the shape of a tensor; None for a nested one, whose buffers are separate tensors."""
        try:
            return tuple(self.base.size(tensor))
        except RuntimeError:
            return None


def subclasses(kind: type) -> list[type]:
    """Return a class and all classes that are derived from it."""
    found, seen = [kind], {id(kind)}  # ids, because a metaclass may make its classes unhashable
    for each in found:
        derived: list[type] = type.__subclasses__(each)
        new = [below for below in derived if id(below) not in seen]
        seen.update(map(id, new))
        found += new
    return found
