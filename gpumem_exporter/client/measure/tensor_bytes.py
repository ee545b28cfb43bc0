"""How many bytes of which device tensors stand for, whatever kinds of tensors they are. Touches no element.

Most tensors are plain, and there are thousands of them: those are taken a list at a time, with the loops in C.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any

from gpumem_exporter.client.hooks.guest_safety import Swallowing, raised_by_signal_handler
from gpumem_exporter.client.log import log

__all__ = ["HOST", "Storages", "own_bytes", "plain"]

HOST = -1
"""Stands for the host's memory where the index of a device would; it is what PyTorch gives as a host tensor's index."""


_nbytes = attrgetter("nbytes")
_identity = attrgetter("_cdata")
_shard = attrgetter("_local_tensor")

_DEPTH_MAX = 4
_PARTS = ("_indices", "_values", "crow_indices", "col_indices", "ccol_indices", "row_indices", "values")
"""What sparse layouts consist of; each has its own of them."""


class Storages:
    """Storages, each once, by the device that they lie on.

    They are told apart by where PyTorch keeps what it knows of each. Their memory's addresses would not do: one whose
    memory was moved since would be taken for another that lies there now.

    Args:
        torch: the program's.
    """

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._sizes: dict[int, dict[int, int]] = {}

    def add(self, tensors: list[Any]) -> None:
        """Take down the storages of tensors of any kind."""
        try:
            _, devices, storages = _measure(tensors, self._torch)
        except Exception as error:  # some of them are of another kind
            if raised_by_signal_handler(error):
                raise
            for part in _parts_of_all(tensors, self._torch):
                with Swallowing():  # shows no storage
                    self._take(*_measure([part], self._torch)[1:])
        else:
            self._take(devices, storages)

    def update(self, other: Storages) -> None:
        """Take down those of others."""
        for device, sizes in other._sizes.items():
            self._sizes.setdefault(device, {}).update(sizes)

    def bytes(self, other: Storages | None = None) -> Mapping[int, int]:
        """Their bytes by device, but for those that others have taken down already."""
        told = {}
        for device, sizes in self._sizes.items():
            theirs = other.on(device) if other is not None else {}
            if sizes.keys().isdisjoint(theirs):
                told[device] = sum(sizes.values())
            else:
                told[device] = sum(sizes[storage] for storage in sizes.keys() - theirs.keys())
        return told

    def on(self, device: int) -> Mapping[int, int]:
        """Those on one device, and their sizes."""
        return self._sizes.get(device, {})

    def _take(self, devices: list[int], storages: list[Any]) -> None:
        if len({*devices}) == 1:
            self._sizes.setdefault(devices[0], {}).update(
                zip(map(_identity, storages), map(len, storages), strict=True)
            )
        else:
            for device, storage in zip(devices, storages, strict=True):
                self._sizes.setdefault(device, {})[_identity(storage)] = len(storage)


def own_bytes(tensors: list[Any], torch: Any) -> Mapping[int, int]:
    """Bytes by device of tensors that share no element: gradients, which may lie in a bucket with others.

    They come and go between two looks, so that one may be where another was: no storage is taken down. A storage that
    was resized to nothing counts nothing, and an element that is shown many times counts once.
    """
    try:
        return _own_bytes(tensors, torch)
    except Exception as error:  # some of them are of another kind
        if raised_by_signal_handler(error):
            raise
        told: dict[int, int] = {}
        for part in _parts_of_all(tensors, torch):
            with Swallowing():  # shows no storage
                for device, nbytes in _own_bytes([part], torch).items():
                    told[device] = told.get(device, 0) + nbytes
        return told


def _own_bytes(tensors: list[Any], torch: Any) -> Mapping[int, int]:
    tensors = plain(tensors, torch)
    devices = {*map(torch.Tensor.get_device, tensors)}
    if len(devices) == 1 and HOST not in devices:
        sizes = list(map(_nbytes, tensors))
        held = list(map(len, map(torch.Tensor.untyped_storage, tensors)))
        return {devices.pop(): sum(sizes if sizes == held else map(min, sizes, held))}
    told: dict[int, int] = {}
    for tensor, device, storage in zip(*_measure(tensors, torch), strict=True):
        told[device] = told.get(device, 0) + min(tensor.nbytes, len(storage))
    return told


def plain(tensors: list[Any], torch: Any) -> list[Any]:
    """The tensors, each with a storage of its own: a shard stands for a `DTensor`. Raises where one is of another kind.

    A subclass may consist of others: it must not be asked for a storage of its own.
    """
    if _all_plain(tensors, torch):
        return tensors
    sharded = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    tensors = [_shard(tensor) if type(tensor) is sharded else tensor for tensor in tensors]
    if _all_plain(tensors, torch):
        return tensors
    raise _AnotherKindError


def _all_plain(tensors: list[Any], torch: Any) -> bool:
    kinds = list(map(type, tensors))
    return kinds.count(torch.Tensor) + kinds.count(torch.nn.Parameter) == len(kinds)


class _AnotherKindError(Exception):
    """Not a plain tensor with a storage of its own."""


def _measure(tensors: list[Any], torch: Any) -> tuple[list[Any], list[int], list[Any]]:
    """The tensors that have a storage, with the device and storage of each; raises where one is not plain.

    A storage on no device (meta) has no address, and is none.
    """
    tensors = plain(tensors, torch)
    storages = list(map(torch.Tensor.untyped_storage, tensors))
    addresses = list(map(torch.UntypedStorage.data_ptr, storages))
    if not all(addresses):
        kept = [position for position, address in enumerate(addresses) if address]
        tensors, storages = [tensors[position] for position in kept], [storages[position] for position in kept]
    return tensors, list(map(torch.Tensor.get_device, tensors)), storages


def _parts_of_all(tensors: list[Any], torch: Any) -> Iterator[Any]:
    for tensor in tensors:
        try:
            yield from _parts(tensor, torch, 0)
        except Exception as error:  # a subclass that does not say what it consists of
            if raised_by_signal_handler(error):
                raise
            log.debug("a %s is not counted: %r", type(tensor), error)


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
