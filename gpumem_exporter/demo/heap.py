"""What the client's memory profiles read of a simulated process: its heap, its owners and its recordings."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, cast

from gpumem_client.allocator.allocator import Allocator
from gpumem_client.profile.aggregate import Naming
from gpumem_client.profile.heap_blocks import Block, DeviceBlocks, Stacks
from gpumem_client.profile.heap_reader import HeapReader
from gpumem_client.profile.profile_types import Owner
from gpumem_client.profile.recorder import Recorder
from gpumem_exporter.demo.process import DeviceSlot, SimulatedProcess, now_us

# The longest history of the standing recording on each device: about a minute of a program.
_STANDING_ENTRIES_MAX = 1000
_GARBAGE = Owner("tensors", "attribute outputs of a Result")


def take_profiles(process: SimulatedProcess, send: Callable[[bytes], str]) -> None:
    """Let a process take profiles from now on: for commands, and of its out-of-memory errors.

    `send` sends a document to the exporter and returns its id.
    """
    recorder = SimulatedRecorder(process.slots)
    recorder.start_standing()
    process.loop.take_profiles(lambda: (SimulatedHeap(process), recorder), send, at_oom=True)


class SimulatedHeap(HeapReader):
    """Reads the heap of a simulated process. Its tensors have the owners that the client would find."""

    def __init__(self, process: SimulatedProcess) -> None:
        # The inherited methods that are not replaced here use only what a simulated allocator has.
        super().__init__(None, cast("Allocator", process))
        self._process = process

    def blocks(self, stacks: Stacks, first: Callable[[], None] = lambda: None) -> dict[int, DeviceBlocks]:
        """Return the blocks of each device. `first` is called right before."""
        first()
        for slot in self._process.slots:
            slot.record("snapshot")
        return {index: _blocks(slot, stacks) for index, slot in enumerate(self._process.slots)}

    def entries_enough(self) -> int:
        """Return a number that no recording reaches: reading the history stops nobody."""
        return 1 << 40

    def history(self, stacks: Stacks) -> tuple[dict[int, DeviceBlocks], list[list[dict[str, Any]]]]:
        """Return the blocks of each device, and the recorded entries of each device, oldest first."""
        return self.blocks(stacks), [list(slot.trace or ()) for slot in self._process.slots]

    def naming(self, addresses_read: Callable[[], None] = lambda: None, **_: float) -> tuple[Naming, tuple[str, ...]]:
        """Return the owners of all tensors that objects of the program hold."""
        started_us = now_us()
        addresses_read()
        garbage = set(self._process.garbage)
        owners: dict[tuple[int, int], Owner] = {}
        addresses: dict[int, list[int]] = {}
        for index, slot in enumerate(self._process.slots):
            for tensor in slot.live:
                owner = tensor.owner or (_GARBAGE if tensor in garbage else None)
                if owner is not None:
                    owners[index, tensor.block.address] = owner
                    addresses.setdefault(index, []).append(tensor.block.address)
            addresses.get(index, []).sort()
        return Naming(started_us, now_us(), addresses, owners), ()


class SimulatedRecorder(Recorder):
    """The recordings of a simulated process, which has a standing one whenever there is no other one."""

    def __init__(self, slots: Sequence[DeviceSlot]) -> None:
        super().__init__(None)
        self._slots = slots

    @property
    def on(self) -> bool:
        """Whether a recording is on."""
        return self._slots[0].trace is not None

    @property
    def standing(self) -> bool:
        """Whether there is a history."""
        return self.on

    def start_standing(self) -> bool:
        """Record from now on."""
        for slot in self._slots:
            slot.trace = deque(maxlen=_STANDING_ENTRIES_MAX)
        return True

    def start(self, entries_max: int) -> None:  # noqa: ARG002 - as Recorder
        """Record for a profile, which ends before the history is too long. The history starts now."""
        for slot in self._slots:
            slot.trace = deque()

    def end(self, traces: object = None) -> None:  # noqa: ARG002 - as Recorder
        """End the recording for a profile."""
        self.start_standing()

    def replaced(self, traces: object = None) -> bool:  # noqa: ARG002 - as Recorder
        """Return False: a simulated program records nothing itself."""
        return False

    def close(self, traces: object = None) -> None:  # noqa: ARG002 - as Recorder
        """End all recordings."""
        for slot in self._slots:
            slot.trace = None


def _blocks(slot: DeviceSlot, stacks: Stacks) -> DeviceBlocks:
    """Return the blocks of one device. The size of a simulated block is also its requested size."""
    statistics = slot.allocator.statistics
    sizes = ((tensor, tensor.block.size_bytes) for tensor in slot.live)
    return DeviceBlocks(
        {t.block.address: Block(size, size, t.pool, stacks.number(t.stack)) for t, size in sizes},
        segments=statistics.segments_allocated - statistics.segments_freed,
        reserved_bytes=statistics.reserved_bytes,
        fragmented_bytes=statistics.reserved_bytes - statistics.allocated_bytes - slot.allocator.reclaimable_bytes,
    )
