"""`start`, `step` and `stop`. Each imports what it needs when it is called."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpumem_client.hooks.process_life import singletons

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpumem_client.allocator.allocator import Allocator
    from gpumem_client.hooks.steps import Steps
    from gpumem_client.reporter.planned_peak import AnyPlan
    from gpumem_client.reporter.reporter import Reporter


def start(
    workload: str | None = None,
    *,
    rank: str | int | None = None,
    url: str | None = None,
    clean: bool = False,
    plan: AnyPlan | None = None,
    oom_profile: bool | None = None,
    actions: str | Iterable[str] | None = None,
) -> None:
    """Report this process' GPU memory as soon as CUDA is initialized.

    Below `gpumem-exporter run`, its workload and its rank have precedence over the arguments, and a warning is logged.
    Missing arguments come from the environment: GPUMEM_WORKLOAD; GPUMEM_RANK, RANK or SLURM_PROCID, otherwise the rank
    in the process group of torch.distributed; GPUMEM_EXPORTER_URL, otherwise the socket /run/gpumem/exporter.sock,
    otherwise http://127.0.0.1:9844; GPUMEM_PLAN; GPUMEM_OOM_PROFILE. GPUMEM_DISABLED=1 turns the client off. Calling
    `start()` again has no effect, except that its `actions` narrow the actions of the first call.
    Any thread may call this.

    Args:
        workload: the job's name, a label of its series.
        rank: this process' rank in the job.
        url: `http://host:port`, `https://host:port` or `unix:///path/to.sock`.
        clean: first free memory that the process does not use (`deep_clean`), if CUDA is initialized.
        plan: the job's memory plan, whose error is then exported: the path of a file that `gpumem-exporter plan --json`
            wrote, the content of such a file, or the result of `training.plan`. An unreadable plan is logged and
            ignored.
        oom_profile: record the stack of each allocation from the start of CUDA, and send a memory profile of the moment
            of an out-of-memory error, at most one per minute. docs/reporting.md has the cost.
        actions: what exporters may request of this process, such as `["empty_cache", "reset_peak"]`: names of actions
            or commands; all by default, nothing if it is empty. GPUMEM_ACTIONS and GPUMEM_PROFILE narrow it further.

    Raises:
        ConfigurationError: the URL has none of these forms.
    """
    from gpumem_client.reporter.reporter import start_reporter
    from gpumem_client.reporter.reporter_settings import ReporterSettings

    settings = ReporterSettings.resolve(
        workload=workload, rank=rank, url=url, plan=plan, oom_profile=oom_profile, actions=actions
    )
    start_reporter(settings)
    if clean and not settings.disabled:
        from gpumem_client.release import clean_start

        clean_start()


def stop() -> None:
    """End reporting and remove the client's hooks; `start` may be called again.

    The exporter forgets this process at once. The call waits at most 0.3 seconds. docs/reporting.md lists the hooks,
    including the hooks that torch and Python cannot remove.
    """
    reporter: Reporter | None = singletons.pop("reporter", None)
    if reporter is not None:
        reporter.stop()
    steps: Steps | None = singletons.get("steps")
    if steps is not None:
        steps.update()
    allocator: Allocator | None = singletons.pop("shared_allocator", None)
    if allocator is not None:
        allocator.detach()


def step() -> None:
    """Mark the end of a training step that no optimizer of `torch.optim` makes.

    After the first call, only these calls count as steps. A first call after a step of an optimizer marks the end of
    that step, which has been counted. A call takes a few microseconds, and about 15 µs per device once per report.
    Without a listener it does nothing.
    """
    steps: Steps | None = singletons.get("steps")
    if steps is not None:
        steps.mark()
