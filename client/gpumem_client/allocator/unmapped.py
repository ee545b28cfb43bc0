"""Finds the memory of private pools that PyTorch counts and the driver does not hold.

torch_memory_saver and vLLM's sleep mode release the pages of live tensors and keep their addresses. They do so for
whole segments, in pools of their own. PyTorch's statistics do not change, and neither of the two records which segments
are released, so the driver is asked about the address of each segment. Processes without them ask nothing.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import NamedTuple

from gpumem_client.allocator.heap_sum import PoolSegment
from gpumem_client.wire.protocol import DeviceSample

_MODULES = ("torch_memory_saver", "vllm.device_allocator.cumem")
# `CU_POINTER_ATTRIBUTE_MAPPED`: 1 if the address is mapped to memory, otherwise 0.
_MAPPED = 13
_SUCCESS, _INVALID_VALUE = 0, 1
# At one to two microseconds for each segment, more would exceed the reporter's share of a core.
_SEGMENTS_MAX = 1000


class Unmapped(NamedTuple):
    """The memory of segments that are not mapped."""

    reserved_bytes: int
    allocated_bytes: int

    @classmethod
    def of(cls, segments: Collection[PoolSegment]) -> Unmapped:
        """Return the sum of these segments."""
        return cls(sum(each.size_bytes for each in segments), sum(each.allocated_bytes for each in segments))


def can_unmap() -> bool:
    """Whether the process has loaded a library that releases the pages of live tensors."""
    return not sys.modules.keys().isdisjoint(_MODULES)


def unmapped_in(segments: Collection[PoolSegment]) -> list[PoolSegment] | None:
    """Return the segments that are not mapped; None if the driver does not say. Any thread may call it."""
    # Both libraries unmap only classic segments, and as a whole: so one address of each segment is enough.
    classic = [segment for segment in segments if not segment.expandable]
    if len(classic) > _SEGMENTS_MAX:
        return None
    mapped = _mapped([segment.address for segment in classic])
    return None if mapped is None else [segment for segment, is_mapped in zip(classic, mapped) if not is_mapped]


def without_unmapped(sample: DeviceSample, unmapped: Unmapped | None) -> DeviceSample:
    """Return a sample of PyTorch's statistics without the memory that the driver does not hold.

    If that memory is unknown, so are the bytes that the driver holds. The peaks, active and requested bytes stay as
    PyTorch counts them. The sample has no components.
    """
    if unmapped is None:
        return replace(
            sample,
            allocated_bytes=None,
            reserved_bytes=None,
            reclaimable_bytes=None,
            private_pools_bytes=None,
            component_bytes={},
        )
    if not unmapped.reserved_bytes or sample.reserved_bytes is None or sample.allocated_bytes is None:
        return replace(sample, unmapped_bytes=unmapped.reserved_bytes)
    reserved = max(0, sample.reserved_bytes - unmapped.reserved_bytes)
    allocated = min(reserved, max(0, sample.allocated_bytes - unmapped.allocated_bytes))
    reclaimable, pools = sample.reclaimable_bytes, sample.private_pools_bytes
    return replace(
        sample,
        unmapped_bytes=unmapped.reserved_bytes,
        reserved_bytes=reserved,
        allocated_bytes=allocated,
        reclaimable_bytes=None if reclaimable is None else min(reclaimable, reserved - allocated),
        private_pools_bytes=None if pools is None else max(0, pools - unmapped.reserved_bytes),
        component_bytes={},  # they were counted from live tensors, and which of these are unmapped is not known
    )


def _mapped(addresses: Iterable[int]) -> list[bool] | None:
    """Return whether each address is mapped to memory; None if the driver does not say."""
    try:
        attribute = _pointer_attribute()
    except (OSError, AttributeError):
        return None
    value, found = ctypes.c_uint(), []
    for address in addresses:
        code = attribute(ctypes.addressof(value), _MAPPED, address)
        if code not in (_SUCCESS, _INVALID_VALUE):
            return None
        found.append(code == _SUCCESS and bool(value.value))
    return found


@functools.lru_cache(maxsize=None)
def _pointer_attribute() -> Callable[[int, int, int], int]:
    """Return `cuPointerGetAttribute` of the library that CUDA has loaded in this process."""
    function = ctypes.CDLL("libcuda.so.1").cuPointerGetAttribute
    function.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64)
    return function
