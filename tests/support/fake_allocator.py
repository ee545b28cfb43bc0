"""Replaces the reporter's access to torch in tests of timing."""

from __future__ import annotations

from typing import Any

from gpumem_client.allocator.unmapped import Unmapped
from gpumem_client.engines.engine_state import EngineFacts
from gpumem_client.wire.protocol import DeviceSample


class FakeAllocator:
    """One device; counts the calls."""

    torch_version = "2.0"
    settings = ""

    def __init__(self) -> None:
        self.looks = 0
        self.capturing = False
        self.flushing = False
        self.cleared = 0
        self.resets: list[int] = []
        self.reserved = 100
        self.freed = 0
        self.reclaimable: int | None = None
        self.retries = 0
        self.readings = 0
        self.error: Exception | None = None
        self.allocated_blocks: int | None = 0
        self.counted = 0
        self.facts: EngineFacts | None = None
        self.unmapped_memory: Unmapped | None = Unmapped(0, 0)

    def devices(self) -> list[int]:
        return [0]

    def uuid(self, index: int) -> str:
        return f"GPU-{index}"

    def samples(self) -> tuple[DeviceSample, ...]:
        self.looks += 1
        if self.error is not None:
            raise self.error
        return self._sample()

    def unused(self) -> tuple[DeviceSample, ...]:
        self.readings += 1
        return self._sample()

    def _sample(self) -> tuple[DeviceSample, ...]:
        return (
            DeviceSample(
                "GPU-0",
                reserved_bytes=self.reserved,
                reclaimable_bytes=self.reclaimable,
                alloc_retries=self.retries,
            ),
        )

    def engine(self) -> EngineFacts | None:
        if self.error is not None:
            raise self.error
        return self.facts

    def pinned_host_bytes(self) -> int | None:
        return None

    def state(self, index: int) -> dict[str, Any]:
        return {
            "reserved_bytes": {"current": self.reserved, "freed": self.freed},
            "allocated_bytes": {"current": 10},
        }

    def unmapped(self, index: int, state: object) -> Unmapped | None:
        return self.unmapped_memory

    def free_bytes(self, index: int) -> int | None:
        return 1000 - self.reserved

    def empty_cache(self) -> None:
        if self.error is not None:
            raise self.error
        self.cleared += 1
        self.freed += self.reserved - 10
        self.reserved = 10

    def reset_peak(self, index: int) -> None:
        self.resets.append(index)

    def allocations(self, index: int) -> tuple[int, int] | None:
        self.counted += 1
        return None if self.allocated_blocks is None else (self.allocated_blocks, 0)
