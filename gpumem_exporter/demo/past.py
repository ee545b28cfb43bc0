"""The hour before the demo starts, as rows of a history, from the states in which the programs were simulated."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

from gpumem_exporter.core.container import HERE
from gpumem_exporter.core.samples import JobKey, PartKey, ProcessKey
from gpumem_exporter.core.series import StoredRow, Subject
from gpumem_exporter.demo.process import SimulatedProcess
from gpumem_exporter.demo.simulation import TICK_SECONDS, Instance
from gpumem_exporter.node.job_ids import job_id

SECONDS = 3660
_Sizes: TypeAlias = Sequence[int | None]


class _Values(NamedTuple):
    """What a process on a device, a device or a job uses in each second, the oldest first; None if it is unknown."""

    used: _Sizes
    allocated: _Sizes
    idle_cache: _Sizes
    other_cache: _Sizes


def past_of(instances: Iterable[Instance], end: int) -> Iterator[tuple[Subject, Iterable[StoredRow]]]:
    """Yield the rows of processes, devices and jobs in the hour until `end`, in Unix seconds."""
    parts: defaultdict[Subject, list[_Values]] = defaultdict(list)
    for instance in instances:
        if (process := instance.running) is None:
            continue
        key = ProcessKey(process.identity.pid_namespace, process.pid, os.geteuid(), HERE)
        for index, slot in enumerate(process.slots):
            values, device = _values(instance, process, index), slot.device.identity
            for subject in (Subject(device.uuid, "", device.name, gpu=device.gpu), _job(process, key)):
                parts[subject].append(values)
            part = PartKey(key.share, process.identity.session, device.uuid)
            yield Subject.of_minima(part), _minima(values.allocated, end - SECONDS)
    for subject, some in parts.items():
        yield subject, _rows(some[0] if len(some) == 1 else _Values(*map(_sums, *some)), end - SECONDS)


def _sums(*parts: _Sizes) -> _Sizes:
    """Return the sum of what is known in each second."""
    return [sum(filter(None, sizes)) for sizes in zip(*parts, strict=True)]


def _job(process: SimulatedProcess, key: ProcessKey) -> Subject:
    identity = process.identity
    if not process.reports:
        ticks = identity.start_time_ticks
        return Subject("", f"pid~{key.pid}", "", identity.command, owner="unattested", start_time_ticks=ticks)
    job = JobKey(identity.workload, identity.slurm_job_id, key.owner_uid, key.place)
    return Subject("", job_id(job), identity.workload, identity.command, owner=key.share)


def _values(instance: Instance, process: SimulatedProcess, index: int) -> _Values:
    """Return the values of a process on one of its devices, and before it of its predecessors."""
    seconds = 60 if instance.workload.repeats else SECONDS
    states: list[tuple[Any, ...]] = []
    for (tick, slots), (later, _) in pairwise([*instance.states, (0, ())]):
        first, last = (math.ceil(each * TICK_SECONDS) for each in (tick, later))
        states += [slots[index] if slots else (None,) * 4] * (last - max(-seconds, first))
    used, allocated, reclaimable, cached = zip(*states, strict=True)
    if not process.reports:
        return _Values(used * (SECONDS // 60), *[(None,) * SECONDS] * 3)
    idle: _Sizes
    if not instance.workload.repeats:
        idle = [min(reclaimable[max(0, i - 59) : i + 1]) for i in range(SECONDS)]
        return _Values(used, allocated, idle, _not_idle(cached, idle))
    growth = (allocated[-1] - allocated[0]) * 60 // 59 if instance.workload.leaks else 0
    idle_bytes = process.loop.sampler.current(0.0).devices[index].idle_cache_bytes
    idle = (idle_bytes,) * SECONDS
    other = _not_idle(_repeated(cached, 0), idle)
    return _Values(_repeated(used, growth), _repeated(allocated, growth), idle, other)


def _not_idle(cached: _Sizes, idle: _Sizes) -> _Sizes:
    return [None if size is None else max(0, size - (part or 0)) for size, part in zip(cached, idle, strict=True)]


def _repeated(minute: _Sizes, growth: int) -> _Sizes:
    """Return an hour of which this is the last minute, if each minute has grown by some bytes."""
    return [size and size - ago * growth for ago in reversed(range(SECONDS // 60)) for size in minute]


def _minima(allocated: _Sizes, start: int) -> Iterator[StoredRow]:
    for at in range(-start % 60, SECONDS - 59, 60):
        known = [size for size in allocated[at : at + 60] if size is not None]
        if len(known) == 60:
            yield (60, start + at, None, min(known) >> 10, *(None,) * 7)


def _rows(values: _Values, start: int) -> Iterator[StoredRow]:
    """Yield a row for each second of eleven minutes, and for each ten seconds. Values are whole KiB."""
    for at in range(SECONDS - 660, SECONDS):
        used, allocated, idle, other = (size and size >> 10 for size in (lists[at] for lists in values))
        if used is not None:
            yield (1, start + at, used, allocated, idle, other, allocated, None, None, None, None)
    for at in range(-start % 10, SECONDS - 9, 10):
        known = [[size >> 10 for size in lists[at : at + 10] if size is not None] for lists in values]
        highs, lows = ([edge(sizes, default=None) for sizes in known] for edge in (max, min))
        if highs[0] is not None:
            yield (10, start + at, *highs, highs[1], *lows)
