"""Finds how much of the memory that a clear released is still free some seconds later.

Nothing waits for this: the samples of later reports show what the process has reserved by then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from gpumem_client.wire.protocol import CommandResult, DeviceSample, StillFree


class _Clear(NamedTuple):
    """What a clear released on one device."""

    command_id: str
    freed_bytes: int
    reserved_bytes: int
    """Reserved right after the clear, without what another thread reserved during it."""
    due_seconds: float


class Settling:
    """The clears whose settling time has not passed. `cleared` is for any thread, the rest for the reporter's."""

    def __init__(self) -> None:
        self._cleared: deque[tuple[CommandResult, float | None]] = deque()
        # By device.
        self._waiting: dict[str, _Clear] = {}
        self.ended: list[StillFree] = []
        """The results that no report has delivered."""

    def cleared(self, result: CommandResult, due_seconds: float | None) -> None:
        """Note the result of a clear, and when to measure what is still free; None if that is not requested."""
        self._cleared.append((result, due_seconds))

    def next_due_seconds(self) -> float | None:
        """Return when the next settling time passes; None if there is none."""
        self._start_cleared()
        return min((clear.due_seconds for clear in self._waiting.values()), default=None)

    def measure(self, samples: Iterable[DeviceSample], taken_seconds: float) -> None:
        """Compare a sample with the clears whose settling time has passed."""
        self._start_cleared()
        reserved = {sample.uuid: sample.reserved_bytes for sample in samples}
        for uuid, clear in tuple(self._waiting.items()):
            if taken_seconds >= clear.due_seconds:
                self._end(uuid, reserved.get(uuid))

    def _start_cleared(self) -> None:
        while self._cleared:
            result, due_seconds = self._cleared.popleft()
            for device in result.devices:
                reserved, freed = device.reserved_before_bytes, device.freed_bytes
                # The settling time of an earlier clear ends first, because later both would count the same memory.
                self._end(device.uuid, reserved)
                if due_seconds is not None and reserved is not None and freed is not None:
                    self._waiting[device.uuid] = _Clear(result.id, freed, reserved - freed, due_seconds)

    def _end(self, uuid: str, reserved_bytes: int | None) -> None:
        clear = self._waiting.pop(uuid, None)
        if clear is not None and reserved_bytes is not None:
            reserved_again = max(0, reserved_bytes - clear.reserved_bytes)
            self.ended.append(StillFree(clear.command_id, uuid, max(0, clear.freed_bytes - reserved_again)))
