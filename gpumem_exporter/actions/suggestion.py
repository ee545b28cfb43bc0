"""The requests that clear the caches of a target with the least harm. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from gpumem_exporter.actions.declarations import DEFAULT_DEADLINE_SECONDS, MAX_DEADLINE_SECONDS, ActionRequest, Target
from gpumem_exporter.actions.group import GROUP_LEAD_SECONDS, StepRate, first_common_step, seconds_until_step_ends
from gpumem_exporter.actions.selection import SelectedProcess, select_reporting
from gpumem_exporter.core.samples import ReportingProcess, Snapshot

# A job that trains has the time of this number of its steps, because a step may take longer than the last ones.
_DEADLINE_STEPS = 4


@dataclass(frozen=True, slots=True)
class Suggestion:
    """How to clear the caches of a target."""

    requests: tuple[ActionRequest, ...]
    """The requests to send: the one for the processes that clear at once is the first."""
    target: Target
    """The processes of all requests: the given target, and the other ranks of its groups."""


class Timing(NamedTuple):
    """When all processes of a job clear, as a request has it."""

    mode: str
    group: bool
    deadline_seconds: float


def suggested_timing(
    job: Sequence[ReportingProcess], now_seconds: float, *, deadline_seconds: float | None = None
) -> Timing:
    """Return when all processes of a job clear with the least harm.

    `job` are all processes of a workload and owner that report. Without `deadline_seconds`, the deadline is chosen.
    """
    # A clear in the middle of a step stalls the step, and a rank that clears alone makes all other ranks wait. So a
    # process that trains clears at the end of a step, and a job with several ranks that train after the same step.
    training = [process for process in job if trains(process)]
    if deadline_seconds is None:
        deadline_seconds = long_enough_seconds(process.report.step_seconds for process in training)
    if not training:
        return Timing("now", False, deadline_seconds)
    if len(job) == 1 or len(training) < len(job):
        return Timing("step", False, deadline_seconds)
    rates = [StepRate.of(process, now_seconds) for process in job]
    at_step = first_common_step(rates, GROUP_LEAD_SECONDS)
    return Timing("step", seconds_until_step_ends(rates, at_step) <= deadline_seconds, deadline_seconds)


def trains(process: ReportingProcess) -> bool:
    """Return whether a process ends steps, and can clear at the end of a step."""
    report = process.report
    # A reporter whose process ends no more steps reports no duration of a step.
    steps = report.step is not None and bool(report.step_seconds)
    return steps and "step" in report.modes and process.clears


def suggest_clears(
    request: ActionRequest,
    selected: Sequence[SelectedProcess],
    snapshot: Snapshot,
    now_seconds: float,
    *,
    free_deadline: bool,
) -> Suggestion:
    """Choose when each selected process of a clear acts; the mode of the request is ignored.

    With `free_deadline`, a job with long steps may have a later deadline than the request.
    """
    deadline_seconds = None if free_deadline else request.deadline_seconds
    whole = _jobs(select_reporting(Target(), snapshot))
    at_once: list[SelectedProcess] = []
    alone: list[SelectedProcess] = []
    groups: list[list[SelectedProcess]] = []
    for key, job in _jobs(selected).items():
        # Also the ranks that the target does not name. They have the same owner, so the caller may act on them as well.
        ranks = whole[key]
        job_timing = suggested_timing([one.process for one in ranks], now_seconds, deadline_seconds=deadline_seconds)
        if job_timing.group:
            groups.append(ranks)
        else:
            alone += [one for one in job if trains(one.process)]
            at_once += [one for one in job if not trains(one.process)]
    if not alone and not groups:
        return Suggestion((replace(request, dry_run=False),), request.target)
    requests = [replace(request, dry_run=False, target=_target(at_once))] if at_once else []
    if alone:
        requests.append(_at_step(request, alone, free_deadline=free_deadline))
    requests += [_at_step(request, ranks, group=True, free_deadline=free_deadline) for ranks in groups]
    every = [*at_once, *alone, *(rank for ranks in groups for rank in ranks)]
    return Suggestion(tuple(requests), request.target if len(every) == len(selected) else _target(every))


def _jobs(selected: Iterable[SelectedProcess]) -> dict[Hashable, list[SelectedProcess]]:
    """Return the processes of each workload and owner. A process without a workload is a job of its own."""
    jobs: dict[Hashable, list[SelectedProcess]] = {}
    for one in selected:
        workload = one.process.report.process.workload
        jobs.setdefault((workload, one.process.key.owner) if workload else one.pid, []).append(one)
    return jobs


def _at_step(
    request: ActionRequest, processes: Sequence[SelectedProcess], *, group: bool = False, free_deadline: bool
) -> ActionRequest:
    deadline_seconds = request.deadline_seconds
    if free_deadline:
        steps = [one.process.report.step_seconds for one in processes]
        deadline_seconds = long_enough_seconds(steps, deadline_seconds)
    return replace(
        request,
        dry_run=False,
        target=_target(processes),
        mode="step",
        group=group,
        deadline_seconds=deadline_seconds,
    )


def long_enough_seconds(step_seconds: Iterable[float | None], least_seconds: float = DEFAULT_DEADLINE_SECONDS) -> float:
    """Return the deadline for a clear at the end of a step; `step_seconds` has the duration of each process' steps."""
    longest = max((seconds or 0.0 for seconds in step_seconds), default=0.0)
    return min(MAX_DEADLINE_SECONDS, max(least_seconds, round(GROUP_LEAD_SECONDS + _DEADLINE_STEPS * longest, 1)))


def _target(processes: Iterable[SelectedProcess]) -> Target:
    return Target(pid=[one.pid for one in processes])
