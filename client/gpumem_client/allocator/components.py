"""The memory of an inference engine's process: what is unmapped, and the components that the engine shows of itself.

torch_memory_saver and vLLM's sleep mode release the pages of live tensors and keep their addresses. They do so for
whole segments, in pools of their own. PyTorch's statistics do not change, and neither of the two records which segments
are released, so the driver is asked about the address of each segment. Processes without them ask nothing.

The components of an engine add up to the allocated bytes of the sample, and the unmapped ones to its unmapped bytes.
`other` is what the engine does not name: activations, workspaces, and the allocator's rounding.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from gpumem_client.allocator.heap_sum import PoolId, PoolSegment
from gpumem_client.engines.engine_state import CacheUse
from gpumem_client.wire.protocol import DeviceSample

_GRAPHS, _CACHE, _OTHER = "cuda_graphs", "kv_cache", "other"
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


def unmapped_in(segments: Collection[PoolSegment] | None) -> list[PoolSegment] | None:
    """Return the segments that are not mapped; None if the driver does not say. Any thread may call it."""
    if segments is None:
        return None
    if not can_unmap():
        return []
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


def with_components(
    sample: DeviceSample,
    held: Mapping[str, int],
    tags: Mapping[int, str],
    segments: Collection[PoolSegment],
    unmapped: Collection[PoolSegment],
    graph_pools: Collection[PoolId],
) -> DeviceSample:
    """Return the sample with the components of an engine; unchanged if the engine shows none.

    `held` are the bytes of tensors by component, `tags` the component of segments by address. `segments` are the
    segments of private pools; `unmapped` are the segments among them that have no memory.
    """
    allocated = sample.allocated_bytes
    if allocated is None or not (held or tags):
        return sample
    tagged = set(tags.values()) - {_OTHER}
    asleep = {segment.address for segment in unmapped}
    # A tag names the component of a whole segment, with the allocator's rounding: where there is one, it counts.
    mapped = {component: size for component, size in held.items() if component not in tagged}
    if mapped and any(segment.address not in tags for segment in unmapped):
        return replace(sample, component_bytes={})  # which tensors are unmapped is not known
    mapped.update(dict.fromkeys(tagged, 0))
    sleeping: dict[str, int] = {}
    for segment in segments:
        component = tags.get(segment.address, _GRAPHS if segment.pool in graph_pools else _OTHER)
        if segment.address in asleep:
            sleeping[component] = sleeping.get(component, 0) + segment.size_bytes
        elif component != _OTHER:
            mapped[component] = mapped.get(component, 0) + segment.allocated_bytes
    other = allocated - sum(mapped.values())
    if other < 0:  # the heap has changed since the walk that found the segments
        return replace(sample, component_bytes={})
    return replace(sample, component_bytes={**mapped, _OTHER: other}, component_unmapped_bytes=sleeping)


def with_cache_use(sample: DeviceSample, use: CacheUse | None) -> DeviceSample:
    """Return the sample with the bytes of the key-value cache by state, which add up to the bytes of the cache."""
    size = sample.component_bytes.get(_CACHE)
    if use is None or not size:
        return sample
    used = round(size * use.used)
    if use.evictable is None:
        return replace(sample, kv_cache_bytes={"used": used})
    # Each share is rounded on its own, so that their sum may exceed the cache by a byte.
    evictable = min(round(size * use.evictable), size - used)
    return replace(sample, kv_cache_bytes={"used": used, "evictable": evictable, "free": size - used - evictable})
