"""Every rank of one workload on several nodes, after the same step: all of them or none, as far as that can be had.

No node knows the others' ranks, so whoever asks chooses the step: far enough ahead that all exporters can be asked,
that each has heard from its ranks, and that all of them can be told to forget it if one cannot take part.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from gpumem_exporter.actions.group import GROUP_LEAD_SECONDS, require_in_time
from gpumem_exporter.cli.fleet.asks import Ask, Failure, Nodes
from gpumem_exporter.cli.fleet.choosing import Member, member
from gpumem_exporter.cli.fleet.naming import Place
from gpumem_exporter.core.steps import StepRate, first_common_step
from gpumem_exporter.errors import GroupIncompleteError

__all__ = ["ASKING_SECONDS", "GROUP_TIMEOUT_SECONDS", "Group", "Reading", "gather", "ranks_query"]

ASKING_SECONDS = 3.0
"""Within so long after the ranks' steps were read every exporter has been asked, or the group is called off."""
GROUP_TIMEOUT_SECONDS = 2.0
"""For each answer: one that does not come must not keep the others from being called off in time."""
_NAMED_MAX = 8
"""So many ranks that are missing are named."""
_LATELY = "15m"
"""An exporter that had ranks within so long and cannot be read may have them still: its series are gone, they not."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What an exporter said of its processes, and when it was asked, on the caller's monotonic clock."""

    processes: Sequence[Mapping[str, Any]]
    asked_seconds: float


@dataclass(slots=True)
class Group:
    """All ranks of a workload, and the step after which they act."""

    members: tuple[Member, ...]
    at_step: int
    paced_seconds: float
    """When their steps were compared."""
    called_off: str = ""
    """Why; empty while it goes on."""

    def act(
        self,
        nodes: Nodes,
        body: Mapping[str, Any],
        *,
        wait_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> list[Ask]:
        """Ask every exporter, watch, and call the others off as soon as one of them is in trouble."""
        by_place: dict[Place, list[Member]] = {}
        for one in self.members:
            by_place.setdefault(one.place, []).append(one)
        asks = [Ask(place, tuple(members), {"workload": members[0].workload}) for place, members in by_place.items()]

        def look() -> None:
            trouble = next((trouble for ask in asks if (trouble := _trouble(ask))), "")
            if trouble and not self.called_off:
                self.called_off = trouble
                nodes.cancel(asks)

        try:
            nodes.begin(asks, {**body, "at_step": self.at_step})
            took = clock() - self.paced_seconds
            if took > ASKING_SECONDS:
                self.called_off = f"asking every exporter took {took:.1f} s, which is too long for step {self.at_step}"
                nodes.cancel(asks)
            nodes.watch(asks, wait_seconds=wait_seconds, look=look)
        except KeyboardInterrupt:
            nodes.cancel(asks)
            raise
        return asks


def ranks_query(workload: str) -> str:
    """The series of every rank that reports for a workload, or did lately."""
    return f"max_over_time(gpumem_reporter_up{{workload={json.dumps(workload, ensure_ascii=False)}}}[{_LATELY}])"


def gather(
    workload: str, readings: Mapping[Place, Reading | Failure], *, deadline_seconds: float, clock: Callable[[], float]
) -> Group:
    """The ranks of a workload on all these exporters, and a step that none of them ends before all have been asked.

    Raises:
        GroupIncompleteError: an exporter could not be read; a rank has fallen silent, makes no steps, is there twice,
            or is on none of them; or the step would end after the deadline. Nothing has been asked.
    """
    members: list[Member] = []
    rates: list[StepRate] = []
    lacking: list[str] = []
    by_rank: dict[str, list[str]] = {}
    world_size = 0
    now = clock()
    for place, reading in readings.items():
        if isinstance(reading, Failure):
            lacking.append(f"{place.instance}, which lately had ranks, cannot be asked: {reading.reason}")
            continue
        for process in reading.processes:
            if process["workload"] != workload:
                continue
            rank = f" (rank {process['rank']})" if process["rank"] else ""
            who = f"pid {process['pid']} on {place.instance}{rank}"
            step, step_seconds = process["step"], process.get("step_seconds")
            by_rank.setdefault(process["rank"], []).append(who)
            world_size = max(world_size, process.get("world_size") or 0)
            members.append(member(place, process))
            if not process["reporting"]:
                lacking.append(f"{who} has fallen silent")
            elif step is None or not step_seconds:
                lacking.append(f"{who} makes no steps")
            else:
                since = process["sample_age_seconds"] + now - reading.asked_seconds
                rates.append(StepRate(step, step_seconds, since))
    for rank, several in by_rank.items():
        if rank and len(several) > 1:
            lacking.append(f"rank {rank} is there {len(several)} times, {', '.join(several)}: these are several jobs")
    lacking += _missing_ranks(world_size, by_rank)
    if lacking:
        raise GroupIncompleteError(f"not every rank can take part: {'; '.join(lacking)}; nothing was asked")
    if not members:
        raise GroupIncompleteError(f"no exporter has a process of the workload {workload} any more; nothing was asked")
    at_step = first_common_step(rates, ASKING_SECONDS + GROUP_LEAD_SECONDS)
    require_in_time(rates, at_step, deadline_seconds)
    return Group(tuple(members), at_step, now)


def _missing_ranks(world_size: int, known: Collection[str]) -> Iterator[str]:
    """Says which ranks nobody knows, where their number is known: their exporter may not have been scraped yet."""
    missing = (str(number) for number in range(world_size) if str(number) not in known)
    named = list(islice(missing, _NAMED_MAX + 1))
    if named:
        listed = ", ".join(named[:_NAMED_MAX]) + (", …" if len(named) > _NAMED_MAX else "")
        yield f"of {world_size} ranks, Prometheus knows no exporter of rank {listed}"


def _trouble(ask: Ask) -> str:
    """Why somebody of an exporter does not take part; empty while all do."""
    if not ask.troubled:
        return ""
    undone = [row for row in ask.action.get("results") or () if row.get("outcome") != "done"]
    failure = ask.failure or (
        Failure(undone[0]["outcome"], f"pid {undone[0]['pid']}: {undone[0]['reason']}")
        if undone
        else Failure("failed", "it does not answer any more")
    )
    return f"{ask.place.instance}: {failure.outcome}: {failure.reason}"
