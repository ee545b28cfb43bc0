"""The requests that clear the caches of a target with the least harm. Pure.

A clear in the middle of a step stalls the step, and a rank that clears alone makes all other ranks wait. So a process
that trains clears at the end of a step, and a job with several ranks that train clears after the same step.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

from gpumem_exporter.actions.group import GROUP_LEAD_SECONDS, group_step
from gpumem_exporter.actions.request import MAX_DEADLINE_SECONDS, ActionRequest, Target
from gpumem_exporter.actions.selection import SelectedProcess, select_reporting
from gpumem_exporter.core.samples import Snapshot
from gpumem_exporter.errors import GroupIncompleteError

_DEADLINE_STEPS = 4
"""A job that trains has the time of this number of its steps, because a step may take longer than the last ones."""


@dataclass(frozen=True, slots=True)
class Suggestion:
    """How to clear the caches of a target."""

    requests: tuple[ActionRequest, ...]
    """The requests to send: the one for the processes that clear at once is the first."""
    target: Target
    """The processes of all requests: the given target, and the other ranks of its groups."""


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
    whole = _jobs(select_reporting(Target(), snapshot))
    at_once: list[SelectedProcess] = []
    alone: list[SelectedProcess] = []
    groups: list[tuple[SelectedProcess, ...]] = []
    for key, job in _jobs(selected).items():
        training = [one for one in job if _trains(one, request)]
        # Also the ranks that the target does not name. They have the same owner, so the caller may act on them as well.
        ranks = whole[key]
        if (
            training
            and len(ranks) > 1
            and _acts_together(job, ranks, request, now_seconds, free_deadline=free_deadline)
        ):
            groups.append(tuple(ranks))
        else:
            alone += training
            at_once += [one for one in job if one not in training]
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


def _trains(one: SelectedProcess, request: ActionRequest) -> bool:
    report = one.process.report
    # A reporter whose process ends no more steps reports no duration of a step.
    counts = report.step is not None and bool(report.step_seconds)
    return counts and one.refusal(replace(request, mode="step")) is None


def _acts_together(
    job: Sequence[SelectedProcess],
    ranks: Sequence[SelectedProcess],
    request: ActionRequest,
    now_seconds: float,
    *,
    free_deadline: bool,
) -> bool:
    """Return whether all ranks of a job can act after the same step, within the deadline of the selected ones."""
    group = _at_step(request, job, group=True, free_deadline=free_deadline)
    try:
        group_step(group, ranks, now_seconds)
    except GroupIncompleteError:
        return False
    return True


def _at_step(
    request: ActionRequest, processes: Sequence[SelectedProcess], *, group: bool = False, free_deadline: bool
) -> ActionRequest:
    deadline_seconds = request.deadline_seconds
    if free_deadline:
        longest = max(one.process.report.step_seconds or 0.0 for one in processes)
        needed = GROUP_LEAD_SECONDS + _DEADLINE_STEPS * longest
        deadline_seconds = min(MAX_DEADLINE_SECONDS, max(deadline_seconds, round(needed, 1)))
    return replace(
        request,
        dry_run=False,
        target=_target(processes),
        mode="step",
        group=group,
        deadline_seconds=deadline_seconds,
    )


def _target(processes: Iterable[SelectedProcess]) -> Target:
    return Target(pid=[one.pid for one in processes])
