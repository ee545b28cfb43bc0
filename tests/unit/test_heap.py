from __future__ import annotations

from typing import Any

from gpumem_exporter.client._heap import returnable_bytes

MIB = 1 << 20


def _segment(*blocks: tuple[int, str], **changes: Any) -> dict[str, Any]:
    return {
        "device": 0,
        "total_size": sum(size for size, _ in blocks),
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "blocks": [{"size": size, "state": state} for size, state in blocks],
        **changes,
    }


def test_a_classic_segment_goes_back_whole_or_not_at_all() -> None:
    free = _segment((20 * MIB, "inactive"))
    split = _segment((5 * MIB, "active_allocated"), (15 * MIB, "inactive"))
    pending = _segment((20 * MIB, "active_pending_free"))
    assert returnable_bytes([free, split, pending]) == {0: 20 * MIB}


def test_of_an_expandable_segment_whole_pages_inside_free_blocks_go_back() -> None:
    segment = _segment(
        (5 * MIB, "active_allocated"),
        (50 * MIB, "inactive"),  # from 5 to 55 MiB: the page from 20 to 40 lies inside
        (5 * MIB, "active_allocated"),
        (40 * MIB, "inactive"),  # from 60 to 100 MiB: two pages
        is_expandable=True,
    )
    assert returnable_bytes([segment]) == {0: 60 * MIB}


def test_a_free_block_smaller_than_a_page_keeps_it() -> None:
    segment = _segment((3 * MIB, "active_allocated"), (19 * MIB, "inactive"), is_expandable=True)
    assert returnable_bytes([segment]) == {0: 0}


def test_pages_of_the_small_pool_are_smaller() -> None:
    segment = _segment((MIB, "active_allocated"), (5 * MIB, "inactive"), is_expandable=True, segment_type="small")
    assert returnable_bytes([segment]) == {0: 4 * MIB}


def test_private_pools_keep_what_they_have() -> None:
    assert returnable_bytes([_segment((20 * MIB, "inactive"), segment_pool_id=(0, 1))]) == {}


def test_devices_are_told_apart() -> None:
    segments = [_segment((MIB, "inactive")), _segment((2 * MIB, "inactive"), device=1)]
    assert returnable_bytes(segments) == {0: MIB, 1: 2 * MIB}
