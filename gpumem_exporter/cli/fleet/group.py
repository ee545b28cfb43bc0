"""An action of all ranks of a workload on several nodes, after the same step.

No exporter knows the ranks of the others, so the command line chooses the step. The step is far enough ahead that every
exporter can receive the request, every rank can receive the command, and all can be canceled if one cannot take part.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from gpumem_client.wire.units import UNKNOWN, counted
from gpumem_exporter.actions.group import GROUP_LEAD_SECONDS, StepRate, first_common_step, require_in_time
from gpumem_exporter.actions.model import is_done
from gpumem_exporter.actions.suggestion import long_enough_seconds
from gpumem_exporter.cli.api_client import Document
from gpumem_exporter.cli.fleet.requests import ExporterRequest, Fleet
from gpumem_exporter.cli.fleet.selection import Exporter, Failure, TargetProcess, target_process
from gpumem_exporter.errors import GroupIncompleteError

SUBMIT_SECONDS = 3.0
"""If submitting takes longer after the ranks' steps were read, the group is canceled."""
GROUP_TIMEOUT_SECONDS = 2.0
"""For each answer. It is short because a missing answer must not delay the cancellation of the others."""
_NAMED_RANKS_MAX = 8
# An exporter that had ranks in this time may still have them, although their series have expired.
_LOOK_BACK = "15m"


@dataclass(frozen=True, slots=True)
class Group:
    """All ranks of a workload, and the step after which they act."""

    processes: tuple[TargetProcess, ...]
    at_step: int
    deadline_seconds: float
    compared_seconds: float
    """When the ranks' steps were compared, by the monotonic clock."""

    def added(self, selected: Iterable[TargetProcess]) -> str:
        """Describe the ranks of the group besides the selected processes; empty if there are none."""
        known = {(process.exporter, process.pid) for process in selected}
        added = [process for process in self.processes if (process.exporter, process.pid) not in known]
        named = ", ".join(f"rank {one.rank or UNKNOWN} (pid {one.pid} on {one.exporter.instance})" for one in added)
        return (
            f"--group adds {counted(len(added), 'rank', 'ranks')} to the ranks of the query: {named}" if added else ""
        )

    def act(
        self, fleet: Fleet, body: Mapping[str, Any], *, wait_seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> tuple[list[ExporterRequest], str]:
        """Submit the action to every exporter and wait. The first failure cancels the group.

        Returns the requests, and why the group was canceled; empty if it was not.
        """
        by_exporter: dict[Exporter, list[TargetProcess]] = {}
        for process in self.processes:
            by_exporter.setdefault(process.exporter, []).append(process)
        requests = [
            ExporterRequest(exporter, tuple(processes), {"workload": processes[0].workload})
            for exporter, processes in by_exporter.items()
        ]
        cancel_reason = ""

        def cancel(reason: str) -> None:
            nonlocal cancel_reason
            if reason and not cancel_reason:
                cancel_reason = reason
                fleet.cancel(requests)

        try:
            fleet.submit(requests, {**body, "at_step": self.at_step})
            took = clock() - self.compared_seconds
            if took > SUBMIT_SECONDS:
                cancel(f"submitting took {took:.1f} s, which is too long for step {self.at_step}")
            fleet.wait(requests, wait_seconds=wait_seconds, observe=lambda: cancel(_first_failure(requests)))
        except KeyboardInterrupt:
            fleet.cancel(requests)
            raise
        return requests, cancel_reason


def ranks_query(workload: str) -> str:
    """Return the query for the ranks of a workload that report now or reported recently."""
    return f"max_over_time(gpumem_reporter_up{{workload={json.dumps(workload, ensure_ascii=False)}}}[{_LOOK_BACK}])"


def form_group(
    workload: str,
    readings: Mapping[Exporter, Sequence[Document] | Failure],
    requested_seconds: float,
    *,
    deadline_seconds: float | None,
    clock: Callable[[], float] = time.monotonic,
) -> Group:
    """Return the ranks of a workload, and a step that no rank ends before every exporter has the request.

    `readings` has the processes of each exporter, which were requested at `requested_seconds` by the clock, or why they
    are unknown. Raises GroupIncompleteError if not every rank can take part, or the step would end after the deadline;
    the message has every reason. Without `deadline_seconds`, the deadline leaves time for a few steps.
    """
    processes: list[TargetProcess] = []
    rates: list[StepRate] = []
    problems: list[str] = []
    names_by_rank: dict[str, list[str]] = {}
    world_size = 0
    now = clock()
    for exporter, reading in readings.items():
        if isinstance(reading, Failure):
            problems.append(f"{exporter.instance}, which recently had ranks, does not answer: {reading.reason}")
            continue
        for process in reading:
            if process["workload"] != workload:
                continue
            rank = f" (rank {process['rank']})" if process["rank"] else ""
            name = f"pid {process['pid']} on {exporter.instance}{rank}"
            names_by_rank.setdefault(process["rank"], []).append(name)
            world_size = max(world_size, process.get("world_size") or 0)
            processes.append(target_process(exporter, process))
            if not process["reporting"]:
                problems.append(f"{name} is silent")
            elif process["step"] is None or not process.get("step_seconds"):
                problems.append(f"{name} makes no steps")
            else:
                age_seconds = process["sample_age_seconds"] + now - requested_seconds
                rates.append(StepRate(process["step"], process["step_seconds"], age_seconds))
    problems += [
        f"rank {rank} exists {len(names)} times, {', '.join(names)}: these are several jobs"
        for rank, names in names_by_rank.items()
        if rank and len(names) > 1
    ]
    if missing := _missing_ranks(world_size, names_by_rank):
        # Prometheus may not have scraped their exporter yet.
        problems.append(f"of {world_size} ranks, Prometheus knows no exporter of rank {missing}")
    if problems:
        raise GroupIncompleteError(f"not every rank can take part: {'; '.join(problems)}; nothing was requested")
    if not processes:
        raise GroupIncompleteError(f"no exporter has a process of the workload {workload}; nothing was requested")
    at_step = first_common_step(rates, SUBMIT_SECONDS + GROUP_LEAD_SECONDS)
    if deadline_seconds is None:
        deadline_seconds = long_enough_seconds(rate.step_seconds for rate in rates)
    require_in_time(rates, at_step, deadline_seconds)
    return Group(tuple(processes), at_step, deadline_seconds, now)


def _missing_ranks(world_size: int, known: Collection[str]) -> str:
    """Return the first ranks without a process; empty if there are none."""
    missing = (str(number) for number in range(world_size) if str(number) not in known)
    named = list(islice(missing, _NAMED_RANKS_MAX + 1))
    return ", ".join(named[:_NAMED_RANKS_MAX]) + (", …" if len(named) > _NAMED_RANKS_MAX else "")


def _first_failure(requests: Iterable[ExporterRequest]) -> str:
    return next(filter(None, map(_failure_of, requests)), "")


def _failure_of(request: ExporterRequest) -> str:
    """Why a rank at an exporter does not take part; empty if all do."""
    undone = [row for row in request.action.get("results") or () if not is_done(row["outcome"])]
    if request.failure is not None:
        failure = request.failure
    elif undone:
        failure = Failure(undone[0]["outcome"], f"pid {undone[0]['pid']}: {undone[0]['reason']}")
    elif request.missed_answers:
        failure = Failure("failed", "the exporter stopped answering")
    else:
        return ""
    return f"{request.exporter.instance}: {failure.outcome}: {failure.reason}"
