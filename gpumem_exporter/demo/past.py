"""The hour before the demo starts, as rows of a history. Each minute is like the last one; only a leak has grown."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping

from gpumem_exporter.core.container import HERE
from gpumem_exporter.core.history_series import StoredRow, Subject
from gpumem_exporter.core.samples import JobKey, PartKey, ProcessKey
from gpumem_exporter.demo.memory import SlotUse
from gpumem_exporter.demo.process import SimulatedProcess
from gpumem_exporter.node.job_ids import job_id

MINUTES = 61
LastMinute = dict[tuple[SimulatedProcess, int], dict[int, SlotUse]]
"""What each process used on each of its devices in each second before the start, from 0 to 59."""


def past_of(last_minute: LastMinute, end: float) -> Iterator[tuple[Subject, Iterable[StoredRow]]]:
    """Yield the rows of processes, devices and jobs in the hour until `end`, in Unix seconds."""
    start = int(end) - MINUTES * 60
    minutes: defaultdict[Subject, defaultdict[int, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    growths: Counter[Subject] = Counter()
    for (process, index), uses in last_minute.items():
        key = ProcessKey(process.identity.pid_namespace, process.pid, os.geteuid(), HERE)
        device = process.slots[index].device.identity
        subjects = Subject(device.uuid, "", device.name, gpu=device.gpu), _job(process, key)
        growth = (uses[59].allocated - uses[0].allocated) * 60 // 59 if process.workload.leaks else 0
        growths.update(dict.fromkeys(subjects, growth))
        idle_bytes = process.loop.sampler.current(0.0).devices[index].idle_cache_bytes or 0
        for second, use in uses.items():
            sizes = {"used": use.used}
            if process.reports:
                sizes |= {"allocated": use.allocated, "idle": idle_bytes, "other": max(0, use.cached - idle_bytes)}
            for subject in subjects:
                minutes[subject][second].update(sizes)
        if process.reports and len(uses) == 60:
            part = PartKey(key.share, process.identity.session, device.uuid)
            yield Subject.of_minima(part), _minima([use.allocated for use in uses.values()], growth, start)
    for subject in sorted(minutes, key=lambda each: each.gpu or "then the jobs"):
        yield subject, _rows(minutes[subject], growths[subject], start)


def _job(process: SimulatedProcess, key: ProcessKey) -> Subject:
    identity = process.identity
    if not process.reports:
        ticks = identity.start_time_ticks
        return Subject("", f"pid~{key.pid}", "", identity.command, owner="unattested", start_time_ticks=ticks)
    job = JobKey(identity.workload, identity.slurm_job_id, key.owner_uid, key.place)
    return Subject("", job_id(job), identity.workload, identity.command, owner=key.share)


def _minima(minute: list[int], growth: int, start: int) -> Iterator[StoredRow]:
    """Yield the smallest allocated bytes of each whole minute of the clock."""
    hour = [size - ago * growth for ago in reversed(range(MINUTES)) for size in minute]
    for at in range(-start % 60, len(hour) - 59, 60):
        yield (60, start + at, None, min(hour[at : at + 60]) >> 10, *(None,) * 7)


def _rows(minute: Mapping[int, Mapping[str, int]], growth: int, start: int) -> Iterator[StoredRow]:
    """Yield a row for each second, of which the history makes longer steps."""
    for number in range(MINUTES):
        grown = (MINUTES - 1 - number) * growth
        for second, sizes in minute.items():
            used, allocated, idle, other = (
                None if name not in sizes else sizes[name] - change >> 10
                for name, change in (("used", grown), ("allocated", grown), ("idle", 0), ("other", 0))
            )
            yield (1, start + 60 * number + second, used, allocated, idle, other, allocated, *(None,) * 4)
