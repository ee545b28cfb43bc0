"""The one reporter of this process, and the functions that a program calls."""

from __future__ import annotations

from gpumem_exporter.client.allocator.attached import detach
from gpumem_exporter.client.hooks.steps import process_steps
from gpumem_exporter.client.reporter.plan import AnyPlan
from gpumem_exporter.client.reporter.reporter import Reporter
from gpumem_exporter.client.reporter.settings import ReporterSettings
from gpumem_exporter.wire.protocol import OutOfMemory

__all__ = ["latest_oom", "start", "step", "stop"]

# A process has one allocator, so it has one reporter. With that of `_observed` and `_steps`, for the same reason, it is
# the only state that the reporter's modules hold.
_reporter = Reporter(process_steps())


def start(
    workload: str | None = None,
    *,
    rank: str | int | None = None,
    url: str | None = None,
    clean: bool = False,
    plan: AnyPlan | None = None,
) -> None:
    """Report this process' GPU memory, from the moment it initialises CUDA on.

    What is not given comes from the environment: GPUMEM_WORKLOAD; GPUMEM_RANK, RANK or SLURM_PROCID;
    GPUMEM_EXPORTER_URL, else the socket /run/gpumem/exporter.sock, else http://127.0.0.1:9844; GPUMEM_PLAN. With
    GPUMEM_DISABLED=1 nothing happens. Starting twice is one reporter, and the first one's settings hold. Any thread may
    call this.

    Args:
        workload: the job's name, a label on its series.
        rank: this process' rank in the job.
        url: `http://host:port`, `https://host:port` or `unix:///path/to.sock`.
        clean: where the program has used CUDA already, free first all that it holds and does not use (`deep_clean`).
        plan: what was planned for this process before it ran (`gpumem-exporter plan … --json > plan.json`, or
            `training.plan`), whose error is then exported: the file's path, what stands in it, or the plan itself. One
            that cannot be read costs a line of log and nothing else.

    Raises:
        ConfigurationError: the URL is neither of the two forms.
    """
    settings = ReporterSettings.resolve(workload=workload, rank=rank, url=url, plan=plan)
    _reporter.start(settings)
    if clean and not settings.disabled:
        from gpumem_exporter.client.cleanup.clear import clean_start

        clean_start()


def latest_oom() -> tuple[float, OutOfMemory] | None:
    """The last out-of-memory error that the reporter has observed, and when (monotonic seconds); for diagnoses."""
    return _reporter.latest_oom()


def stop() -> None:
    """End reporting and remove the client's hooks; `start` begins again.

    The exporter forgets this process at once. Waits 0.3 seconds at most. `client.hooks` lists the hooks, and what torch
    and Python offer no way to remove.
    """
    _reporter.stop()
    detach()


def step() -> None:
    """Mark the end of a training step, where no optimizer of `torch.optim` does; once called, it alone counts steps.

    Costs some microseconds at most, and about 15 µs a device once a report; nothing where nobody waits for a step.
    """
    process_steps().mark()
