"""Profiles of what is allocated now, and with a recording: at its end, and at its highest moment."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from gpumem_client.profile.aggregate import Naming, Rows
from gpumem_client.profile.heap_blocks import DeviceBlocks, Stacks
from gpumem_client.profile.heap_reader import HeapReader
from gpumem_client.profile.lifetimes import BEFORE, History, Lifetime, between_snapshots, living, read_history
from gpumem_client.profile.profile_types import Profile
from gpumem_client.profile.recorder import Recorder
from gpumem_client.wire.errors import CommandRefusedError
from gpumem_client.wire.reason_codes import ReasonCode

# An index after the last entry.
_AT_END = 1 << 62
# The history has space for more entries than end a recording, by one part in this number.
_SPARE_PART = 4


def live_profile(heap: HeapReader, profile_id: str, cause: str, *, search_seconds: float = 0.0) -> Profile:
    """Return a profile of what is allocated now. It has the stacks that the user's code records, if it does.

    Raises:
        CommandRefusedError: this allocator has no snapshot, or the process uses no device.
    """
    heap.pause_seconds = 0.0
    stacks = Stacks()
    # Twice, because training goes on during the search for owners: only a block that both snapshots have can be named.
    earlier = heap.blocks(Stacks())
    require_device(earlier)
    devices: dict[int, DeviceBlocks] = {}
    naming, notes = heap.naming(lambda: devices.update(heap.blocks(stacks)), search_seconds=search_seconds)
    rows = Rows(stacks, [naming])
    for number, (index, blocks) in enumerate(devices.items()):
        lifetimes = living(blocks, earlier.get(index, DeviceBlocks()))
        rows.add(index, number, lifetimes, lambda _: "unseen", live_at=0)
    profiled = tuple(heap.profiled(index, blocks) for index, blocks in devices.items())
    return rows.profile(id=profile_id, cause=cause, devices=profiled, pause_seconds=heap.pause_seconds, notes=notes)


def require_device(devices: Mapping[int, DeviceBlocks]) -> None:
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
            require_device(self._start)
        except BaseException:
            recorder.end()
            raise
        self.started_seconds = clock()
        self._entries_before = heap.entries()
        self._namings: list[Naming] = []
        self._name_seconds = 0.0
        self._notes: list[str] = []

    def name(self, addresses_read: Callable[[], None] = lambda: None, *, search_seconds: float = 0.0) -> None:
        """Name the owners of what is allocated now. `addresses_read` is called before the longer part of it."""
        started_seconds = self._clock()
        naming, notes = self._heap.naming(addresses_read, search_seconds=search_seconds)
        self._name_seconds = self._clock() - started_seconds
        self._namings.insert(0, naming)
        self._notes += notes

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
        rows = Rows(self._stacks, self._namings)
        profiled, with_peak = [], []
        for number, (index, blocks) in enumerate(devices.items()):
            history = self._history(index, blocks, traces)
            peak_bytes, peak_at = history.highest() if history.exact else (None, None)
            if peak_at is not None:
                with_peak.append(number)
            rows.add(index, number, history.lifetimes, _unnamed, live_at=_AT_END, peak_at=peak_at)
            profiled.append(replace(heap.profiled(index, blocks), peak_bytes=peak_bytes))
        if len(with_peak) < len(devices):
            self._notes.append("the highest moment is not known, because the recorded history is not complete")
        return rows.profile(
            with_peak,
            id=profile_id,
            cause=cause,
            devices=tuple(profiled),
            age_seconds=self._clock() - ended_seconds,
            recorded_seconds=round(ended_seconds - self.started_seconds, 3),
            pause_seconds=heap.pause_seconds,
            notes=tuple(dict.fromkeys(self._notes)),
        )

    def _history(self, index: int, blocks: DeviceBlocks, traces: list[list[dict[str, Any]]]) -> History:
        entries = between_snapshots(traces[index] if index < len(traces) else [], from_first=True)
        traces[index : index + 1] = [[]]
        start = self._start.get(index, DeviceBlocks())
        if entries is not None:
            return read_history(entries, blocks, self._stacks, self._heap.split_rules(index), start)
        # The first entries were overwritten. What is allocated now is known all the same.
        lifetimes = living(blocks, start)
        for life in lifetimes:
            life.allocated_at = BEFORE if not life.allocated_us else 0
        return History(lifetimes, exact=False)


def _unnamed(life: Lifetime) -> str:
    # Autograd's threads have no Python stack.
    return "before" if life.allocated_at == BEFORE else "backward"
