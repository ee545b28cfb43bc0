"""Turns the recording of the allocator's history on and off, and leaves a recording of the user's code alone."""

from __future__ import annotations

import time
from typing import Any

from gpumem_client import torch_access
from gpumem_client.guest_safety import log
from gpumem_client.hooks.recordings import RecordingHook
from gpumem_client.wire.errors import CommandRefusedError
from gpumem_client.wire.reason_codes import ReasonCode

STANDING_ENTRIES_MAX = 20_000
"""The longest history of the standing recording: 6 MiB of the host's memory."""
# The longest wait for the recording of a stopped reporter: its thread may still search for owners for six seconds.
_ENDING_SECONDS = 10.0

# The recorders of this process that record.
_recording: set[Recorder] = set()


class Recorder:
    """The client's recordings: a standing one, and one for a profile. One thread must make all calls."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._standing = False
        # Not None while a recording of the client may be on.
        self._hook: RecordingHook | None = None

    @property
    def on(self) -> bool:
        """Whether a recording of the client is on. False if the user's code has stopped or replaced it."""
        return self._hook is not None and not self._hook.noticed and torch_access.history_is_recorded(self._torch)

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

    def start(self, entries_max: int) -> None:
        """Record for a profile. The history starts now, and has the last `entries_max` entries of each device.

        Raises:
            CommandRefusedError: the user's code records, or this allocator cannot record.
        """
        if not self.on and self._others_record():
            raise CommandRefusedError(
                "the program records the allocator's history itself; a profile without a recording shows its stacks",
                ReasonCode.HISTORY_RECORDED,
            )
        self._start(entries_max)

    def end(self) -> None:
        """End the recording for a profile. The standing recording continues with a new history."""
        if self.standing:
            self._start(STANDING_ENTRIES_MAX)
        else:
            self.close()

    def close(self) -> None:
        """End all recordings of the client. A recording that the user's code has started since stays on."""
        if self._hook is not None:
            self._hook.remove()
        if self.on:
            torch_access.stop_history(self._torch)
            log.debug("the recording of the allocator's history ends")
        elif self._hook is not None and torch_access.history_is_recorded(self._torch):
            log.warning("the program has started a recording of the allocator's history; it stays on")
        self._hook, self._standing = None, False
        _recording.discard(self)

    def _others_record(self) -> bool:
        """Whether the user's code records, after a wait for the recording of a stopped reporter to end."""
        # Only the thread that has started a recording may stop it, so this cannot end the other one itself.
        end_seconds = time.monotonic() + _ENDING_SECONDS
        while _recording - {self} and time.monotonic() < end_seconds and not torch_access.stopping():
            time.sleep(0.02)
        return torch_access.history_is_recorded(self._torch)

    def _start(self, entries_max: int) -> None:
        if self._hook is not None:
            self._hook.remove()
        self._hook = RecordingHook(self._torch)
        try:
            with self._hook.own_calls():
                torch_access.start_history(self._torch, entries_max)
        except (AttributeError, RuntimeError, TypeError) as error:
            self.close()
            raise CommandRefusedError(
                f"this allocator cannot record its history: {error}", ReasonCode.NOT_SUPPORTED_BY_ALLOCATOR
            ) from None
        _recording.add(self)
        log.debug("a recording of the allocator's history starts, with %d entries", entries_max)
