"""Profiles of what is allocated now, and with a recording: at its end, and at its highest moment."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from gpumem_client.profile.aggregate import Naming, Rows
from gpumem_client.profile.heap_blocks import DeviceBlocks, Stacks
from gpumem_client.profile.heap_reader import HeapReader
from gpumem_client.profile.lifetimes import BEFORE, History, Lifetime, between_snapshots, living
from gpumem_client.profile.profile_types import Profile
from gpumem_client.profile.recorder import Recorder
from gpumem_client.wire.errors import CommandRefusedError
from gpumem_client.wire.reason_codes import ReasonCode

# An index after the last entry.
_AT_END = 1 << 62
# The history has space for more entries than end a recording, by one part in this number.
_SPARE_PART = 4
_NO_PEAK = "the highest moment is not known, because the recorded history is not complete"


def live_profile(heap: HeapReader, profile_id: str, cause: str, *, search_seconds: float = 0.0) -> Profile:
    """Return a profile of what is allocated now. It has the stacks that the user's code records, if it does.

    Raises:
        CommandRefusedError: this allocator has no snapshot, or the process uses no device.
    """
    heap.pause_seconds = 0.0
    stacks = Stacks()
    # Twice, because training goes on during the search for owners: only a block that both snapshots have can be named.
    earlier = heap.blocks(Stacks())
    _require_device(earlier)
    devices: dict[int, DeviceBlocks] = {}
    naming = heap.naming(lambda: devices.update(heap.blocks(stacks)), search_seconds=search_seconds)
    rows = Rows(stacks, [naming])
    for index, blocks in devices.items():
        lifetimes = living(blocks, earlier.get(index, DeviceBlocks()))
        rows.add(index, heap.profiled(index, blocks), lifetimes, lambda _: "unseen", live_at=_AT_END)
    return rows.profile(id=profile_id, cause=cause, pause_seconds=heap.pause_seconds)


def _require_device(devices: Mapping[int, DeviceBlocks]) -> None:
    """Check that there is a device to profile.

    Raises:
        CommandRefusedError: the process has allocated nothing on any device that it can name.
    """
    if not devices:
        raise CommandRefusedError("the process has allocated nothing on a device yet", ReasonCode.NO_DEVICE)


class Recording:
    """One recording, from its creation to `finish` or `cancel`. One thread must make all calls.

    Raises:
        CommandRefusedError: the user's code records, or this allocator cannot record.
    """

    def __init__(
        self, heap: HeapReader, recorder: Recorder, *, entries_enough: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._entries_enough = entries_enough
        self._heap = heap
        self._recorder = recorder
        self._clock = clock
        self._stacks = Stacks()
        heap.pause_seconds = 0.0
        try:
            first = functools.partial(recorder.start, entries_enough + entries_enough // _SPARE_PART)
            self._start = heap.blocks(self._stacks, first=first)
            _require_device(self._start)
        except BaseException:
            recorder.end()
            raise
        self.started_seconds = clock()
        self._entries_before = heap.entries()
        self._namings: list[Naming] = []
        self._name_seconds = 0.0

    def name(self, addresses_read: Callable[[], None] = lambda: None, *, search_seconds: float = 0.0) -> None:
        """Name the owners of what is allocated now. `addresses_read` is called before the longer part of it."""
        started_seconds = self._clock()
        self._namings.insert(0, self._heap.naming(addresses_read, search_seconds=search_seconds))
        self._name_seconds = self._clock() - started_seconds

    def full_seconds(self) -> float:
        """Return the seconds until it must end, so that its history is complete at the rate until now."""
        entries = self._heap.entries() - self._entries_before
        if entries <= 0:
            return math.inf
        seconds = self._clock() - self.started_seconds
        # The recording goes on while the owners are named again at its end.
        return (self._entries_enough - entries) * seconds / entries - self._name_seconds

    def cancel(self) -> None:
        """End the recording without a profile."""
        self._recorder.end()

    def finish(self, profile_id: str, cause: str, *, search_seconds: float = 0.0) -> Profile:
        """End the recording, and return its profile.

        Raises:
            CommandRefusedError: the user's code has stopped the recording.
        """
        heap = self._heap
        taken: list[tuple[float, dict[int, DeviceBlocks], list[list[dict[str, Any]]]]] = []

        # Once the addresses are read: the longer search for names runs without a recording, which slows allocations.
        def take() -> None:
            now_seconds, (devices, traces) = self._clock(), heap.history(self._stacks)
            if not self._recorder.on:
                raise CommandRefusedError("the program has ended the recording", ReasonCode.HISTORY_RECORDED)
            taken.append((now_seconds, devices, traces))
            self._recorder.end()

        try:
            self.name(take, search_seconds=search_seconds)
        finally:
            if not taken:
                self._recorder.end()
        ended_seconds, devices, traces = taken[0]
        rows, complete = Rows(self._stacks, self._namings), True
        for index, blocks in devices.items():
            lifetimes, peak_bytes, peak_at = self._lifetimes(index, blocks, traces)
            complete = complete and peak_bytes is not None
            device = heap.profiled(index, blocks, peak_bytes)
            rows.add(index, device, lifetimes, _unnamed, live_at=_AT_END, peak_at=peak_at)
        return rows.profile(
            id=profile_id,
            cause=cause,
            age_seconds=self._clock() - ended_seconds,
            recorded_seconds=round(ended_seconds - self.started_seconds, 3),
            pause_seconds=heap.pause_seconds,
            notes=() if complete else (_NO_PEAK,),
        )

    def _lifetimes(
        self, index: int, blocks: DeviceBlocks, traces: list[list[dict[str, Any]]]
    ) -> tuple[list[Lifetime], int | None, int | None]:
        """Return the allocations of a device, and the bytes and the index of its highest moment, None if unknown."""
        entries = between_snapshots(traces[index] if index < len(traces) else [], from_first=True)
        traces[index : index + 1] = [[]]
        start = self._start.get(index, DeviceBlocks())
        if entries is None:  # the first ones were overwritten; what is allocated now is known all the same
            return living(blocks, start), None, None
        history = History(entries, blocks, self._stacks, self._heap.split_rules(index), start)
        return (history.lifetimes, *(history.highest() if history.exact else (None, None)))


def _unnamed(life: Lifetime) -> str:
    # Autograd's threads have no Python stack.
    return "before" if life.allocated_at == BEFORE else "backward"
