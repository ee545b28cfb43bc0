"""Turns the recording of the allocator's history on and off, and leaves a recording of the user's code alone.

Torch does not show whose recording is on. So while the client records, a hook replaces the functions in C through which
torch's Python functions start and end every recording, and notices when other code does that.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any

from gpumem_client import torch_access
from gpumem_client.guest_safety import log
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
        self._hook: _Hook | None = None

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
        self._hook = hook = _Hook(self._torch)
        try:
            hook.own_thread = threading.get_ident()
            torch_access.start_history(self._torch, entries_max)
        except (AttributeError, RuntimeError, TypeError) as error:
            self.close()
            raise CommandRefusedError(
                f"this allocator cannot record its history: {error}", ReasonCode.NOT_SUPPORTED_BY_ALLOCATOR
            ) from None
        finally:
            hook.own_thread = 0
        _recording.add(self)
        log.debug("a recording of the allocator's history starts, with %d entries", entries_max)


class _Hook:
    """The replaced functions, until `remove`. One thread must make all calls."""

    def __init__(self, torch: Any) -> None:
        self.noticed = False
        """Whether another thread, or other code, has started or ended a recording."""
        self.own_thread = 0
        """The thread whose calls are the client's own; 0 for none."""
        self._module, originals = torch_access.history_functions(torch)
        self._replaced = {name: (original, self._noticing(original)) for name, original in originals.items()}
        for name, (_, replacement) in self._replaced.items():
            setattr(self._module, name, replacement)

    def remove(self) -> None:
        """Restore the functions. If other code has replaced one since, it stays and has no effect."""
        for name, (original, replacement) in self._replaced.items():
            if getattr(self._module, name, None) is replacement:
                setattr(self._module, name, original)

    def _noticing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def function(*arguments: Any, **named: Any) -> Any:
            if threading.get_ident() != self.own_thread:
                self.noticed = True
            return original(*arguments, **named)

        return function
