"""Jobs: the processes of one workload, one owner and one Slurm job. One without a workload is a job of its own."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from gpumem_client.wire.protocol import DeviceSample
from gpumem_exporter.core.caller import Caller
from gpumem_exporter.core.ledger import fragmented_bytes, sum_of_known
from gpumem_exporter.core.readings import NodeReading
from gpumem_exporter.core.samples import IDLE_SECONDS, ReportingProcess, Snapshot, once_per_snapshot
from gpumem_exporter.core.starting_engines import ENGINE_TITLES
from gpumem_exporter.node.job_ids import job_id
from gpumem_exporter.page.documents import JOB_NUMBERS, Part, SeenProcess, parts_of, seen_processes

ACTIVE_SECONDS = 60.0
"""A job whose memory and steps have not changed for this time is idle."""

HUES = 12
"""Page and terminal have a palette of this number of colors."""
# A job that has ended keeps its hue for its next run.
_MAX_HUES = 1024

STATES_OF_ENGINES = {"starting": "starting", "serving": "serving", "idle": "idle", "asleep": "sleeping"}
"""The state of a job by the states of its engines; the first one counts."""


def _reserved(value: Callable[[DeviceSample], int | None]) -> Callable[[Part], int | None]:
    """Return a function of a part: a value of what the allocator reserves, 0 where it reserves nothing."""

    def of_part(part: Part) -> int | None:
        if part.sample is None:
            # A report has every device on which torch has a context, or no device at all. On another device the process
            # has only the context of another library.
            reporter = part.process.reporter
            return 0 if reporter is not None and reporter.report.devices else None
        return 0 if part.sample.reserved_bytes == 0 else value(part.sample)

    return of_part


VALUES: Mapping[str, Callable[[Part], int | None]] = {
    "used_bytes": lambda part: part.share.used_bytes if part.share else None,
    "allocated_bytes": _reserved(lambda sample: sample.allocated_bytes),
    "reserved_bytes": _reserved(lambda sample: sample.reserved_bytes),
    "idle_cache_bytes": _reserved(lambda sample: sample.idle_cache_bytes),
    "reclaimable_bytes": _reserved(lambda sample: sample.reclaimable_bytes),
    "fragmented_bytes": _reserved(fragmented_bytes),
    "non_torch_bytes": lambda part: part.share.non_torch_bytes if part.share else None,
    "unmapped_bytes": lambda part: part.sample.unmapped_bytes if part.sample else None,
}
"""The values of a part that a job sums up; None where a value is unknown."""


@dataclass(eq=False)
class Job:
    """The processes of a job, from one snapshot."""

    id: str
    """See `job_id`."""
    workload: str | None
    processes: list[SeenProcess] = field(default_factory=list)

    @cached_property
    def parts(self) -> list[Part]:
        """The processes on each of their devices."""
        return [part for process in self.processes for part in parts_of(process)]

    @cached_property
    def reporters(self) -> list[ReportingProcess]:
        """The processes that report."""
        return [process.reporter for process in self.processes if process.reporter is not None]

    @property
    def name(self) -> str:
        """The workload, otherwise the command, otherwise the pid."""
        return self.workload or self.command or f"pid {self.processes[0].pid}"

    @cached_property
    def command(self) -> str | None:
        """The command, if all processes have the same one."""
        return common(process.command for process in self.processes)

    @cached_property
    def sums(self) -> Mapping[str, int | None]:
        """The sum of each value over all parts; see `sums_of`."""
        return sums_of(self.parts, VALUES)

    @property
    def incomplete(self) -> list[str]:
        """The names of the sums that lack a process or a device."""
        return [
            name
            for name, value in VALUES.items()
            if self.sums[name] is not None
            and any(value(part) is None for part in self.parts)
            and name != "unmapped_bytes"  # only some processes have it: one without it lacks nothing
        ]

    def state(self, now_seconds: float, starting: Iterable[int | None]) -> str:
        """Return what the job does now, on the monotonic clock; `starting` are the host pids of starting engines."""
        if all(process.orphan is not None for process in self.processes):
            return "orphan"
        reporters = self.reporters
        titles = any((process.command or "").startswith(ENGINE_TITLES) for process in self.processes)
        if any(process.host_pid in starting and process.host_pid is not None for process in self.processes):
            return "starting"
        if not reporters:
            return "not reporting"
        engines = {each.report.engine.state for each in reporters if each.report.engine is not None}
        for state, word in STATES_OF_ENGINES.items():
            if state in engines:
                return word
        if any(sample.unmapped_bytes for each in reporters for sample in each.report.devices):
            return "sleeping"
        # A reporter whose process ends no more steps reports no duration of a step.
        if any(each.report.step is not None and each.report.step_seconds for each in reporters):
            return "training"
        if titles or any(each.report.engine_starting is not None for each in reporters):
            return "serving"
        last = (min(each.active_seconds, each.last_active_seconds or each.active_seconds) for each in reporters)
        return "running" if any(now_seconds - seconds < ACTIVE_SECONDS for seconds in last) else "idle"

    def idle_since_seconds(self, snapshot: Snapshot) -> float | None:
        """Return since when no process has been active, if it is an hour or more; None if one's activity is unknown."""
        last = [snapshot.last_active_seconds(process.reporter, process.host_pid) for process in self.processes]
        known = [seconds for seconds in last if seconds is not None]
        if len(known) < len(last) or snapshot.taken_seconds - max(known) < IDLE_SECONDS:
            return None
        return max(known)

    @cached_property
    def owner(self) -> Mapping[str, Any]:
        """Who runs the job: what all processes have in common."""
        known = {
            name: common(process.identity(name) for process in self.processes)
            for name in ("user", "k8s_namespace", "k8s_pod")
        }
        uids = {process.reporter.owner_uid for process in self.processes if process.reporter and not process.hidden}
        jobs = {name: common(process.job_number(name) for process in self.processes) for name in JOB_NUMBERS}
        words = [
            known["user"] or "",
            f"pod {known['k8s_namespace']}/{known['k8s_pod']}" if known["k8s_pod"] else "",
            f"Slurm {jobs['slurm_job_id']}" if jobs["slurm_job_id"] else "",
            f"Ray {jobs['ray_job_id']}" if jobs["ray_job_id"] else "",
        ]
        uid = uids.pop() if len(uids) == 1 else None
        return {**known, "uid": uid, **jobs, "owner": ", ".join(word for word in words if word)}

    def started_unix_seconds(self, node: NodeReading | None) -> float | None:
        """Return when the oldest process started; None if /proc shows none of them."""
        starts = [process.started_unix_seconds(node) for process in self.processes]
        return min((start for start in starts if start is not None), default=None)

    def steps(self, snapshot: Snapshot, now_unix_seconds: float) -> dict[str, Any]:
        """Return the last step of the process that is furthest, its duration, and when its end was first seen."""
        stepping = (each for each in self.reporters if each.report.step is not None)
        last = max(stepping, key=lambda each: (each.report.step or 0, -each.stepped_seconds), default=None)
        if last is None:
            return {"step": None, "step_seconds": None, "last_step_unix_seconds": None}
        ago_seconds = snapshot.taken_seconds - last.stepped_seconds
        return {
            "step": last.report.step,
            "step_seconds": last.report.step_seconds,
            "last_step_unix_seconds": round(now_unix_seconds - ago_seconds, 1),
        }


def common(texts: Iterable[str | None]) -> str | None:
    """Return the text that all have in common; None if they differ, or if it is empty or unknown."""
    known = set(texts)
    return (known.pop() or None) if len(known) == 1 else None


def jobs_of(snapshot: Snapshot, viewer: Caller | None = None) -> Sequence[Job]:
    """Return the jobs of a node, the largest use first; see `documents.seen_processes`."""
    return _all_jobs(snapshot) if viewer is None else _jobs(snapshot, viewer)


def _jobs(snapshot: Snapshot, viewer: Caller | None = None) -> Sequence[Job]:
    jobs: dict[str, Job] = {}
    for process in seen_processes(snapshot, viewer):
        of = process.known.job if process.known is not None else None
        id_ = job_id(of) if of is not None else f"pid~{process.pid}"
        jobs.setdefault(id_, Job(id_, of.workload if of is not None else None)).processes.append(process)
    return sorted(jobs.values(), key=lambda job: (-(job.sums["used_bytes"] or job.sums["reserved_bytes"] or 0), job.id))


_all_jobs = once_per_snapshot(_jobs)


class Hues:
    """Assigns a color to each job, which every viewer and screen shows, also after a reload. Thread-safe.

    It is the hue of the job's id, or the next one that fewer jobs have.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # The jobs that were present last are at the end.
        self._known: dict[str, int] = {}

    def of(self, jobs: Iterable[str]) -> Mapping[str, int]:
        """Return the hue of each job of the node, by id."""
        with self._lock:
            hues = {id_: self._known.pop(id_, None) for id_ in sorted(set(jobs))}
            uses = Counter(hue for hue in hues.values() if hue is not None)
            for id_, hue in hues.items():
                if hue is None:
                    preferred = hashlib.blake2b(id_.encode(), digest_size=4).digest()[0]
                    hue = min(range(HUES), key=lambda each: (uses[each], (each - preferred) % HUES))
                    uses[hue] += 1
                self._known[id_] = hue
            for id_ in list(self._known)[: -max(_MAX_HUES, len(hues))]:
                del self._known[id_]
            return {id_: self._known[id_] for id_ in hues}


def jobs_by_device(jobs: Iterable[Job]) -> dict[str, list[tuple[Job, list[Part]]]]:
    """Return the jobs on each device, each with its processes there, by uuid, in the order of the jobs."""
    found: dict[str, list[tuple[Job, list[Part]]]] = {}
    for job in jobs:
        there: dict[str, list[Part]] = {}
        for part in job.parts:
            there.setdefault(part.uuid, []).append(part)
        for uuid, parts in there.items():
            found.setdefault(uuid, []).append((job, parts))
    return found


def sums_of(parts: Sequence[Part], names: Iterable[str]) -> dict[str, int | None]:
    """Return the sum of each value over the processes and devices where it is known; None where none is."""
    return {name: sum_of_known([VALUES[name](part) for part in parts] or [None]) for name in names}


def job_uuids(job: Job, gpus: Mapping[str, str]) -> Sequence[str]:
    """Return the devices of a job, in the order of their indexes."""
    indexes = {part.uuid: [int(index or 1 << 30) for index in gpus.get(part.uuid, "").split(":")] for part in job.parts}
    return sorted(indexes, key=indexes.__getitem__)
