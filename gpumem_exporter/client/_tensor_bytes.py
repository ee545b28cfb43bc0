"""How many bytes of which device tensors stand for, whatever kinds of tensors they are. Touches no element.

Most tensors are plain, and there are thousands of them: those are taken a list at a time, with the loops in C. One list
costs about 0.3 µs a tensor.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["HOST", "Storages", "own_bytes"]

HOST = -1
"""Stands for the host's memory where the index of a device would; it is what PyTorch gives as a host tensor's index."""

_log = logging.getLogger("gpumem_exporter.client")

_DEPTH_MAX = 4
_PARTS = ("_indices", "_values", "crow_indices", "col_indices", "ccol_indices", "row_indices", "values")
"""What sparse layouts consist of; each has its own of them."""


class Storages:
    """Storages, each once, by the device that they lie on.

    An address is enough to tell them: those of all devices and of the host are one space to CUDA.

    Args:
        torch: the program's.
    """

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._sizes: dict[int, dict[int, int]] = {}

    def add(self, tensors: list[Any]) -> None:
        """Take down the storages of tensors of any kind."""
        try:
            _, devices, addresses, sizes = _measure(tensors, self._torch)
        except Exception:  # noqa: BLE001 - some of them are of another kind
            for part in _parts_of_all(tensors, self._torch):
                with contextlib.suppress(Exception):  # shows no storage
                    self._take(*_measure([part], self._torch)[1:])
        else:
            self._take(devices, addresses, sizes)

    def bytes(self, other: Storages | None = None) -> Mapping[int, int]:
        """Their bytes by device, but for those that others have taken down already."""
        told = {}
        for device, sizes in self._sizes.items():
            theirs = other.on(device) if other is not None else {}
            if sizes.keys().isdisjoint(theirs):
                told[device] = sum(sizes.values())
            else:
                told[device] = sum(sizes[address] for address in sizes.keys() - theirs.keys())
        return told

    def on(self, device: int) -> Mapping[int, int]:
        """Size by address of those on one device."""
        return self._sizes.get(device, {})

    def _take(self, devices: list[int], addresses: list[int], sizes: list[int]) -> None:
        if len({*devices}) == 1:
            self._sizes.setdefault(devices[0], {}).update(zip(addresses, sizes, strict=True))
        else:
            for device, address, size in zip(devices, addresses, sizes, strict=True):
                self._sizes.setdefault(device, {})[address] = size


def own_bytes(tensors: list[Any], torch: Any) -> Mapping[int, int]:
    """Bytes by device of tensors that share no element: gradients, which may lie in a bucket with others.

    They come and go between two looks, so that the address of one may be another's later: none is taken down. A
    storage that was resized to nothing counts nothing.
    """
    try:
        return _own_bytes(tensors, torch)
    except Exception:  # noqa: BLE001 - some of them are of another kind
        told: dict[int, int] = {}
        for part in _parts_of_all(tensors, torch):
            with contextlib.suppress(Exception):  # shows no storage
                for device, nbytes in _own_bytes([part], torch).items():
                    told[device] = told.get(device, 0) + nbytes
        return told


def _own_bytes(tensors: list[Any], torch: Any) -> Mapping[int, int]:
    tensors, devices, _, sizes = _measure(tensors, torch)
    told: dict[int, int] = {}
    for tensor, device, size in zip(tensors, devices, sizes, strict=True):
        told[device] = told.get(device, 0) + min(tensor.nbytes, size)
    return told


class _AnotherKindError(Exception):
    """Not a plain tensor with a storage of its own."""


def _measure(tensors: list[Any], torch: Any) -> tuple[list[Any], list[int], list[int], list[int]]:
    """The tensors that have a storage, with the device, address and size of each; raises where one is not plain.

    A subclass may consist of others: it must not be asked for a storage of its own. A storage on no device (meta) has
    no address, and is none.
    """
    if not {*map(type, tensors)} <= {torch.Tensor, torch.nn.Parameter}:
        raise _AnotherKindError
    storages = [tensor.untyped_storage() for tensor in tensors]
    addresses = [storage.data_ptr() for storage in storages]
    if not all(addresses):
        kept = [position for position, address in enumerate(addresses) if address]
        return _measure([tensors[position] for position in kept], torch)
    devices = [tensor.get_device() for tensor in tensors]
    return tensors, devices, addresses, [storage.nbytes() for storage in storages]


def _parts_of_all(tensors: list[Any], torch: Any) -> Iterator[Any]:
    for tensor in tensors:
        try:
            yield from _parts(tensor, torch, 0)
        except Exception as error:  # noqa: BLE001 - a subclass that does not say what it consists of
            _log.debug("a %s is not counted: %r", type(tensor), error)


def _parts(tensor: Any, torch: Any, depth: int) -> Iterator[Any]:
    """What a tensor consists of in memory: itself, a DTensor's local shard, the parts of a quantised or sparse one."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if depth > _DEPTH_MAX:
        return
    if flatten is not None:
        for name in flatten()[0]:
            yield from _parts(getattr(tensor, name), torch, depth + 1)
    elif tensor.layout is torch.strided:
        # as a plain tensor, of the same storage: a subclass without parts
        yield tensor if type(tensor) in (torch.Tensor, torch.nn.Parameter) else tensor.as_subclass(torch.Tensor)
    else:
        for name in _PARTS:
            with contextlib.suppress(RuntimeError, AttributeError):
                yield from _parts(getattr(tensor, name)(), torch, depth + 1)
