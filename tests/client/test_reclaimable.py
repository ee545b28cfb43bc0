from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from gpumem_client.allocator.heap_sum import Heap, PoolSegment, read_heaps
from gpumem_client.allocator.reclaimable import Reclaimable


class Bench:
    """One device with a known heap; counts the walks over it."""

    def __init__(self, **options: Any) -> None:
        self.now = self.cpu = 100.0
        self.walks = 0
        self.walk_seconds = 0.001
        self.heaps: Mapping[int, Heap] | None = {}
        self.pools_version = 0
        self.reclaimable = Reclaimable(
            self.walk, lambda: self.pools_version, clock=lambda: self.now, cpu_clock=lambda: self.cpu, **options
        )

    def walk(self) -> Mapping[int, Heap] | None:
        self.walks += 1
        self.cpu += self.walk_seconds
        return self.heaps

    def look(self, state: dict[str, Any]) -> int | None:
        self.reclaimable.walk_if_due({0: state})
        return self.reclaimable.bytes(0, state)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def state(
    reserved: int = 100,
    allocated: int = 40,
    *,
    pending: int = 0,
    split: int = 10,
    private: int | None = 0,
    mapped: int = 0,
    blocks: int = 10,
    operations: int = 0,
) -> dict[str, Any]:
    """Statistics with these values; `operations` changes the counters of allocations and frees."""

    def stat(current: int) -> dict[str, Any]:
        return {"current": current, "allocated": current + operations, "freed": operations}

    made = {
        "reserved_bytes": {"current": reserved, "allocated": reserved, "freed": 0},
        "allocated_bytes": stat(allocated),
        "active_bytes": stat(allocated + pending),
        "inactive_split_bytes": stat(split),
        "segment": {"current": 5, "allocated": 5, "freed": 0},
        "active": stat(blocks),
        "num_device_alloc": 5 + mapped,
    }
    return made if private is None else {**made, "private_pools_bytes": private}


def test_classic_segments_need_one_walk_and_then_the_statistics_only(bench: Bench) -> None:
    for operations in range(100):
        assert bench.look(state(operations=operations)) == 50
        bench.now += 10
    assert bench.walks == 1


def test_a_heap_watched_from_its_start_needs_no_walk(bench: Bench) -> None:
    for reserved in (0, 100, 200):
        assert bench.look(state(reserved=reserved, allocated=0, split=0)) == reserved
        bench.now += 10
    assert bench.walks == 0


@pytest.mark.parametrize(
    "unsettled", [{"private": 20}, {"pending": 5}, {"mapped": 1}, {"private": None}], ids=lambda given: str(given)
)
def test_other_heaps_are_walked_once_while_unchanged(bench: Bench, unsettled: dict[str, Any]) -> None:
    bench.heaps = {0: Heap(reserved_bytes=100, allocated_bytes=40, private_bytes=20, returnable_bytes=33)}
    for _ in range(100):
        assert bench.look(state(**unsettled)) == 33
        bench.now += 10
    assert bench.walks == 1


def test_a_changing_heap_is_walked_after_500_times_the_duration_of_a_walk(bench: Bench) -> None:
    bench.heaps = {0: Heap(100, 40, expandable=True, returnable_bytes=33)}
    bench.walk_seconds = 1 / 1024
    for operations in range(100):
        bench.look(state(mapped=1, operations=operations))
        bench.now += 0.125
    assert bench.walks == 25  # each 500/1024 s: at every fourth of these


def test_between_walks_the_unreturnable_bytes_stay_the_same(bench: Bench) -> None:
    bench.heaps = {0: Heap(100, 40, expandable=True, returnable_bytes=33)}
    assert bench.look(state(mapped=1)) == 33
    assert bench.look(state(reserved=200, allocated=90, mapped=1, operations=1)) == 200 - 90 - 27
    assert bench.look(state(reserved=100, allocated=95, mapped=1, operations=2)) == 0
    assert bench.walks == 1


def test_a_heap_too_large_to_walk_is_unknown(bench: Bench) -> None:
    bench.heaps = {0: Heap(100, 40, expandable=True, returnable_bytes=33)}
    assert bench.look(state(mapped=1)) == 33
    bench.now += 1
    assert bench.look(state(mapped=1, blocks=20_001, operations=1)) is None
    assert bench.walks == 1
    assert bench.look(state(mapped=1, operations=2)) == 33


def test_segments_of_pools_are_known_until_a_pool_changes(bench: Bench) -> None:
    def pooled(freed: int = 0, **values: int) -> dict[str, Any]:
        stat = {"current": 20, "allocated": 20 + freed, "freed": freed}
        return {**state(private=20, **values), "reserved_bytes_by_private_pools": {(0, 1): {"all": stat}}}

    segments = [PoolSegment(0, 20, 10, (0, 1))]
    bench.heaps = {0: Heap(100, 40, private_bytes=20, pool_segments=segments)}
    bench.look(pooled())
    assert bench.reclaimable.pool_segments(0, pooled(reserved=200, operations=1)) == segments
    assert bench.reclaimable.pool_segments(0, pooled(freed=20)) is None


def test_unused_bytes_need_no_walk_for_memory_that_another_stream_uses(bench: Bench) -> None:
    pending = {**state(), "active_bytes": dict.fromkeys(("current", "allocated", "freed"), 45)}
    assert bench.reclaimable.bytes(0, pending) is None
    assert bench.reclaimable.unused_bytes(0, pending) == 100 - 45 - pending["inactive_split_bytes"]["current"]
    assert bench.walks == 0


MIB = 1 << 20


def _segment(*blocks: tuple[int, str], **changes: Any) -> dict[str, Any]:
    return {
        "device": 0,
        "address": 0,
        "total_size": sum(size for size, _ in blocks),
        "allocated_size": sum(size for size, state in blocks if state == "active_allocated"),
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "blocks": [{"size": size, "state": state} for size, state in blocks],
        **changes,
    }


def _expandable(*blocks: tuple[int, str], **changes: Any) -> dict[str, Any]:
    return _segment(*blocks, is_expandable=True, **changes)


def _returnable(*segments: dict[str, Any], **given: Any) -> int | None:
    return read_heaps(segments, **given)[0].returnable_bytes


def test_the_page_size_is_the_only_one_that_divides_the_segment_otherwise_unknown() -> None:
    blocks = (30 * MIB, "active_allocated"), (34 * MIB, "inactive")
    assert _returnable(_expandable(*blocks), large_pages={20 * MIB, 64 * MIB}) == 0
    either = _expandable((30 * MIB, "active_allocated"), (290 * MIB, "inactive"))
    assert _returnable(either, large_pages={64 * MIB}) == 256 * MIB
    assert _returnable(_segment((MIB, "inactive")), either, large_pages={20 * MIB, 64 * MIB}) is None


def test_a_pending_block_merges_with_its_free_neighbors() -> None:
    segment = _expandable(
        (MIB, "active_allocated"), (25 * MIB, "inactive"), (10 * MIB, "active_pending_free"), (4 * MIB, "inactive")
    )
    assert _returnable(segment) == 20 * MIB
