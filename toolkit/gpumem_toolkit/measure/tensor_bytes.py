"""Counts the bytes of tensors of any kind. Reads no element."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Any

from gpumem_client.guest_safety import guest_safety

HOST = -1
"""PyTorch's device index of a tensor in host memory."""

_identity = attrgetter("_cdata")
_DEPTH_MAX = 4
# Methods that return the parts of a sparse tensor; each layout has some of them.
_PARTS = ("_indices", "_values", "crow_indices", "col_indices", "ccol_indices", "row_indices", "values")


class Storages:
    """A set of storages with their sizes, by device."""

    def __init__(self, torch: Any, tensors: Iterable[Any] = ()) -> None:
        self._torch = torch
        self._sizes: dict[int, dict[int, int]] = {}
        self.add(tensors)

    def add(self, tensors: Iterable[Any]) -> None:
        """Add the storages of tensors of any kind. Tensors without a storage are ignored."""
        # By the address of the C++ object. The address of the memory is not enough: the memory of another storage may
        # lie there after a move.
        for tensor, storage in _with_storages(tensors, self._torch):
            self._sizes.setdefault(tensor.get_device(), {})[_identity(storage)] = len(storage)

    def bytes(self, other: Storages | None = None) -> Mapping[int, int]:
        """Return the bytes per device, without the storages that `other` contains too."""
        return {
            device: sum(size for storage, size in sizes.items() if other is None or not other.contains(device, storage))
            for device, sizes in self._sizes.items()
        }

    def total(self, device: int | None = None) -> int:
        """Return the bytes on a device, or on all devices."""
        return sum(sum(sizes.values()) for index, sizes in self._sizes.items() if device in (None, index))

    def contains(self, device: int, storage: int) -> bool:
        """Whether a storage was added, by the address of its C++ object."""
        return storage in self._sizes.get(device, ())


def bytes_of_unshared(tensors: Iterable[Any], torch: Any) -> Mapping[int, int]:
    """Return the bytes per device of tensors that share no element, such as gradients, which may share a bucket.

    An element that a tensor repeats counts once. A storage that was resized to zero counts as zero.
    """
    found: dict[int, int] = {}
    for tensor, storage in _with_storages(tensors, torch):
        device = tensor.get_device()
        found[device] = found.get(device, 0) + min(tensor.nbytes, len(storage))
    return found


def tensors_in(values: Iterable[Any], torch: Any) -> list[Any]:
    """Return the tensors among values, and in dictionaries, lists and tuples among them, up to four levels deep."""
    found: list[Any] = []
    for _ in range(_DEPTH_MAX + 1):
        nested: list[Any] = []
        for value in values:
            if isinstance(value, torch.Tensor):
                found.append(value)
            elif isinstance(value, dict):
                nested += value.values()
            elif isinstance(value, (list, tuple)):
                nested += value
        values = nested
    return found


def _with_storages(tensors: Iterable[Any], torch: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each plain tensor that has memory, with its storage. Other tensors are replaced by their parts."""
    plain = (torch.Tensor, torch.nn.Parameter)
    for tensor in tensors:
        storage = _storage(tensor) if type(tensor) in plain else None
        if storage is None:
            with guest_safety():  # skips a subclass whose code raises
                for part in _parts(tensor, torch, 0):
                    storage = _storage(part)
                    if storage is not None and storage.data_ptr():
                        yield part, storage
        elif storage.data_ptr():  # zero on the meta device and for freed memory
            yield tensor, storage


def _storage(tensor: Any) -> Any | None:
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None  # a sparse tensor


def _parts(tensor: Any, torch: Any, depth: int) -> Iterator[Any]:
    """Yield the plain tensors that a tensor consists of: the local shard of a DTensor, the parts of a sparse tensor."""
    if depth > _DEPTH_MAX:
        return
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        for name in flatten()[0]:
            yield from _parts(getattr(tensor, name), torch, depth + 1)
    elif tensor.layout is torch.strided:
        yield tensor.as_subclass(torch.Tensor)
    else:
        for name in _PARTS:
            with contextlib.suppress(RuntimeError, AttributeError):
                yield from _parts(getattr(tensor, name)(), torch, depth + 1)
