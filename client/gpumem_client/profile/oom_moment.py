"""A profile of the moment of an out-of-memory error, from a recording that is always on."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from gpumem_client.guest_safety import log
from gpumem_client.profile.aggregate import Rows
from gpumem_client.profile.heap_blocks import DeviceBlocks, Stacks
from gpumem_client.profile.heap_reader import HeapReader
from gpumem_client.profile.lifetimes import BEFORE, REST_BYTES_MAX, History, Lifetime, between_snapshots
from gpumem_client.profile.profile_types import Profile, ProfiledDevice
from gpumem_client.profile.recorder import Recorder
from gpumem_client.wire.protocol import OutOfMemory

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
            if life.freed_at is None and not life.is_in(later):
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
            return "before" if life.is_in(before) and life.allocated_at == BEFORE else "backward"

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
