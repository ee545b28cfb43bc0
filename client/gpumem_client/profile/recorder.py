"""Turns the recording of the allocator's history on and off, and leaves a recording of the user's code alone."""

from __future__ import annotations

import time
from typing import Any, Mapping

from gpumem_client import torch_access
from gpumem_client.guest_safety import log
from gpumem_client.wire.errors import CommandRefusedError
from gpumem_client.wire.reason_codes import ReasonCode

ENTRIES_MAX = 100_000
"""The longest history of a recording on each device. A snapshot of it keeps the GIL for half a second."""
STANDING_ENTRIES_MAX = 20_000
"""The longest history of the standing recording: 6 MiB of the host's memory."""
# The longest wait for the recording of a stopped reporter: its thread may still search for owners for six seconds.
_ENDING_SECONDS = 10.0

# The recorders of this process that record. Torch does not show whose recording is on.
_recording: set[Recorder] = set()


class Recorder:
    """The client's recordings: a standing one, and one for a profile. One thread must make all calls."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._standing = False
        self._on = False
        self._entries_max = 0
        # The number of allocations and frees of each device when the recording started.
        self._counted: Mapping[int, int] = {}

    @property
    def on(self) -> bool:
        """Whether a recording of the client is on. False if the user's code has stopped it."""
        return self._on and torch_access.history_is_recorded(self._torch)

    @property
    def standing(self) -> bool:
        """Whether there is a history, of the standing recording or of another one of the client."""
        return self._standing and self.on

    def start_standing(self) -> bool:
        """Record from now on, until `close`. Returns False if the user's code records.

        Raises:
            CommandRefusedError: this allocator cannot record.
        """
        if self._others_record():
            return False
        self._start(STANDING_ENTRIES_MAX)
        self._standing = True
        return True

    def start(self) -> None:
        """Record for a profile. The history starts now.

        Raises:
            CommandRefusedError: the user's code records, or this allocator cannot record.
        """
        if self.replaced() if self.on else self._others_record():
            raise CommandRefusedError(
                "the program records the allocator's history itself; a profile without a recording shows its stacks",
                ReasonCode.HISTORY_RECORDED,
            )
        self._start(ENTRIES_MAX)

    def end(self, traces: list[list[dict[str, Any]]] | None = None) -> None:
        """End the recording for a profile. The standing recording continues with a new history.

        `traces` as in `replaced`.
        """
        if self.standing and not self.replaced(traces):
            self._start(STANDING_ENTRIES_MAX)
        else:
            self.close(traces)

    def close(self, traces: list[list[dict[str, Any]]] | None = None) -> None:
        """End all recordings of the client. A recording that the user's code has started since stays on."""
        if self.on and not self.replaced(traces):
            torch_access.stop_history(self._torch)
            log.debug("the recording of the allocator's history ends")
        elif self.on:
            log.warning("the program has started a recording of the allocator's history; it stays on")
        self._on = self._standing = False
        _recording.discard(self)

    def replaced(self, traces: list[list[dict[str, Any]]] | None = None) -> bool:
        """Whether the user's code has started another recording since the client's started.

        `traces` are the entries that are recorded now; without them they are read, which takes 5 µs per entry.
        """
        # Torch shows neither whose recording is on nor its settings, and a start drops no history from torch 2.10 on.
        # What is recorded tells: more entries than the client's, fewer than there were changes, or frames of C++, which
        # the user's code records unless it asks for other stacks. Freed blocks have the frames of their allocation,
        # perhaps before the client's recording.
        try:
            traces = torch_access.snapshot_traces(self._torch) if traces is None else traces
        except (AttributeError, RuntimeError):
            return False
        changes = self._changes()
        for index, trace in enumerate(traces):
            least = min(changes.get(index, 0) - self._counted.get(index, 0), self._entries_max)
            if not least <= len(trace) <= self._entries_max:
                return True
            allocations = (entry for entry in reversed(trace) if entry["action"] == "alloc")
            if any("::" in frame["name"] for entry in allocations for frame in entry.get("frames", ())):
                return True
        return False

    def _changes(self) -> dict[int, int]:
        if torch_access.initialized_torch() is None:
            return {}  # a standing recording starts before CUDA
        statistics = torch_access.Statistics(self._torch)
        counts = {index: (statistics.state(index) or {}).get("allocation") or {} for index in statistics.devices()}
        return {index: count.get("allocated", 0) + count.get("freed", 0) for index, count in counts.items()}

    def _others_record(self) -> bool:
        """Whether the user's code records, after a wait for the recording of a stopped reporter to end."""
        # Only the thread that has started a recording may stop it, so this cannot end the other one itself.
        end_seconds = time.monotonic() + _ENDING_SECONDS
        while _recording - {self} and time.monotonic() < end_seconds:
            time.sleep(0.02)
        return torch_access.history_is_recorded(self._torch)

    def _start(self, entries_max: int) -> None:
        try:
            torch_access.start_history(self._torch, entries_max)
        except (AttributeError, RuntimeError, TypeError) as error:
            raise CommandRefusedError(
                f"this allocator cannot record its history: {error}", ReasonCode.NOT_SUPPORTED_BY_ALLOCATOR
            ) from None
        self._on, self._entries_max, self._counted = True, entries_max, self._changes()
        _recording.add(self)
        log.debug("a recording of the allocator's history starts, with %d entries", entries_max)
