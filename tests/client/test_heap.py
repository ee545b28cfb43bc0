from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpumem_client.allocator import unmapped
from gpumem_client.allocator.heap_sum import PoolSegment, read_heaps
from gpumem_client.allocator.unmapped import Unmapped, unmapped_in, without_unmapped
from tests.support.builders import sample

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


def test_a_pending_block_merges_with_its_free_neighbors() -> None:
    segment = _expandable(
        (MIB, "active_allocated"), (25 * MIB, "inactive"), (10 * MIB, "active_pending_free"), (4 * MIB, "inactive")
    )
    assert _returnable(segment) == 20 * MIB


def test_the_page_size_is_the_only_one_that_divides_the_segment_otherwise_unknown() -> None:
    blocks = (30 * MIB, "active_allocated"), (34 * MIB, "inactive")
    assert _returnable(_expandable(*blocks), large_pages={20 * MIB, 64 * MIB}) == 0
    either = _expandable((30 * MIB, "active_allocated"), (290 * MIB, "inactive"))
    assert _returnable(either, large_pages={64 * MIB}) == 256 * MIB
    assert _returnable(_segment((MIB, "inactive")), either, large_pages={20 * MIB, 64 * MIB}) is None


@pytest.mark.parametrize(
    ("mapped", "found"),
    [
        ([True, True], Unmapped(0, 0)),
        ([True, False], Unmapped(20, 15)),
        (None, None),  # the driver does not say
    ],
)
def test_unmapped_memory_is_that_of_segments_without_pages(
    monkeypatch: pytest.MonkeyPatch, mapped: list[bool] | None, found: Unmapped | None
) -> None:
    monkeypatch.setattr(unmapped, "_mapped", lambda addresses: mapped)
    segments = PoolSegment(0, 10, 5, (0, 1)), PoolSegment(1, 20, 15, (0, 1)), PoolSegment(2, 40, 35, (0, 1), True)
    unmapped_segments = unmapped_in(segments)
    assert (None if unmapped_segments is None else Unmapped.of(unmapped_segments)) == found


def test_a_sample_has_only_what_the_driver_holds() -> None:
    counted = replace(sample(allocated=100, reclaimable=30, fragmented=20), component_bytes={"parameters": 100})
    held = without_unmapped(counted, Unmapped(90, 80))
    assert (held.reserved_bytes, held.allocated_bytes, held.reclaimable_bytes) == (60, 20, 30)
    assert held.unmapped_bytes == 90
    assert held.component_bytes == {}, "which of the tensors are unmapped is unknown"
    assert without_unmapped(counted, Unmapped(0, 0)).component_bytes == {"parameters": 100}
