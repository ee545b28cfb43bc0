from __future__ import annotations

import pytest

from gpumem_client.allocator import unmapped
from gpumem_client.allocator.heap import PoolSegment
from gpumem_client.allocator.unmapped import Unmapped, unmapped_in, without_unmapped
from tests.support.builders import sample


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
    assert unmapped_in([PoolSegment(0, 10, 5), PoolSegment(1, 20, 15)]) == found


def test_a_sample_has_only_what_the_driver_holds() -> None:
    held = without_unmapped(sample(allocated=100, reclaimable=30, fragmented=20), Unmapped(90, 80))
    assert (held.reserved_bytes, held.allocated_bytes, held.reclaimable_bytes) == (60, 20, 30)
    assert held.unmapped_bytes == 90
