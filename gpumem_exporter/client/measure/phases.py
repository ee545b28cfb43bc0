"""Phases of a training step, with the peak memory of each."""

from __future__ import annotations

from gpumem_exporter.client.measure.measured import Measured
from gpumem_exporter.client.measure.observed import process_observed

__all__ = ["current_phase", "phase"]


def phase(name: str, *, reset_peaks: bool = False) -> Measured:
    """Measure a phase of a training step: `with gpumem.phase("forward"): ...`, or `@gpumem.phase("forward")`.

    The reports (`gpumem_torch_phase_peak_bytes`) and `summary()` show the largest peak of each phase since the last
    reset of the allocator's peaks. `with … as use` returns the values of this run: `use.peak_bytes`,
    `use.growth_bytes`, `use.devices`.

    A phase resets nothing. The peak of a run that raises the allocator's own peak is exact. Otherwise the peak lies
    between `peak_bytes`, the largest value that was read during the run, and `peak_at_most_bytes`, the allocator's
    peak. Values are read where phases start and end, and when the reporter takes a sample. `exact` is True if both
    bounds are equal. The reports show the lower bound. The phase with the highest peak is exact.

    The statistics are those of the device: allocations of all threads count, for example of the autograd threads.
    Phases may be nested, overlap, and end by an exception. The first 64 names are reported, further names are measured
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


def current_phase() -> str | None:
    """Return the innermost phase of this thread, or of the thread for which autograd runs it; else None."""
    return process_observed().current_phase()
