"""The processes of a group and the step after which they all act. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from gpumem_exporter.actions.caller import Caller, Rights
from gpumem_exporter.actions.declarations import ActionRequest, Target
from gpumem_exporter.actions.results import unsupported
from gpumem_exporter.actions.selection import SelectedProcess, Selection, select_reporting
from gpumem_exporter.core.samples import ReportingProcess
from gpumem_exporter.errors import GroupIncompleteError

GROUP_LEAD_SECONDS = 5.0
"""The minimum time until a group's step: enough to reach every rank, and to withdraw the commands again."""
# The owners, and the processes of each, that a message names.
_MAX_SHOWN = 8
# The minimum number of steps between the last report of a rank and the step at which it acts: the rank may be at the
# end of the next one already.
_LEAD_STEPS = 2


@dataclass(frozen=True, slots=True)
class StepRate:
    """The progress of a rank and the duration of its steps."""

    step: int
    """The number of completed steps in the last report."""
    step_seconds: float
    """The duration of a step; greater than 0."""
    since_seconds: float
    """The age of the last report."""

    @classmethod
    def of(cls, process: ReportingProcess, now_seconds: float) -> StepRate:
        """Return the rate of a process that ends steps."""
        report = process.report
        age_seconds = max(0.0, now_seconds - process.sampled_seconds)
        return cls(report.step or 0, report.step_seconds or 0.0, age_seconds)


def first_common_step(rates: Iterable[StepRate], lead_seconds: float) -> int:
    """Return the first step that no rank completes within `lead_seconds` at its current rate."""
    return max(
        rate.step + max(math.ceil((rate.since_seconds + lead_seconds) / rate.step_seconds), _LEAD_STEPS)
        for rate in rates
    )


def seconds_until_step_ends(rates: Iterable[StepRate], step: int) -> float:
    """Return the seconds until the slowest rank completes a step at its current rate."""
    return max((step - rate.step) * rate.step_seconds - rate.since_seconds for rate in rates)


def whole_group(selection: Selection, request: ActionRequest, caller: Caller, now_seconds: float) -> Selection:
    """Return every process of the selected processes' workload and owner, and the step after which they act.

    Raises GroupIncompleteError if there is not one workload and owner, or if a rank cannot take part.
    """
    workloads = sorted({one.process.report.process.workload for one in selection.reporting})
    if len(workloads) > 1 or not workloads[0]:
        named = ", ".join(workload or "(none)" for workload in workloads)
        raise GroupIncompleteError(f"a group is one workload; the target has {named}")
    # The workload is only a label, which the processes of another user or container may have as well. If there are
    # several owners, a user's group is its own outside of containers. Otherwise the target must name the processes.
    owners = {one.process.key.owner for one in selection.reporting}
    own = (caller.uid, caller.place)
    if len(owners) > 1 and not request.target.pid:
        if caller.rights is not Rights.OWN or own not in owners:
            raise GroupIncompleteError(
                "a group belongs to one user and one container; the target has processes of "
                f"{_named(selection.reporting)}: name its processes with pid, or its user"
            )
        owners = {own}
    ranks = tuple(
        rank
        for rank in select_reporting(Target(workload=workloads[0]), selection.snapshot)
        if rank.process.key.owner in owners and caller.may_act_on(rank.process)
    )
    return replace(selection, reporting=ranks, listed=(), at_step=group_step(request, ranks, now_seconds))


def _named(selected: Sequence[SelectedProcess]) -> str:
    """Return the owners of processes with the names of the processes."""
    pids: dict[str, list[str]] = {}
    for one in selected:
        uid, place = one.process.key.owner
        owner = "an unknown user" if uid is None else f"uid {uid}"
        pids.setdefault(owner + (f" in container {place}" if place.container else ""), []).append(str(one.pid))
    return ", ".join(f"{owner} (pid {', '.join(pids[owner][:_MAX_SHOWN])})" for owner in sorted(pids)[:_MAX_SHOWN])


def group_step(request: ActionRequest, ranks: Sequence[SelectedProcess], now_seconds: float) -> int:
    """Return the step of a group: the requested one, or one that no rank ends before every rank has its command.

    Raises:
        GroupIncompleteError: a rank does not support the request or has no steps, the requested step has passed, or
            the step would end after the deadline.
    """
    rates: list[StepRate] = []
    obstacles: list[str] = []
    for rank in ranks:
        report = rank.process.report
        refusal = unsupported(rank.process, request)
        if refusal is not None:
            obstacles.append(f"{rank}: {refusal.reason}")
        elif report.step is None or not report.step_seconds:
            obstacles.append(f"{rank} makes no steps")
        elif request.at_step is not None and report.step >= request.at_step:
            obstacles.append(f"{rank} has ended {report.step} steps: step {request.at_step} has passed")
        else:
            rates.append(StepRate.of(rank.process, now_seconds))
    if obstacles:
        raise GroupIncompleteError("not every rank can take part: " + "; ".join(obstacles))
    at_step = request.at_step if request.at_step is not None else first_common_step(rates, GROUP_LEAD_SECONDS)
    require_in_time(rates, at_step, request.deadline_seconds)
    return at_step


def require_in_time(rates: Sequence[StepRate], at_step: int, deadline_seconds: float) -> None:
    """Raise `GroupIncompleteError` if a step ends after the deadline at the current step rates."""
    latest_seconds = seconds_until_step_ends(rates, at_step)
    if latest_seconds > deadline_seconds:
        raise GroupIncompleteError(
            f"step {at_step} ends in about {latest_seconds:.1f} s, the deadline is in {deadline_seconds:g} s"
        )
