"""Who is in a group, whether each of them can take part, and after which step they act. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from gpumem_exporter.actions.model import ActionRequest, Target
from gpumem_exporter.core.samples import ReportingProcess, Snapshot
from gpumem_exporter.core.steps import StepRate, first_common_step, seconds_until_step_ends
from gpumem_exporter.errors import GroupIncompleteError
from gpumem_exporter.wire.protocol import DeviceSample

__all__ = ["GROUP_LEAD_SECONDS", "Chosen", "group_of", "group_step", "lack", "require_in_time", "who"]

Chosen: TypeAlias = "tuple[int | str, ReportingProcess, tuple[DeviceSample, ...]]"
"""A process that is meant: its name, its report, and its samples of the devices meant."""

GROUP_LEAD_SECONDS = 5.0
"""How far ahead a group's step lies at least: longer than it takes to reach every rank, and to call it off."""


def group_of(targets: Sequence[Chosen], snapshot: Snapshot) -> list[Chosen]:
    """Every process of the targets' workload.

    Raises:
        GroupIncompleteError: the targets are of several workloads, or of none.
    """
    workloads = sorted({process.report.process.workload for _, process, _ in targets})
    if len(workloads) > 1 or not workloads[0]:
        named = ", ".join(workload or "(none)" for workload in workloads)
        raise GroupIncompleteError(f"a group is one workload; the target has {named}")
    return list(Target(workload=workloads[0]).select(snapshot))


def group_step(request: ActionRequest, targets: Sequence[Chosen], now_seconds: float) -> int:
    """A step that no rank has ended yet: the one that is asked for, or one that none ends before all have commands.

    Raises:
        GroupIncompleteError: a rank cannot take part or makes no steps, the step that is asked for has passed, or it
            would end after the deadline.
    """
    rates, lacking = [], []
    for pid, process, _ in targets:
        step, step_seconds = process.report.step, process.report.step_seconds
        what = lack(process, request)
        if what:
            lacking.append(f"{who(pid, process)}: {what}")
        elif step is None or not step_seconds:
            lacking.append(f"{who(pid, process)} makes no steps")
        elif request.at_step is not None and step >= request.at_step:
            lacking.append(f"{who(pid, process)} has ended {step} steps: {request.at_step} has passed")
        else:
            rates.append(StepRate(step, step_seconds, max(0.0, now_seconds - process.sampled_seconds)))
    if lacking:
        raise GroupIncompleteError("not every rank can take part: " + "; ".join(lacking))
    at_step = request.at_step if request.at_step is not None else first_common_step(rates, GROUP_LEAD_SECONDS)
    require_in_time(rates, at_step, request.deadline_seconds)
    return at_step


def require_in_time(rates: Sequence[StepRate], at_step: int, deadline_seconds: float) -> None:
    """Make sure that a step ends before the deadline.

    Raises:
        GroupIncompleteError: it does not, as the ranks go now.
    """
    latest_seconds = seconds_until_step_ends(rates, at_step)
    if latest_seconds > deadline_seconds:
        raise GroupIncompleteError(
            f"step {at_step} ends in about {latest_seconds:.1f} s, the deadline is in {deadline_seconds:g} s"
        )


def lack(process: ReportingProcess, request: ActionRequest) -> str:
    """What this reporter cannot do of what is asked; empty when it can do all."""
    report = process.report
    if report.actions and request.action not in report.actions:
        return f"it runs {', '.join(report.actions)}"
    if request.mode not in report.modes:
        return f"its reporter knows the mode {', '.join(report.modes)} alone"
    return ""


def who(pid: int | str, process: ReportingProcess) -> str:
    """A process as a message calls it."""
    rank = process.report.process.rank
    return f"pid {pid}" + (f" (rank {rank})" if rank else "")
