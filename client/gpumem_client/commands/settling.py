"""Finds how much of the memory that a clear released is still free some seconds later.

Nothing waits for this: the samples of later reports show what the process has reserved by then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from gpumem_client.wire.protocol import CommandResult, DeviceResult, DeviceSample, StillFree


@dataclass(frozen=True)
class _Clear:
    """What a clear released on one device."""

    command_id: str
    freed_bytes: int
    reserved_bytes: int
    """Reserved right after the clear, without what another thread reserved during it."""
    due_seconds: float

    def still_free(self, uuid: str, reserved_bytes: int) -> StillFree:
        reserved_again = max(0, reserved_bytes - self.reserved_bytes)
        return StillFree(self.command_id, uuid, max(0, self.freed_bytes - reserved_again))


class Settling:
    """The clears whose settling time has not passed. `cleared` is for any thread, the rest for the reporter's."""

    def __init__(self) -> None:
        self._cleared: deque[tuple[CommandResult, float | None]] = deque()
        # By device.
        self._waiting: dict[str, _Clear] = {}
        self._ended: list[StillFree] = []

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

    def results(self, at_most: int) -> tuple[StillFree, ...]:
        """Return the first results that are not delivered."""
        return tuple(self._ended[:at_most])

    def delivered(self, results: tuple[StillFree, ...]) -> None:
        """Forget the first results, because a report delivered them."""
        del self._ended[: len(results)]

    def _start_cleared(self) -> None:
        while self._cleared:
            result, due_seconds = self._cleared.popleft()
            for device in result.devices:
                self._start(result.id, device, due_seconds)

    def _start(self, command_id: str, device: DeviceResult, due_seconds: float | None) -> None:
        """Start a settling time, and end the settling time of an earlier clear on the device."""
        reserved, freed = device.reserved_before_bytes, device.freed_bytes
        # First, because later both clears would count the same memory.
        self._end(device.uuid, reserved)
        if due_seconds is not None and reserved is not None and freed is not None:
            self._waiting[device.uuid] = _Clear(command_id, freed, reserved - freed, due_seconds)

    def _end(self, uuid: str, reserved_bytes: int | None) -> None:
        clear = self._waiting.pop(uuid, None)
        if clear is not None and reserved_bytes is not None:
            self._ended.append(clear.still_free(uuid, reserved_bytes))
