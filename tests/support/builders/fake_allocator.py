"""Replaces the reporter's access to torch in tests of timing."""

from __future__ import annotations

from typing import Any, cast

from gpumem_client.allocator.components import Unmapped
from gpumem_client.allocator.sampler import Sampler
from gpumem_client.commands.executor import Executor
from gpumem_client.commands.scheduler import Scheduler
from gpumem_client.engines.engine_state import EngineFacts
from gpumem_client.engines.sleep import CoreMemory
from gpumem_client.wire.protocol import Command, CommandResult, DeviceSample


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


class CommandBench:
    """A process at step 0 that runs commands, with a manual clock and a count of the reporter's wakeups."""

    def __init__(self, engine: CoreMemory | None = None) -> None:
        self.now = 100.0
        self.woken = 0
        self.allocator = cast("Any", FakeAllocator())
        self.sampler = Sampler(self.allocator, swallow=lambda error: None, clock=lambda: self.now)
        self.collected = 0
        self.executor = Executor(
            self.allocator,
            self.sampler,
            engine=lambda: engine,
            collect_garbage=self._collect_garbage,
            clock=lambda: self.now,
        )
        self.scheduler = Scheduler(self.executor, self.allocator, self.sampler, wake=self.wake, clock=lambda: self.now)
        self.sampler.at_step = self.scheduler.at_step

    def wake(self) -> None:
        self.woken += 1

    def _collect_garbage(self) -> None:
        self.collected += 1

    def run(self, action: str = "empty_cache", id: str = "a", **changes: Any) -> CommandResult:
        """Run a command at once."""
        command = Command(id=id, action=action, **{"deadline_seconds": 30.0, **changes})
        result = self.executor.run(command, expires_seconds=self.now + command.deadline_seconds)
        assert result is not None
        return result

    def add(self, mode: str = "step", command_id: str = "a", **changes: Any) -> None:
        command = Command(command_id, **{"action": "empty_cache", "deadline_seconds": 30.0, "mode": mode, **changes})
        self.scheduler.add(command, expires_seconds=self.now + command.deadline_seconds)

    def steps(self, count: int = 1) -> None:
        for _ in range(count):
            self.now += 0.1
            self.sampler.on_step(None)

    def result(self) -> CommandResult:
        (result,) = self.executor.undelivered
        self.executor.undelivered.clear()
        return result
