"""When each process of a request acts: at once, at the end of a step, with all ranks of its job, or when idle. Pure.

A clear in the middle of a step stalls the step, and a rank that clears alone makes all other ranks wait for it in their
next collective. In mode `auto`, a process that trains therefore clears at the end of a step, and the ranks of a job
after the same step. If that is not possible, because a rank runs on another node or does not report, each rank waits
for an idle time: no rank that takes no part waits for one that does.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

from gpumem_exporter.actions.action_options import MAX_DEADLINE_SECONDS, ActionRequest
from gpumem_exporter.actions.results import unsupported
from gpumem_exporter.actions.selection import SelectedProcess, commanded, processes_of
from gpumem_exporter.core.samples import JobKey, ReportingProcess, Snapshot

GROUP_LEAD_SECONDS = 5.0
"""The minimum time until a group's step: enough to reach every rank, and to withdraw the commands again."""
# The minimum number of steps between the last report of a rank and the step at which it acts: the rank may be at the
# end of the next one already.
_LEAD_STEPS = 2
# A job that trains has the time of this number of its steps, because a step may take longer than the last ones.
_DEADLINE_STEPS = 4
# The actions that take a part of a second. Others take microseconds, or show the moment at which they are requested.
_STALLING = ("empty_cache", "collect_garbage")


class Turn(NamedTuple):
    """When a process acts."""

    mode: str
    """One of `protocol.MODES`; empty if the exporter itself acts on the process."""
    deadline_seconds: float
    group: JobKey | None = None
    """The job with whose other ranks it acts, or none of them does; None if it acts by itself."""
    at_step: int | None = None
    """The step of the group."""
    obstacle: str = ""
    """Why the ranks of its job cannot act after one step. In mode `step`, the process then does not act."""


def plan(
    request: ActionRequest, selected: Sequence[SelectedProcess], snapshot: Snapshot, now_seconds: float
) -> list[tuple[SelectedProcess, Turn]]:
    """Return when each process acts, with the ranks of a group that the target does not name.

    They have the same owner as the named ones, so the caller may act on them as well.
    """
    stalls = acts_on_jobs(request)
    if request.mode != "step" and not stalls:
        mode = "now" if request.mode == "auto" else request.mode
        turns = [(one, Turn(mode if commanded(request, one) else "", request.deadline_seconds)) for one in selected]
        return sorted(turns, key=lambda planned: not planned[1].mode)
    jobs: dict[Hashable, list[SelectedProcess]] = {}
    for one in selected:
        jobs.setdefault(one.process.job or one.pid, []).append(one)
    whole: dict[Hashable, list[SelectedProcess]] = {}
    # Another action in one rank is of no use for the other ranks.
    for one in processes_of(snapshot).values() if stalls else ():
        if one.reporter is not None and one.reporter.job in jobs:
            whole.setdefault(one.reporter.job, []).append(one)
    return [
        each for job, some in jobs.items() for each in turns_of_job(request, some, whole.get(job, some), now_seconds)
    ]


def acts_on_jobs(request: ActionRequest) -> bool:
    """Return whether an action of one rank becomes an action of all ranks of its job."""
    return request.action in _STALLING and request.mode in ("auto", "step")


def is_rank(process: ReportingProcess) -> bool:
    """Return whether other processes may wait for a process in each of their steps."""
    return bool(process.report.process.rank) and process.report.process.world_size != 1


def steps_with_ranks(process: ReportingProcess) -> bool:
    """Return whether a process trains as a rank of a job that has a name."""
    return process.job is not None and is_rank(process) and bool(process.report.step_seconds)


def turns_of_job(
    request: ActionRequest, some: Sequence[SelectedProcess], whole: Sequence[SelectedProcess], now_seconds: float
) -> list[tuple[SelectedProcess, Turn]]:
    """Return when some processes of a job act that act at the end of a step if they train; `whole` is all of them."""
    if request.at_step is not None:  # it is the caller that knows the job, and has chosen its step
        ranks = [one for one in whole if one.process.job is not None]
    else:
        ranks = [one for one in whole if is_rank(one.process)]
        if len(ranks) == 1 and (request.action not in _STALLING or not _world_size(ranks)):
            ranks = []
    turns, pids = [], {rank.pid for rank in ranks}
    for one in some:
        if one.pid not in pids:  # no other process waits for it
            steps = request.mode == "step" or trains(one.process, request.action)
            seconds = _deadline_seconds(request, [one.process]) if steps else request.deadline_seconds
            turns.append((one, Turn("step" if steps else "now", seconds)))
    named = [one for one in some if one.pid in pids]
    if named:
        turn = _turn_of_ranks(request, ranks, now_seconds)
        turns += [(one, turn) for one in (ranks if turn.group is not None else named)]
    return turns


def step_of_group(
    ranks: Sequence[SelectedProcess], request: ActionRequest, deadline_seconds: float, now_seconds: float
) -> tuple[int | None, str]:
    """Return the step of a group: the requested one, or one that no rank ends before every rank has its command.

    If a rank cannot take part, or the step would end after the deadline, return None and the reason.
    """
    obstacles: list[str] = []
    # The completed steps of each rank, the seconds of a step, and since when the rank had completed them.
    rates: list[tuple[int, float, float]] = []
    for rank in ranks:
        report = rank.process.report
        refusal = unsupported(rank.process, request, "step")
        if refusal is not None:
            obstacles.append(f"{rank}: {refusal.reason}")
        elif report.step is None or not report.step_seconds:
            obstacles.append(f"{rank} makes no steps")
        elif request.at_step is not None and report.step >= request.at_step:
            obstacles.append(f"{rank} has ended {report.step} steps: step {request.at_step} has passed")
        else:
            age_seconds = max(0.0, now_seconds - rank.process.sampled_seconds)
            rates.append((report.step, report.step_seconds, age_seconds))
    if obstacles:
        return None, "; ".join(obstacles)
    # By default the first step that no rank completes before every rank has its command.
    at_step = request.at_step or max(
        step + max(math.ceil((age + GROUP_LEAD_SECONDS) / seconds), _LEAD_STEPS) for step, seconds, age in rates
    )
    latest_seconds = max((at_step - step) * seconds - age for step, seconds, age in rates)
    if latest_seconds <= deadline_seconds:
        return at_step, ""
    return None, f"step {at_step} ends in about {latest_seconds:.1f} s, the deadline is in {deadline_seconds:g} s"


def trains(process: ReportingProcess, action: str) -> bool:
    """Return whether a process ends steps, and can act at the end of a step."""
    report = process.report
    # A reporter whose process ends no more steps reports no duration of a step.
    steps = report.step is not None and bool(report.step_seconds)
    able = (not report.actions or action in report.actions) and action not in report.denied_actions
    return steps and "step" in report.modes and able


def _turn_of_ranks(request: ActionRequest, ranks: Sequence[SelectedProcess], now_seconds: float) -> Turn:
    """Return when the ranks of a job act, each of which waits for the others in every step."""
    if request.mode == "auto" and not any(trains(rank.process, request.action) for rank in ranks):
        return Turn("now", request.deadline_seconds)
    deadline_seconds = _deadline_seconds(request, [rank.process for rank in ranks])
    at_step, obstacle = None, _obstacle(request, ranks)
    if not obstacle:
        at_step, obstacle = step_of_group(ranks, request, deadline_seconds, now_seconds)
    if not obstacle:
        return Turn("step", deadline_seconds, ranks[0].process.job, at_step)
    return Turn("idle" if request.mode == "auto" else "step", request.deadline_seconds, obstacle=obstacle)


def _obstacle(request: ActionRequest, ranks: Sequence[SelectedProcess]) -> str:
    """Return why the processes are not all ranks of one job; empty if they are, as far as they report it."""
    numbers = Counter(one.rank for one in ranks)
    twice = next((rank for rank, times in numbers.items() if rank and times > 1), None)
    if twice is not None:
        return f"rank {twice} runs {numbers[twice]} times: these are several jobs"
    if request.at_step is not None or request.action not in _STALLING:
        return ""
    if ranks[0].process.job is None:
        return f"the other ranks of {ranks[0]} are not known, because it has no workload"
    world_size = _world_size(ranks)
    missing = next((number for number in range(world_size) if str(number) not in numbers), None)
    return "" if missing is None else f"rank {missing} of {world_size} does not report here and would wait"


def _world_size(ranks: Iterable[SelectedProcess]) -> int:
    return max((one.process.report.process.world_size or 0 for one in ranks), default=0)


def _deadline_seconds(request: ActionRequest, processes: Iterable[ReportingProcess]) -> float:
    """Return the deadline for the end of a step; with long steps it is later than by default."""
    if not request.free_deadline:
        return request.deadline_seconds
    longest = max((process.report.step_seconds or 0.0 for process in processes), default=0.0)
    steps_seconds = round(GROUP_LEAD_SECONDS + _DEADLINE_STEPS * longest, 1)
    return min(MAX_DEADLINE_SECONDS, max(request.deadline_seconds, steps_seconds))
