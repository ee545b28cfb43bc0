"""The one reporter of this process, and the functions that a program calls."""

from __future__ import annotations

from gpumem_exporter.client._settings import ReporterSettings
from gpumem_exporter.client.reporter import Reporter

__all__ = ["start", "step", "stop"]

# A process has one allocator, so it has one reporter: the only state that a module of this package holds.
_reporter = Reporter()


def start(workload: str | None = None, *, rank: str | int | None = None, url: str | None = None) -> None:
    """Report this process' GPU memory, from the moment it initialises CUDA on.

    What is not given comes from the environment: GPUMEM_WORKLOAD; GPUMEM_RANK, RANK or SLURM_PROCID;
    GPUMEM_EXPORTER_URL, else the socket /run/gpumem/exporter.sock, else http://127.0.0.1:9844. With GPUMEM_DISABLED=1
    nothing happens. Starting twice is one reporter, and the first one's settings hold. Any thread may call this.

    Args:
        workload: the job's name, a label on its series.
        rank: this process' rank in the job.
        url: `http://host:port` or `unix:///path/to.sock`.

    Raises:
        ConfigurationError: the URL is neither of the two forms.
    """
    _reporter.start(ReporterSettings.resolve(workload=workload, rank=rank, url=url))


def stop() -> None:
    """End reporting; the exporter forgets this process at once. Waits 0.3 seconds at most. `start` begins anew."""
    _reporter.stop()


def step() -> None:
    """Mark the end of a training step, where no optimizer of `torch.optim` does; once called, it alone counts steps.

    Costs well under a microsecond, and about 15 µs a device once a report. Does nothing before `start`.
    """
    _reporter.step()
