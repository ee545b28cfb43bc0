"""`phase` and `memory_context`: the memory use of a block or a function."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Callable, TypeVar

from gpumem_client.guest_safety import guest_safety, log
from gpumem_client.hooks.out_of_memory import out_of_memory_in
from gpumem_client.phases.block_contexts import RunningBlocks, run_calls_in
from gpumem_client.phases.observed import Observed, process_observed
from gpumem_client.phases.peaks import Span
from gpumem_client.wire.units import ShownAsText, human_bytes, human_growth

_Function = TypeVar("_Function", bound=Callable[..., Any])

# The attribute of an out-of-memory error with the innermost phase that it has ended: `oom_guard` may see the error
# after the end of the phase.
_PHASE = "gpumem_phase"


@dataclass(frozen=True)
class DeviceUse(ShownAsText):
    """Allocated bytes of one device before, after and at the peak of a block."""

    index: int
    before_bytes: int
    after_bytes: int
    peak_bytes: int
    """The peak, or a lower bound of it if `exact` is False."""
    peak_at_most_bytes: int | None
    """Upper bound of the peak; None if the user's code reset the allocator's peaks during the block."""

    def __str__(self) -> str:
        peak = human_bytes(self.peak_bytes)
        if not self.exact:
            most = self.peak_at_most_bytes
            peak = f"at least {peak}" + (f", at most {human_bytes(most)}" if most is not None else "")
        return (
            f"cuda:{self.index} {human_bytes(self.before_bytes)} -> {human_bytes(self.after_bytes)}"
            f" ({human_growth(self.growth_bytes)}), peak {peak}"
        )

    @property
    def growth_bytes(self) -> int:
        """`after_bytes` minus `before_bytes`; negative if the block freed more than it allocated."""
        return self.after_bytes - self.before_bytes

    @property
    def exact(self) -> bool:
        """Whether `peak_bytes` is the peak, not only a lower bound."""
        return self.peak_bytes == self.peak_at_most_bytes


class MemoryUse(ShownAsText, Span):
    """The memory use of a block, known when the block has ended. Without CUDA there are no devices.

    `before_bytes`, `after_bytes`, `growth_bytes` and `peak_bytes` describe the device with the highest peak. They are
    None while the block runs and without a device. `name` is the block's name.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return f"MemoryUse({self.name!r}, duration_seconds={self.duration_seconds}, devices={self.devices})"

    def __str__(self) -> str:
        devices = "; ".join(map(str, self.devices)) or "no CUDA"
        return f"{self.name}: {devices if self.duration_seconds is not None else 'running'}"

    @property
    def duration_seconds(self) -> float | None:
        """None while the block runs."""
        return None if self.ended_seconds is None else self.ended_seconds - self.started_seconds

    @property
    def devices(self) -> tuple[DeviceUse, ...]:
        """Each device on which this process has a context."""
        bounds = sorted(self.bounds.items()) if self.ended_seconds is not None else ()
        return tuple(
            DeviceUse(index, of.entered, of.now, of.peak.at_least_bytes, of.peak.at_most_bytes) for index, of in bounds
        )

    @property
    def main(self) -> DeviceUse | None:
        """The device with the highest peak."""
        return max(self.devices, key=lambda device: device.peak_bytes, default=None)

    @property
    def before_bytes(self) -> int | None:
        """Allocated bytes at the start of the block."""
        return None if self.main is None else self.main.before_bytes

    @property
    def after_bytes(self) -> int | None:
        """Allocated bytes at the end of the block."""
        return None if self.main is None else self.main.after_bytes

    @property
    def growth_bytes(self) -> int | None:
        """`after_bytes` minus `before_bytes`."""
        return None if self.main is None else self.main.growth_bytes

    @property
    def peak_bytes(self) -> int | None:
        """The peak within the block, or a lower bound of it if `exact` is False."""
        return None if self.main is None else self.main.peak_bytes

    @property
    def exact(self) -> bool:
        """Whether the peaks of all devices are exact."""
        return all(device.exact for device in self.devices)


class Measured:
    """Measures a `with` block, or each call of a decorated function.

    An instance can be used repeatedly, nested, and by several threads at once.

    Args:
        name: the block's name.
        kept: whether the block is a phase, which is reported.
        reset_peaks: reset the allocator's peaks at the start of the block, so that its own peak is exact.
        ended: called with the result, in the user's thread.
        observed: receives the runs; by default the process' `Observed`.
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
        self._again = functools.partial(Measured, name, kept=kept, reset_peaks=reset_peaks, ended=ended)
        self._observed = observed or process_observed()
        self._name = self._observed.name_phase(name) if kept else name
        self._kept = kept
        self._reset_peaks = reset_peaks
        self._ended = ended
        self._running: RunningBlocks[MemoryUse] = RunningBlocks()

    def __enter__(self) -> MemoryUse:
        use = MemoryUse(self._name, reset_peaks=self._reset_peaks, kept=self._kept)
        self._running.push(use)
        try:
            with guest_safety():
                self._observed.enter(use)
        except BaseException:  # raised by the user's signal handler: the block does not start
            self._running.pop()
            with guest_safety():
                self._observed.leave(use)
            raise
        return use

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        use = self._running.pop()
        if use is None:
            return
        with guest_safety():
            out_of_memory = out_of_memory_in(error) if self._kept and error is not None else None
            if out_of_memory is not None:
                out_of_memory.__dict__.setdefault(_PHASE, self._name)
            self._observed.leave(use)
            if self._ended is not None:
                self._ended(use)

    def __call__(self, function: _Function) -> _Function:
        """Measure each call of a function, of a coroutine function or of a generator function until it ends."""
        # Calls of coroutines may end in any order, and the running blocks of one instance are a stack.
        return run_calls_in(function, lambda *_: self._again(observed=self._observed))

    def __reduce__(self) -> tuple[Callable[[], Measured], tuple[()]]:
        """Copy or pickle as a new instance, for example with a model that has it as an attribute."""
        return self._again, ()


def phase(name: str, *, reset_peaks: bool = False) -> Measured:
    """Measure a phase of a training step: `with gpumem.phase("forward"): ...`, or `@gpumem.phase("forward")`.

    The reports (`gpumem_torch_phase_peak_bytes`) and `summary()` show the largest peak of each phase since the last
    reset of the allocator's peaks. `with … as use` returns the values of this run: `use.peak_bytes`,
    `use.growth_bytes`, `use.devices`.

    A phase resets nothing. The peak of a run that raises the allocator's own peak is exact. Otherwise the peak lies
    between `peak_bytes`, the largest value that was read during the run, and `peak_at_most_bytes`, the allocator's
    peak. Values are read where phases start and end, and when the reporter takes a sample. `exact` is True if both
    bounds are equal. The reports show the lower bound. The phase with the highest peak is exact.

    The statistics describe the device: allocations of all threads count, for example of the autograd threads.
    Phases may be nested, overlap, and end by an exception. The first 16 names are reported, further names are measured
    only. A phase costs about 20 µs per device at each end, and a few microseconds without CUDA. Any thread may use it.
    Put it around a compiled function, not into one: `torch.compile` breaks the graph there, and raises with
    `fullgraph=True`.

    Args:
        name: `forward`, `backward`, `optimizer`, or any other name.
        reset_peaks: reset the allocator's peaks at the start, so that the phase's own peak is exact. Reports,
            `summary()` and outer phases still show the peaks before the reset, but
            `torch.cuda.max_memory_allocated()` does not.
    """
    return Measured(name, kept=True, reset_peaks=reset_peaks)


def phase_at_error(error: BaseException) -> str | None:
    """Return the innermost phase of an out-of-memory error, also if the error has ended the phase; None without one."""
    ended: str | None = error.__dict__.get(_PHASE)
    return ended or process_observed().current_phase()


def memory_context(name: str, *, reset_peaks: bool = False, level: int = logging.INFO) -> Measured:
    """Measure a block or a function, and log what it used: before, after, growth and peak of each device.

        with gpumem.memory_context("load checkpoint") as use:
            model.load_state_dict(torch.load(path))
        use.growth_bytes

    It measures like `phase`, which describes peaks, threads and costs, but reports nothing to the exporter. The logger
    is `gpumem_client`, which shows warnings only until the user's code configures logging.

    Args:
        name: prefix of the log lines.
        reset_peaks: reset the allocator's peaks at the start of the block, so that its own peak is exact.
        level: log level.
    """
    return Measured(name, kept=False, reset_peaks=reset_peaks, ended=functools.partial(_log, name, level))


def _log(name: str, level: int, use: MemoryUse) -> None:
    if not log.isEnabledFor(level):
        return
    if not use.devices:
        log.log(level, "%s: no CUDA", name)
    for device in use.devices:
        log.log(level, "%s: %s", name, device)
