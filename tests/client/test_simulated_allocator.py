from __future__ import annotations

import contextlib
from collections.abc import Iterator
from random import Random

from gpumem_client.allocator.simulated import Block, CachingAllocator, SimulatedOutOfMemoryError

MIB = 1 << 20

# The statistics of torch 2.15.0 for the operations of `drive(…, 7, 2000)`, after every 200 of them, from its own
# caching allocator on a device with 1280 MiB free. The columns are COLUMNS and the decrease of the free memory.
COLUMNS = (
    "allocated_bytes",
    "reserved_bytes",
    "active_bytes",
    "inactive_split_bytes",
    "requested_bytes",
    "allocated_peak_bytes",
    "reserved_peak_bytes",
    "alloc_retries",
    "ooms",
    "segments_allocated",
    "segments_freed",
    "cache_flushes",
)
FREE_AT_FIRST = 1342177280
TORCH_CLASSIC = """
809553920 1210056704 809553920 249507840 808405241 1223104000 1337982976 4 1 21 6 4 1210056704
1008535552 1275068416 1008535552 266532864 1005370005 1223104000 1337982976 13 9 31 13 15 1275068416
960591872 1300234240 960591872 339642368 954737963 1223104000 1337982976 22 17 35 14 27 1300234240
848932864 1293942784 848932864 442912768 845301770 1223104000 1337982976 33 26 39 19 39 1293942784
975222272 1312817152 975222272 337594880 966673751 1223104000 1337982976 57 50 40 22 64 1312817152
1025595392 1337982976 1025595392 312387584 1018581732 1223104000 1337982976 70 63 42 24 77 1337982976
570708992 1342177280 570708992 570141696 568097712 1223104000 1342177280 80 73 46 29 87 1342177280
618827776 1321205760 618827776 404582400 617781051 1223104000 1342177280 87 79 49 35 96 1321205760
781794816 1321205760 781794816 539410944 777285049 1223104000 1342177280 93 85 51 37 102 1321205760
999291392 1319108608 999291392 319817216 996125442 1223104000 1342177280 109 101 51 38 120 1319108608
"""


class Memory:
    def __init__(self, free_bytes: int) -> None:
        self.free_bytes = free_bytes

    def allocate(self, size_bytes: int) -> bool:
        if size_bytes > self.free_bytes:
            return False
        self.free_bytes -= size_bytes
        return True

    def free(self, size_bytes: int) -> None:
        self.free_bytes += size_bytes


def drive(allocator: CachingAllocator, seed: int, count: int) -> Iterator[None]:
    """Allocate, free and clear at random, and yield after each. Python guarantees the values of `random()`."""
    rng = Random(seed)
    live: list[Block] = []
    for _ in range(count):
        draw = rng.random()
        if draw < 0.005:
            allocator.empty_cache()
        elif draw < 0.54 or not live:
            kind = rng.random()
            if kind < 0.3:
                size_bytes = 1 + int(rng.random() * MIB)
            elif kind < 0.7:
                size_bytes = int(rng.random() * 12 * MIB) + MIB
            else:
                size_bytes = int(rng.random() * 150 * MIB) + 10 * MIB
            with contextlib.suppress(SimulatedOutOfMemoryError):
                live.append(allocator.allocate(size_bytes))
        else:
            allocator.free(live.pop(int(rng.random() * len(live))))
        yield


def test_the_model_has_the_statistics_of_pytorch_for_the_same_operations() -> None:
    memory = Memory(FREE_AT_FIRST)
    allocator = CachingAllocator(memory)
    rows = []
    for done, _ in enumerate(drive(allocator, 7, 2000), start=1):
        if done % 200 == 0:
            row = [getattr(allocator.statistics, column) for column in COLUMNS]
            rows.append(" ".join(map(str, [*row, FREE_AT_FIRST - memory.free_bytes])))
    assert rows == TORCH_CLASSIC.strip().splitlines()


def test_a_clear_does_not_release_the_private_pool_of_a_graph() -> None:
    allocator = CachingAllocator(Memory(FREE_AT_FIRST))
    allocator.allocate(101 * MIB, private=True)
    allocator.free(allocator.allocate(50 * MIB))
    assert allocator.reclaimable_bytes == 50 * MIB
    assert allocator.empty_cache() == 50 * MIB
    assert (allocator.statistics.private_pools_bytes, allocator.statistics.reserved_bytes) == (102 * MIB, 102 * MIB)
