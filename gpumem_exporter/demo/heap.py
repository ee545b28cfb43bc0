"""What the client's memory profiles read of a simulated process: its heap, its owners and its recordings."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, cast

from gpumem_client.allocator.allocator import Allocator
from gpumem_client.profile.aggregate import Naming
from gpumem_client.profile.heap_blocks import DeviceBlocks, Lifetime, Stacks
from gpumem_client.profile.heap_reader import HeapReader
from gpumem_client.profile.profile_types import Owner
from gpumem_client.profile.recorder import Recorder
from gpumem_exporter.demo.memory import TRACE_ENTRIES_MAX
from gpumem_exporter.demo.process import SimulatedProcess

# The kind and the name of the owner of a tensor, by its component. The number in a name counts the tensors of the kind.
_PARAMETER = "model.layers.{}.weight"
_OWNERS = {
    **dict.fromkeys(("parameters", "weights"), ("parameters", _PARAMETER)),
    "gradients": ("gradients", _PARAMETER),
    "optimizer_state": ("optimizer_state", f"Lion.exp_avg {_PARAMETER}"),
    "kv_cache": ("kv_cache", "GPUModelRunner.kv_caches.{}"),
    "runtime": ("tensors", "attribute _workspace_buffer of a FlashInferMetadataBuilder"),
}


def take_profiles(process: SimulatedProcess, send: Callable[[bytes], str]) -> None:
    """Let a process take profiles from now on: for commands, and of its out-of-memory errors.

    `send` sends a document to the exporter and returns its id.
    """
    parts = SimulatedHeap(process), SimulatedRecorder(process)
    process.loop.take_profiles(lambda: parts, send, at_oom=True)


class SimulatedHeap(HeapReader):
    """Reads the heap of a simulated process. Its tensors have the owners that the client would find."""

    def __init__(self, process: SimulatedProcess) -> None:
        # The inherited methods that are not replaced here use only what a simulated allocator has.
        super().__init__(None, cast("Allocator", process))
        self._process = process

    def blocks(self, stacks: Stacks, first: Callable[[], None] = lambda: None) -> dict[int, DeviceBlocks]:
        """Return the blocks of each device. `first` is called right before."""
        first()
        found = {}
        for index, slot in enumerate(self._process.slots):
            slot.record("snapshot")
            statistics = slot.allocator.statistics
            slack_bytes = statistics.reserved_bytes - statistics.allocated_bytes
            blocks = found[index] = DeviceBlocks(
                segments=statistics.segments_allocated - statistics.segments_freed,
                reserved_bytes=statistics.reserved_bytes,
                fragmented_bytes=slack_bytes - slot.allocator.reclaimable_bytes,
            )
            for tensor in slot.live:
                address, size = tensor.block.address, tensor.block.size_bytes  # in the demo also the requested size
                pool = "private" if tensor.private else "default"
                blocks.allocated[address] = Lifetime(address, size, size, pool, stacks.number(tensor.stack))
        return found

    def entries_enough(self) -> int:
        """Return a number that no recording reaches: reading the history stops nobody."""
        return 1 << 40

    def history(self, stacks: Stacks) -> tuple[dict[int, DeviceBlocks], list[list[dict[str, Any]]]]:
        """Return the blocks of each device, and the recorded entries of each device, oldest first."""
        return self.blocks(stacks), [list(slot.trace) for slot in self._process.slots]

    def naming(self, addresses_read: Callable[[], object] = lambda: None, **_: float) -> Naming:
        """Return the owners of all tensors that objects of the program hold."""
        started_us = time.time_ns() // 1000
        addresses_read()
        garbage = set(self._process.garbage)
        counts: Counter[str] = Counter()
        owners: dict[tuple[int, int], Owner] = {}
        for index, slot in enumerate(self._process.slots):
            for tensor in slot.live:
                if tensor in garbage:
                    owners[index, tensor.block.address] = Owner("tensors", "attribute outputs of a Result")
                elif tensor.component in _OWNERS:
                    kind, name = _OWNERS[tensor.component]
                    named = name.format(counts[kind]), f"4096x{tensor.block.size_bytes // 8192}", "bfloat16"
                    owners[index, tensor.block.address] = Owner(kind, *named)
                    counts[kind] += 1
        return Naming(started_us, time.time_ns() // 1000, owners)


class SimulatedRecorder(Recorder):
    """The recordings of a simulated process, whose allocator always records."""

    on = standing = True

    def __init__(self, process: SimulatedProcess) -> None:
        super().__init__(None)
        self._process = process

    def start(self, entries_max: int) -> None:  # noqa: ARG002 - as Recorder
        """Record for a profile. The history starts now."""
        for slot in self._process.slots:
            slot.trace = deque()

    def end(self) -> None:
        """End the recording for a profile. The standing recording continues."""
        for slot in self._process.slots:
            slot.trace = deque(slot.trace, TRACE_ENTRIES_MAX)
