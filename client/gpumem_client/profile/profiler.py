"""Takes profiles: of what is allocated now, with a recording of its highest moment, and of out-of-memory errors."""

from __future__ import annotations

import functools
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from gpumem_client.guest_safety import log
from gpumem_client.profile.aggregate import Naming, Rows
from gpumem_client.profile.heap_blocks import BEFORE, DeviceBlocks, Lifetime, Stacks
from gpumem_client.profile.heap_reader import HeapReader
from gpumem_client.profile.lifetimes import REST_BYTES_MAX, History, between_snapshots, living
from gpumem_client.profile.profile_types import Profile, ProfiledDevice
from gpumem_client.profile.recorder import Recorder
from gpumem_client.wire.errors import CommandRefusedError
from gpumem_client.wire.protocol import OutOfMemory
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


# At most one profile in this time: a search for a batch size runs out of memory many times.
_EVERY_SECONDS = 60.0
# The handler runs at most this long after the entry of the error was written.
_LATE_US = 100_000


class _Error(NamedTuple):
    device: int
    oom: OutOfMemory
    noted_us: int
    noted_seconds: float


class OomMoments:
    """The errors that get a profile. `note` is for any thread, the rest for the reporter's.

    The standing recording of `recorder` must be on.

    Raises:
        CommandRefusedError: this allocator has no snapshot.
    """

    def __init__(self, heap: HeapReader, recorder: Recorder, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._heap = heap
        self._recorder = recorder
        self._clock = clock
        self._error: _Error | None = None
        self._next_seconds = float("-inf")
        # What is older than the recording has no stack here; it starts right before.
        self._before = heap.blocks(Stacks())

    @property
    def waiting(self) -> bool:
        """Whether an error has no profile yet, until `done`."""
        return self._error is not None

    def done(self) -> None:
        """Forget the error that waits, because its profile was sent, or cannot be taken."""
        self._error = None

    def note(self, index: int, oom: OutOfMemory) -> None:
        """Note an error of a device in the allocating thread, in a few microseconds."""
        now = self._clock()
        if self._recorder.standing and now >= self._next_seconds:
            self._next_seconds = now + _EVERY_SECONDS
            self._error = _Error(index, oom, time.time_ns() // 1000, now)

    def take(self) -> Profile | None:
        """Return the profile of the error that waits; None if its entry was overwritten already.

        Raises:
            CommandRefusedError: this allocator has no snapshot.
        """
        error = self._error
        if error is None or not self._recorder.standing:
            return None
        # The handler in the allocating thread has only noted the error. This thread follows the history back from its
        # own snapshot to the entry of the error, so it knows also the blocks that the error has freed.
        heap, stacks, index = self._heap, Stacks(), error.device
        heap.pause_seconds = 0.0
        devices, traces = heap.history(stacks)
        afterwards: dict[int, DeviceBlocks] = {}
        # No step ends now: the error has ended it.
        naming = heap.naming(lambda: afterwards.update(heap.blocks(Stacks())), gradient_seconds=0)
        later, before = (found.get(index, DeviceBlocks()) for found in (afterwards, self._before))
        entries = between_snapshots(traces[index], from_first=False) or []
        traces.clear()
        at = _place(error, entries)
        if index not in devices or at is None:
            log.debug("no profile of out-of-memory error %d: its entry was overwritten", error.oom.number)
            return None
        history = History(entries, devices[index], stacks, heap.split_rules(index))
        lifetimes = [life for life in history.lifetimes if life.lived_at(at)]
        for life in lifetimes:
            if life.freed_at is None and not later.has(life):
                life.freed_us = 0  # at an unknown time, perhaps before the search for owners
        sample = error.oom.sample
        missing_bytes = ((sample and sample.allocated_bytes) or 0) - sum(life.size_bytes for life in lifetimes)
        # Blocks that were allocated before the first entry, and freed after the error, may be larger than requested by
        # an amount that the history does not show.
        unsure = sum(life.allocated_at == BEFORE and life.freed_at is not None for life in lifetimes)
        rest_bytes = missing_bytes if 0 < missing_bytes <= unsure * REST_BYTES_MAX else 0
        device = ProfiledDevice(
            uuid=error.oom.uuid,
            allocated_bytes=sum(life.size_bytes for life in lifetimes) + rest_bytes,
            reserved_bytes=None if sample is None else sample.reserved_bytes,
        )

        def unnamed(life: Lifetime) -> str:
            return "before" if before.has(life) and life.allocated_at == BEFORE else "backward"

        rows = Rows(stacks, [naming])
        rows.add(index, device, lifetimes, unnamed, live_at=at, rest_bytes=rest_bytes)
        other_threads = "other threads allocated or freed memory while the error was raised"
        return rows.profile(
            id=os.urandom(8).hex(),
            cause="out_of_memory",
            oom_number=error.oom.number,
            age_seconds=self._clock() - error.noted_seconds,
            pause_seconds=heap.pause_seconds,
            step=error.oom.step,
            notes=(other_threads,) if missing_bytes != rest_bytes else (),
        )


def _place(error: _Error, entries: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the index of the entry of the error."""
    for index in range(len(entries) - 1, -1, -1):
        entry = entries[index]
        if entry["action"] == "oom" and entry.get("time_us", 0) <= error.noted_us:
            return index if error.noted_us - entry.get("time_us", 0) < _LATE_US else None
    return None
