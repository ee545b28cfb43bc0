"""Runs commands in the process, on the reporter's thread, and measures what they did."""

from __future__ import annotations

import contextlib
import gc
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator

from gpumem_exporter.client._allocator import Allocator, DeviceState
from gpumem_exporter.client._sampler import Sampler
from gpumem_exporter.protocol import Command, CommandResult, DeviceResult

__all__ = ["Executor"]

_PROMPT_SECONDS = 0.0005
_REMEMBERED = 64
"""Results kept, so that a command that is given twice is run once."""


_NOT_SUPPORTED = "does not yet support"
"""What torch says where an allocator (a pluggable one, cudaMallocAsync) lacks something."""


class Executor:
    """Runs commands; for the reporter's thread alone.

    Args:
        allocator: what is acted upon.
        sampler: kept from sampling meanwhile.
        clock: monotonic seconds.
    """

    def __init__(self, allocator: Allocator, sampler: Sampler, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._allocator = allocator
        self._sampler = sampler
        self._clock = clock
        self._results: OrderedDict[str, CommandResult] = OrderedDict()
        self._runners: dict[str, Callable[[Command], None]] = {
            "empty_cache": self._empty_cache,
            "collect_garbage": lambda _command: self._collect_garbage(),
            "reset_peak": self._reset_peak,
        }

    @property
    def actions(self) -> tuple[str, ...]:
        """What this reporter can be asked to do."""
        return tuple(self._runners)

    def run(self, command: Command, *, sent_seconds: float) -> CommandResult:
        """Run a command, or repeat the result of one that has run. Never raises.

        Args:
            command: what to do.
            sent_seconds: monotonic moment at which it was sent at the latest; its deadline counts from there.
        """
        known = self._results.get(command.id)
        if known is not None:
            return known
        if self._clock() >= sent_seconds + command.deadline_seconds:
            result = CommandResult(command.id, "expired", "its deadline had passed when its turn came")
        else:
            result = self._run(command)
        self._sampler.outdated()
        self._results[command.id] = result
        while len(self._results) > _REMEMBERED:
            self._results.popitem(last=False)
        return result

    def _run(self, command: Command) -> CommandResult:
        runner = self._runners.get(command.action)
        if runner is None:
            return CommandResult(command.id, "unsupported", f"this reporter runs {', '.join(self._runners)}")
        begun = self._clock()
        try:
            if self._allocator.capturing:
                # A cudaFree from any thread breaks a capture in the default "global" mode, and so may a finalizer.
                return CommandResult(command.id, "refused", "a CUDA graph is being captured")
            with self._sampler.exclusively(), _prompt_turns():
                before = self._measure(command.uuids)
                begun = self._clock()
                runner(command)
                duration = self._clock() - begun
                devices = tuple(self._compare(index, *measured) for index, measured in before.items())
        except Exception as error:  # noqa: BLE001 - whatever torch or a finalizer raises is this command's result
            outcome = "unsupported" if _NOT_SUPPORTED in str(error) else "failed"
            return CommandResult(command.id, outcome, f"{type(error).__name__}: {error}"[:500], self._clock() - begun)
        return CommandResult(command.id, "done", "", duration, devices)

    def _empty_cache(self, command: Command) -> None:
        if command.collect_garbage:
            self._collect_garbage()
        self._allocator.empty_cache()

    def _collect_garbage(self) -> None:
        gc.collect()

    def _reset_peak(self, command: Command) -> None:
        for index in self._measured(command.uuids):
            self._allocator.reset_peak(index)

    def _measured(self, uuids: tuple[str, ...]) -> list[int]:
        """The devices to act on; a process' devices are known to it alone, so empty means all."""
        return [index for index in self._allocator.devices() if not uuids or self._allocator.uuid(index) in uuids]

    def _measure(self, uuids: tuple[str, ...]) -> dict[int, tuple[DeviceState | None, int | None]]:
        return {
            index: (self._allocator.state(index), self._allocator.free_bytes(index)) for index in self._measured(uuids)
        }

    def _compare(self, index: int, before: DeviceState | None, free_before: int | None) -> DeviceResult:
        after = self._allocator.state(index)
        return DeviceResult(
            uuid=self._allocator.uuid(index),
            reserved_before_bytes=_current(before, "reserved_bytes"),
            reserved_after_bytes=_current(after, "reserved_bytes"),
            allocated_before_bytes=_current(before, "allocated_bytes"),
            allocated_after_bytes=_current(after, "allocated_bytes"),
            freed_bytes=_freed(before, after),
            device_free_before_bytes=free_before,
            device_free_after_bytes=self._allocator.free_bytes(index),
        )


@contextlib.contextmanager
def _prompt_turns() -> Iterator[None]:
    """Get the GIL back within half a millisecond, not five, while a command runs.

    Every call into CUDA gives the GIL away; a main thread that never does keeps it for a whole switch interval each
    time. Four such calls would make 20 ms of a command that takes microseconds.
    """
    usual = sys.getswitchinterval()
    prompt = min(usual, _PROMPT_SECONDS)
    sys.setswitchinterval(prompt)
    try:
        yield
    finally:
        if abs(sys.getswitchinterval() - prompt) < 1e-6:  # or the program has set its own meanwhile
            sys.setswitchinterval(usual)


def _current(state: DeviceState | None, name: str, metric: str = "current") -> int | None:
    if state is None:
        return None
    value: int | None = state.get(name, {}).get("all", {}).get(metric)
    return value


def _freed(before: DeviceState | None, after: DeviceState | None) -> int | None:
    """What went back to the driver: the growth of the allocator's own count of freed reserved bytes.

    The difference of reserved would miss what another thread reserved anew in between. It is taken where there is no
    such count (cudaMallocAsync).
    """
    begun, ended = _current(before, "reserved_bytes", "freed"), _current(after, "reserved_bytes", "freed")
    if begun is not None and ended is not None:
        return ended - begun
    held, left = _current(before, "reserved_bytes"), _current(after, "reserved_bytes")
    return max(0, held - left) if held is not None and left is not None else None
