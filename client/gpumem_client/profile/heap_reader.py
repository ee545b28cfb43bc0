"""Reads what a profile needs of torch's allocator: blocks, history, rules and owners. Measures the pauses."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from gpumem_client import torch_access
from gpumem_client.allocator.allocator import Allocator
from gpumem_client.allocator.reclaimable import known
from gpumem_client.profile.aggregate import Naming
from gpumem_client.profile.heap_blocks import DeviceBlocks, Stacks, read_blocks
from gpumem_client.profile.lifetimes import SplitRules
from gpumem_client.profile.owners import name_storages
from gpumem_client.profile.profile_types import ProfiledDevice
from gpumem_client.uninterrupted import Slices
from gpumem_client.wire.errors import CommandRefusedError
from gpumem_client.wire.reason_codes import ReasonCode

PAUSE_SECONDS_MAX = 1.0
_BLOCK_SECONDS = 2e-6
# The reading of holders, and the slices of the search for referrers, each of which lists all objects again.
_OBJECT_SECONDS, _SEARCHED_OBJECT_SECONDS = 2e-7, 4e-7
# The bounds of the number of entries at which a recording ends, and the objects of the process for each.
_ENTRIES_MIN, _ENTRIES_MAX, _OBJECTS_OF_ENTRY = 10_000, 60_000, 20
_Result = TypeVar("_Result")


class HeapReader:
    """Reads one process' allocator, in the reporter's thread.

    `exclusively` is the sampler's lock: a step must not take a snapshot in between.
    """

    def __init__(
        self,
        torch: Any,
        allocator: Allocator,
        *,
        exclusively: AbstractContextManager[Any] = nullcontext(),  # noqa: B008 - has no state
    ) -> None:
        self._torch = torch
        self._allocator = allocator
        self._exclusively = exclusively
        self._slices = Slices(torch_access.stopping, self._paused)
        self.pause_seconds = 0.0
        """The longest time that the interpreter has stood still since this was set to 0."""

    def blocks(self, stacks: Stacks, first: Callable[[], None] = lambda: None) -> dict[int, DeviceBlocks]:
        """Return the blocks of each device whose UUID is known. `first` is called right before.

        Raises:
            CommandRefusedError: this allocator has no snapshot.
        """
        with self._exclusively:
            first()
            segments = self._read(torch_access.snapshot_segments)
        return self._blocks(segments, stacks)

    def history(self, stacks: Stacks) -> tuple[dict[int, DeviceBlocks], list[list[dict[str, Any]]]]:
        """Return the blocks of each device, and the recorded entries of each device index, oldest first.

        The last entry `snapshot` marks the snapshot that has the blocks.

        Raises:
            CommandRefusedError: this allocator has no snapshot.
        """
        with self._exclusively:
            segments = self._read(torch_access.snapshot_segments)
            traces = self._read(torch_access.snapshot_traces)
        return self._blocks(segments, stacks), traces

    def naming(self, addresses_read: Callable[[], object] = lambda: None, **options: float) -> Naming:
        """Name the owners of all storages: see `name_storages`, which has these options."""
        return name_storages(self._torch, self._slices, addresses_read=addresses_read, **options)

    def profiled(self, index: int, blocks: DeviceBlocks, peak_bytes: int | None = None) -> ProfiledDevice:
        """Return a device with the bytes of its blocks."""
        return ProfiledDevice(
            uuid=self._allocator.uuid(index),
            allocated_bytes=sum(block.size_bytes for block in blocks.allocated.values()),
            reserved_bytes=blocks.reserved_bytes,
            peak_bytes=peak_bytes,
            segments=blocks.segments,
            fragmented_bytes=blocks.fragmented_bytes,
        )

    def split_rules(self, index: int) -> SplitRules:
        """Return the rules for the sizes of blocks that the allocator's settings set."""
        settings = self._allocator.settings.replace(" ", "")
        most = (self._allocator.state(index) or {}).get("max_split_size", -1)
        return SplitRules(
            expandable=re.search(r"\bexpandable_segments:True\b", settings, re.IGNORECASE) is not None,
            max_split_bytes=most if most > 0 else None,
            known="roundup_power2_divisions" not in settings,
        )

    def entries(self) -> int:
        """Return how many entries a recording would have written since the process started, of all devices."""
        counted = (self._allocator.allocations(index) or (0, 0) for index in self._allocator.devices())
        return sum(allocated + 2 * freed for allocated, freed in counted)

    def entries_enough(self) -> int:
        """Return the number of entries at which a recording ends, so that its history is complete.

        Its snapshot then takes about half as long as a full garbage collection of the process, which may follow it.
        """
        return min(_ENTRIES_MAX, max(_ENTRIES_MIN, self._slices.count() // _OBJECTS_OF_ENTRY))

    def require_short_pause(self, *, searches: bool = False) -> None:
        """Check how long a snapshot of the blocks and the slices would stop the interpreter.

        Raises:
            CommandRefusedError: it would be longer than `PAUSE_SECONDS_MAX`.
        """
        states = [self._allocator.state(index) for index in self._allocator.devices()]
        blocks = sum(known(state, name) or 0 for state in states for name in ("active", "inactive_split"))
        of_object = _SEARCHED_OBJECT_SECONDS if searches else _OBJECT_SECONDS
        for work, count, each_seconds, code in (
            ("reading of {:,} objects", self._slices.count(), of_object, ReasonCode.TOO_MANY_OBJECTS),
            ("snapshot of {:,} blocks", blocks, _BLOCK_SECONDS, ReasonCode.TOO_MANY_BLOCKS),
        ):
            if count * each_seconds > PAUSE_SECONDS_MAX:
                raise CommandRefusedError(
                    f"a {work.format(count)} would stop the interpreter for about {count * each_seconds:.1f} s;"
                    " use force to accept that",
                    code,
                )

    def _blocks(self, segments: list[dict[str, Any]], stacks: Stacks) -> dict[int, DeviceBlocks]:
        heaps = self._allocator.heaps(segments)
        devices = read_blocks(segments, stacks)
        for index, device in devices.items():
            heap = heaps[index]
            if heap.returnable_bytes is not None:
                device.fragmented_bytes = heap.reserved_bytes - heap.allocated_bytes - heap.returnable_bytes
        return {index: device for index, device in sorted(devices.items()) if self._allocator.uuid(index)}

    def _read(self, snapshot: Callable[..., _Result]) -> _Result:
        self._slices.take_turn()
        try:
            return snapshot(self._torch, self._paused)
        except (AttributeError, RuntimeError) as error:
            raise CommandRefusedError(
                f"this allocator has no snapshot: {error}", ReasonCode.NOT_SUPPORTED_BY_ALLOCATOR
            ) from None

    def _paused(self, seconds: float) -> None:
        self.pause_seconds = max(self.pause_seconds, seconds)
