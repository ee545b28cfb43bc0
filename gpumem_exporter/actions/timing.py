"""When each process of a request acts: at once, at the end of a step, with all ranks of its job, or when idle. Pure.

A clear in the middle of a step stalls the step, and a rank that clears alone makes all other ranks wait for it in their
next collective. In mode `auto`, a process that trains therefore clears at the end of a step, and the ranks of a job
after the same step. If that is not possible, because a rank runs on another node or does not report, each rank waits
for an idle time: no rank that takes no part waits for one that does.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from gpumem_exporter.actions.action_options import MAX_DEADLINE_SECONDS, ActionRequest
from gpumem_exporter.actions.results import unsupported
from gpumem_exporter.actions.selection import SelectedProcess
from gpumem_exporter.core.naming import json_pid
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
_MAX_NAMED = 8


class Turn(NamedTuple):
    """When a process acts."""

    mode: str
    """One of `protocol.MODES`."""
    deadline_seconds: float
    group: JobKey | None = None
    """The job with whose other ranks it acts, or none of them does; None if it acts by itself."""
    at_step: int | None = None
    """The step of the group."""
    obstacle: str = ""
    """Why the ranks of its job cannot act after one step. In mode `step`, the process then does not act."""


@dataclass(frozen=True, slots=True)
class StepRate:
    """The progress of a rank and the duration of its steps."""

    step: int
    """The number of completed steps in the last report."""
    step_seconds: float
    """The duration of a step; greater than 0."""
    since_seconds: float
    """The age of the last report."""


def first_common_step(rates: Iterable[StepRate], lead_seconds: float) -> int:
    """Return the first step that no rank completes within `lead_seconds` at its current rate."""
    return max(
        rate.step + max(math.ceil((rate.since_seconds + lead_seconds) / rate.step_seconds), _LEAD_STEPS)
        for rate in rates
    )


def seconds_until_step_ends(rates: Iterable[StepRate], step: int) -> float:
    """Return the seconds until the slowest rank completes a step at its current rate."""
    return max((step - rate.step) * rate.step_seconds - rate.since_seconds for rate in rates)


def plan(
    request: ActionRequest, selected: Sequence[SelectedProcess], snapshot: Snapshot, now_seconds: float
) -> list[tuple[SelectedProcess, Turn]]:
    """Return when each process acts, with the ranks of a group that the target does not name.

    They have the same owner as the named ones, so the caller may act on them as well.
    """
    stalls = acts_on_jobs(request)
    if request.mode != "step" and not stalls:
        mode = "now" if request.mode == "auto" else request.mode
        return [(one, Turn(mode, request.deadline_seconds)) for one in selected]
    jobs: dict[Hashable, list[SelectedProcess]] = {}
    for one in selected:
        jobs.setdefault(one.process.job or one.pid, []).append(one)
    whole = jobs
    if stalls:  # another action in one rank is of no use for the other ranks
        whole = {job: [] if isinstance(job, JobKey) else some for job, some in jobs.items()}
        for name, process in snapshot.names.reporting:
            if process.job in jobs:
                whole[process.job].append(SelectedProcess(json_pid(name), process, process.report.devices))
    return [each for job, some in jobs.items() for each in turns_of_job(request, some, whole[job], now_seconds)]


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
    ranks = _ranks(request, whole)
    pids = {rank.pid for rank in ranks}
    others = [one for one in some if one.pid not in pids]
    turns = []
    for one in others:  # no other process waits for them
        steps = request.mode == "step" or trains(one.process, request.action)
        seconds = _deadline_seconds(request, [one.process]) if steps else request.deadline_seconds
        turns.append((one, Turn("step" if steps else "now", seconds)))
    if len(others) < len(some):
        turn = _turn_of_ranks(request, ranks, now_seconds)
        acting = ranks if turn.group is not None else [one for one in some if one.pid in pids]
        turns += [(one, turn) for one in acting]
    return turns


def step_of_group(
    ranks: Sequence[SelectedProcess], request: ActionRequest, deadline_seconds: float, now_seconds: float
) -> tuple[int | None, str]:
    """Return the step of a group: the requested one, or one that no rank ends before every rank has its command.

    If a rank cannot take part, or the step would end after the deadline, return None and the reason.
    """
    rates: list[StepRate] = []
    obstacles: list[str] = []
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
            rates.append(StepRate(report.step, report.step_seconds, age_seconds))
    if obstacles:
        return None, "; ".join(obstacles)
    at_step = request.at_step if request.at_step is not None else first_common_step(rates, GROUP_LEAD_SECONDS)
    latest_seconds = seconds_until_step_ends(rates, at_step)
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
    processes = [rank.process for rank in ranks]
    if request.mode == "auto" and not any(trains(process, request.action) for process in processes):
        return Turn("now", request.deadline_seconds)
    deadline_seconds = _deadline_seconds(request, processes)
    at_step, obstacle = None, _obstacle(request, ranks)
    if not obstacle:
        at_step, obstacle = step_of_group(ranks, request, deadline_seconds, now_seconds)
    if not obstacle:
        return Turn("step", deadline_seconds, processes[0].job, at_step)
    return Turn("idle" if request.mode == "auto" else "step", request.deadline_seconds, obstacle=obstacle)


def _ranks(request: ActionRequest, job: Sequence[SelectedProcess]) -> list[SelectedProcess]:
    """Return the processes of a job that wait for each other; empty if each process runs by itself."""
    if request.at_step is not None:  # it is the caller that knows the job, and has chosen its step
        return [one for one in job if one.process.job is not None]
    ranks = [one for one in job if is_rank(one.process)]
    alone = len(ranks) == 1 and (request.action not in _STALLING or _world_size(ranks) == 0)
    return [] if alone else ranks


def _obstacle(request: ActionRequest, ranks: Sequence[SelectedProcess]) -> str:
    """Return why the processes are not all ranks of one job; empty if they are, as far as they report it."""
    pids: dict[str, list[str]] = {}
    for one in ranks:
        pids.setdefault(one.process.report.process.rank, []).append(str(one.pid))
    twice = next(((rank, known) for rank, known in pids.items() if rank and len(known) > 1), None)
    if twice is not None:
        named = ", ".join(f"pid {pid}" for pid in twice[1][:_MAX_NAMED])
        return f"rank {twice[0]} runs {len(twice[1])} times ({named}): these are several jobs"
    if request.at_step is not None or request.action not in _STALLING:
        return ""
    if ranks[0].process.job is None:
        return f"the other ranks of {ranks[0]} are not known, because it has no workload"
    world_size = _world_size(ranks)
    missing = list(islice((str(number) for number in range(world_size) if str(number) not in pids), _MAX_NAMED + 1))
    if len(missing) < 2:
        return f"rank {missing[0]} of {world_size} does not report here and would wait" if missing else ""
    listed = ", ".join(missing[:_MAX_NAMED]) + (", …" if len(missing) > _MAX_NAMED else "")
    return f"ranks {listed} of {world_size} do not report here and would wait"


def _world_size(ranks: Iterable[SelectedProcess]) -> int:
    return max((one.process.report.process.world_size or 0 for one in ranks), default=0)


def _deadline_seconds(request: ActionRequest, processes: Iterable[ReportingProcess]) -> float:
    """Return the deadline for the end of a step; with long steps it is later than by default."""
    if not request.free_deadline:
        return request.deadline_seconds
    longest = max((process.report.step_seconds or 0.0 for process in processes), default=0.0)
    steps_seconds = round(GROUP_LEAD_SECONDS + _DEADLINE_STEPS * longest, 1)
    return min(MAX_DEADLINE_SECONDS, max(request.deadline_seconds, steps_seconds))
