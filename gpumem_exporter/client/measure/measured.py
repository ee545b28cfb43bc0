"""What a phase or a measured block has used, and the context manager and decorator that both of them are."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

from gpumem_exporter.client.hooks.guest_safety import Swallowing
from gpumem_exporter.client.measure.observed import Observed, Span, process_observed

__all__ = ["DeviceUse", "Measured", "MemoryUse"]

T = TypeVar("T")
_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """Allocated bytes of one device before, after and at their highest within a block."""

    index: int
    before_bytes: int
    after_bytes: int
    peak_bytes: int
    """The peak, or, where `exact` is False, the largest value that was seen: the peak is not below it."""
    peak_at_most_bytes: int | None
    """The peak is not above it; None where somebody reset the allocator's peaks meanwhile."""

    @property
    def growth_bytes(self) -> int:
        """What is allocated after the block and was not before; negative where it freed more."""
        return self.after_bytes - self.before_bytes

    @property
    def exact(self) -> bool:
        """`peak_bytes` is the peak, not only a lower bound of it."""
        return self.peak_bytes == self.peak_at_most_bytes


class MemoryUse:
    """What a block has used; filled in when the block ends, and without devices where there is no CUDA.

    `before_bytes`, `after_bytes`, `growth_bytes` and `peak_bytes` are those of the device with the highest peak, None
    while the block runs and where there is no device.

    Attributes:
        name: the block's.
        duration_seconds: None while it runs.
        devices: each on which this process has a context.
    """

    __slots__ = ("devices", "duration_seconds", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.duration_seconds: float | None = None
        self.devices: tuple[DeviceUse, ...] = ()

    def __repr__(self) -> str:
        return f"MemoryUse({self.name!r}, duration_seconds={self.duration_seconds}, devices={self.devices})"

    @property
    def main(self) -> DeviceUse | None:
        """The device with the highest peak."""
        return max(self.devices, key=lambda device: device.peak_bytes, default=None)

    @property
    def before_bytes(self) -> int | None:
        """Allocated when the block began."""
        return None if self.main is None else self.main.before_bytes

    @property
    def after_bytes(self) -> int | None:
        """Allocated when it ended."""
        return None if self.main is None else self.main.after_bytes

    @property
    def growth_bytes(self) -> int | None:
        """After less before."""
        return None if self.main is None else self.main.growth_bytes

    @property
    def peak_bytes(self) -> int | None:
        """The highest in between; a lower bound where `exact` is False."""
        return None if self.main is None else self.main.peak_bytes

    @property
    def exact(self) -> bool:
        """The peak of every device is known, not only bounded."""
        return all(device.exact for device in self.devices)


def pop_running(running: dict[int, list[T]]) -> T | None:
    """Take what this thread began last off its stack; what another one began, where this began nothing."""
    thread = threading.get_ident()
    own = running.get(thread)
    stack = own or next((stack for stack in list(running.values()) if stack), None)
    if not stack:
        return None
    last = stack.pop()
    if own is not None and not own:
        running.pop(thread, None)
    return last


class Measured:
    """Measures the block under `with`, or each call of the function that it decorates.

    It may be used again, inside itself and by several threads at once. Nothing of what measuring raises reaches the
    program.

    Args:
        name: the block's.
        kept: it counts as a phase.
        reset_peaks: let the allocator's peaks begin anew where the block begins, so that its own is exact.
        ended: called with what was used, in the program's thread.
        observed: where it is noted; the process' own.
    """

    def __init__(
        self,
        name: str,
        *,
        kept: bool,
        reset_peaks: bool = False,
        ended: Callable[[MemoryUse], None] | None = None,
        observed: Observed | None = None,
    ) -> None:
        self._observed = observed or process_observed()
        self._name = self._observed.name_phase(name) if kept else name
        self._kept = kept
        self._reset_peaks = reset_peaks
        self._ended = ended
        self._running: dict[int, list[tuple[Span, MemoryUse]]] = {}

    def __enter__(self) -> MemoryUse:
        span = Span(self._name, reset_peaks=self._reset_peaks, kept=self._kept)
        use = MemoryUse(self._name)
        self._running.setdefault(threading.get_ident(), []).append((span, use))
        try:
            with Swallowing():  # a guest breaks nothing
                self._observed.enter(span)
        except BaseException:  # of the program's, for which the block does not begin
            pop_running(self._running)
            with Swallowing():
                self._observed.leave(span)
            raise
        return use

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        running = pop_running(self._running)
        if running is None:
            return
        span, use = running
        with Swallowing():
            self._observed.leave(span)
            if span.ended_seconds is not None:
                use.duration_seconds = span.ended_seconds - span.started_seconds
            use.devices = tuple(
                DeviceUse(index, bounds.entered, bounds.now, peak.at_least_bytes, peak.at_most_bytes)
                for index, bounds in sorted(span.bounds.items())
                if (peak := span.peaks.get(index)) is not None
            )
            if self._ended is not None:
                self._ended(use)

    def _again(self) -> Measured:
        """One for a single call: calls of coroutines do not end in the order in which they began."""
        again = object.__new__(Measured)
        again.__dict__.update(self.__dict__, _running={})
        return again

    def __reduce__(self) -> tuple[Callable[[], Measured], tuple[()]]:
        """A copy is as one that was made anew, in another process too: a model or a function may bring it there."""
        made_anew = functools.partial(
            Measured, self._name, kept=self._kept, reset_peaks=self._reset_peaks, ended=self._ended
        )
        return made_anew, ()

    def __call__(self, function: _Function) -> _Function:
        """Measure each call of a function, of a coroutine function to its end, of a generator to its last value."""
        measured: Callable[..., Any]
        if inspect.iscoroutinefunction(function):

            async def measured(*args: Any, **kwargs: Any) -> Any:
                with self._again():
                    return await function(*args, **kwargs)

        elif inspect.isgeneratorfunction(function):

            def measured(*args: Any, **kwargs: Any) -> Any:
                with self._again():
                    return (yield from function(*args, **kwargs))

        elif inspect.isasyncgenfunction(function):
            raise TypeError("an asynchronous generator cannot be measured by a decorator; use `with` around its loop")
        else:

            def measured(*args: Any, **kwargs: Any) -> Any:
                with self._again():
                    return function(*args, **kwargs)

        return functools.update_wrapper(measured, function)  # type: ignore[return-value]
