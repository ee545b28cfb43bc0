"""Reads what a profile needs of torch's allocator: blocks, history, rules and owners. Measures the pauses."""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from gpumem_client import torch_access
from gpumem_client.allocator.allocator import Allocator
from gpumem_client.allocator.heap_sum import Heap
from gpumem_client.allocator.reclaimable import known
from gpumem_client.profile.aggregate import Naming
from gpumem_client.profile.heap_blocks import DeviceBlocks, Stacks, read_blocks
from gpumem_client.profile.lifetimes import SplitRules
from gpumem_client.profile.owners import GRADIENT_SECONDS, TESTED_TORCH, is_tested, name_storages
from gpumem_client.profile.profile_types import ProfiledDevice
from gpumem_client.uninterrupted import GENERATIONS, Slices, Uninterrupted, take_turns
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

    `exclusively` returns the sampler's lock: a step must not take a snapshot in between.
    """

    def __init__(
        self,
        torch: Any,
        allocator: Allocator,
        *,
        exclusively: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._torch = torch
        self._allocator = allocator
        self._exclusively = exclusively
        self._collections: list[int] = []
        self.pause_seconds = 0.0
        """The longest time that the interpreter has stood still since this was set to 0."""

    def blocks(self, stacks: Stacks, first: Callable[[], None] = lambda: None) -> dict[int, DeviceBlocks]:
        """Return the blocks of each device whose UUID is known. `first` is called right before.

        Raises:
            CommandRefusedError: this allocator has no snapshot.
        """
        with self._exclusively():
            first()
            segments, heaps = self._snapshot()
        return self._blocks(segments, heaps, stacks)

    def history(self, stacks: Stacks) -> tuple[dict[int, DeviceBlocks], list[list[dict[str, Any]]]]:
        """Return the blocks of each device, and the recorded entries of each device index, oldest first.

        The last entry `snapshot` marks the snapshot that has the blocks.

        Raises:
            CommandRefusedError: this allocator has no snapshot.
        """
        with self._exclusively():
            segments, heaps = self._snapshot()
            traces = self._read(torch_access.snapshot_traces)
        return self._blocks(segments, heaps, stacks), traces

    def naming(
        self,
        addresses_read: Callable[[], None] = lambda: None,
        *,
        gradient_seconds: float = GRADIENT_SECONDS,
        search_seconds: float = 0.0,
    ) -> tuple[Naming, tuple[str, ...]]:
        """Name the owners of all storages. Returns also notes about what could not be seen.

        `addresses_read` is called once the addresses are known, before the search for referrers. See `name_storages`.
        """
        if not is_tested(self._torch):
            addresses_read()
            first, last = (".".join(map(str, version)) for version in TESTED_TORCH)
            why = f"owners are not named with torch {self._torch.__version__}: tested are {first} to {last}"
            return Naming(0, 0, {}, {}), (why,)
        read_us: list[int] = []

        def read(started_us: int) -> None:
            read_us.extend((started_us, time.time_ns() // 1000))
            addresses_read()

        named = name_storages(
            self._torch,
            Slices(torch_access.stopping, self._paused),
            addresses_read=read,
            gradient_seconds=gradient_seconds,
            search_seconds=search_seconds,
        )
        addresses: dict[int, list[int]] = {}
        for index, address in sorted(named.owners):
            addresses.setdefault(index, []).append(address)
        return Naming(read_us[0], read_us[1], addresses, named.owners, named.graph), named.notes

    def profiled(self, index: int, blocks: DeviceBlocks) -> ProfiledDevice:
        """Return a device with the bytes of its blocks."""
        return ProfiledDevice(
            uuid=self._allocator.uuid(index),
            allocated_bytes=blocks.allocated_bytes,
            reserved_bytes=blocks.reserved_bytes,
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
        return min(_ENTRIES_MAX, max(_ENTRIES_MIN, self._count_objects() // _OBJECTS_OF_ENTRY))

    def require_short_pause(self, *, searches: bool = False) -> None:
        """Check how long a snapshot of the blocks and the slices would stop the interpreter.

        Raises:
            CommandRefusedError: it would be longer than `PAUSE_SECONDS_MAX`.
        """
        states = [self._allocator.state(index) for index in self._allocator.devices()]
        blocks = sum(known(state, name) or 0 for state in states for name in ("active", "inactive_split"))
        objects = self._count_objects()
        of_object = _SEARCHED_OBJECT_SECONDS if searches else _OBJECT_SECONDS
        if objects * of_object > PAUSE_SECONDS_MAX:
            raise CommandRefusedError(
                f"a reading of {objects:,} objects would stop the interpreter for about {objects * of_object:.1f} s;"
                " use force to accept that",
                ReasonCode.TOO_MANY_OBJECTS,
            )
        seconds = blocks * _BLOCK_SECONDS
        if seconds > PAUSE_SECONDS_MAX:
            raise CommandRefusedError(
                f"a snapshot of {blocks:,} blocks would stop the interpreter for about {seconds:.1f} s;"
                " use force to accept that",
                ReasonCode.TOO_MANY_BLOCKS,
            )

    def _count_objects(self) -> int:
        counted = Uninterrupted()
        sizes = counted.kept(map(len, map(gc.get_objects, GENERATIONS)))
        self._paused(counted.run())
        return sum(sizes)

    def _snapshot(self) -> tuple[list[dict[str, Any]], Mapping[int, Heap]]:
        segments = self._read(torch_access.snapshot_segments)
        return segments, self._allocator.heaps(segments)

    def _blocks(
        self, segments: list[dict[str, Any]], heaps: Mapping[int, Heap], stacks: Stacks
    ) -> dict[int, DeviceBlocks]:
        devices = read_blocks(segments, stacks)
        for index, device in devices.items():
            returnable = heaps[index].returnable_bytes
            if returnable is not None:
                device.fragmented_bytes = device.reserved_bytes - device.allocated_bytes - returnable
        return {index: device for index, device in sorted(devices.items()) if self._allocator.uuid(index)}

    def _read(self, snapshot: Callable[..., _Result]) -> _Result:
        take_turns(self._collections)
        try:
            return snapshot(self._torch, self._paused)
        except (AttributeError, RuntimeError) as error:
            raise CommandRefusedError(
                f"this allocator has no snapshot: {error}", ReasonCode.NOT_SUPPORTED_BY_ALLOCATOR
            ) from None

    def _paused(self, seconds: float) -> None:
        self.pause_seconds = max(self.pause_seconds, seconds)
