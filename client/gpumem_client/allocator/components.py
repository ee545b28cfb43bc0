"""Splits the memory of an inference engine's process into components, from what the engine shows of itself.

Its components add up to the allocated bytes of the sample, and the unmapped ones to its unmapped bytes. `other` is what
the engine does not name: activations, workspaces, and the allocator's rounding.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from gpumem_client.allocator.heap_sum import PoolId, PoolSegment
from gpumem_client.engines.engine_state import CacheUse
from gpumem_client.wire.protocol import DeviceSample

_GRAPHS, _CACHE, _OTHER = "cuda_graphs", "kv_cache", "other"


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
