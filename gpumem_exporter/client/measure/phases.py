"""The phases of a training step, and how much memory each of them needs at most."""

from __future__ import annotations

from gpumem_exporter.client.measure.measured import Measured
from gpumem_exporter.client.measure.observed import process_observed

__all__ = ["current_phase", "phase"]


def phase(name: str, *, reset_peaks: bool = False) -> Measured:
    """Measure a phase of the program: `with gpumem.phase("forward"): ...`, or `@gpumem.phase("forward")`.

    The peak of each phase is in the reports (`gpumem_torch_phase_peak_bytes`) and in `summary()`: the largest of its
    runs since the allocator's peaks were last reset. `with … as use` gives the figures of this run: `use.peak_bytes`,
    `use.growth_bytes`, `use.devices`.

    Nothing is reset for that. A run that raises the allocator's own peak is known exactly. For any other the peak lies
    between the largest value that was looked at (where phases begin and end, and at the reporter's samples) and the
    allocator's peak: `peak_bytes` is the lower bound, `peak_at_most_bytes` the upper one, `exact` tells whether they
    meet. What is reported is the lower bound. So the phase with the highest peak of all is exact, and so is any other
    until a higher one has come; a peak that builds up to the end of its phase is near the value looked at there.

    The statistics are the device's: it does not matter which threads allocate (a backward runs in threads of
    autograd's), and what other threads do meanwhile counts, too. Phases may be nested, overlap, and end by an
    exception. The first 64 names are kept; further ones are measured and not reported. Costs about 20 µs a device at
    each end, and some microseconds without CUDA. Any thread may use it. It belongs around a compiled function, not into
    one: `torch.compile` cannot trace it, breaks the graph there, and refuses it with `fullgraph=True`.

    Args:
        name: `forward`, `backward`, `optimizer`, or any other.
        reset_peaks: let the allocator's peaks begin anew at the phase's begin: then its peak is exact. Reports,
            `summary()` and the phases around it still tell the peak of all; `torch.cuda.max_memory_allocated()` tells
            that since the last such begin.
    """
    return Measured(name, kept=True, reset_peaks=reset_peaks)


def current_phase() -> str | None:
    """The innermost phase of this thread, else of the one that it works for: a backward's threads run in its phase."""
    return process_observed().current_phase()
