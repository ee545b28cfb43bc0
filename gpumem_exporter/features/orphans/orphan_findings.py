"""What each launcher, server or container has left behind: its orphans and their memory, as a finding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from gpumem_client.wire.units import human_bytes
from gpumem_exporter.core.ledger import DeviceLedger, sum_of_known
from gpumem_exporter.core.readings import LostLauncher
from gpumem_exporter.core.samples import Snapshot
from gpumem_exporter.core.starting_engines import ENGINE_TITLES
from gpumem_exporter.page.documents import SeenProcess
from gpumem_exporter.page.findings import Finding, called, finding, gpus_in_words
from gpumem_exporter.page.jobs import Job

# The share of a device that others may need, and below which the free memory of a device is little.
_MUCH = 0.05


@dataclass(slots=True)
class LeftBehind:
    """The orphans of one launcher, the largest job first."""

    job: Job
    lost: LostLauncher
    processes: list[SeenProcess] = field(default_factory=list)

    @property
    def sizes(self) -> Mapping[str, int | None]:
        """The bytes that the orphans use, by uuid; None where they are unknown."""
        used: dict[str, list[int | None]] = {}
        for process in self.processes:
            for uuid, share in process.shares.items():
                used.setdefault(uuid, []).append(share.used_bytes)
        return {uuid: sum_of_known(sizes) for uuid, sizes in used.items()}

    def may_be_needed(self, ledgers: Mapping[str, DeviceLedger]) -> bool:
        """Return whether others may need the memory: it is much, or little is free on a device of the orphans."""
        for uuid, size in self.sizes.items():
            ledger = ledgers.get(uuid)
            if ledger is not None and size is not None:
                much = _MUCH * ledger.total_bytes
                if size >= much or ledger.categories["free"] < much:
                    return True
        return False

    @property
    def fate(self) -> str:
        """What has ended, in words: `its server (python vllm, pid 4711) has ended`."""
        first = self.processes[0]
        of_launcher = "server" if (first.command or "").startswith(ENGINE_TITLES) else "launcher"
        what = {"container_gone": "container's runtime"}.get(self.lost.reason, of_launcher)
        if self.lost.pid is None:
            return f"its {what} ended before the exporter saw it"
        command = f"{self.lost.command}, " if self.lost.command and not first.hidden else ""
        return f"its {what} ({command}pid {self.lost.pid}) has ended"


def left_behind(jobs: Sequence[Job]) -> list[LeftBehind]:
    """Return the orphans among the processes of jobs, by what they have lost."""
    found: dict[object, LeftBehind] = {}
    for job in jobs:
        for process in job.processes:
            lost = process.orphan
            if lost is not None:
                key = job.id if lost.pid is None else (lost.pid, lost.ended_seconds)
                found.setdefault(key, LeftBehind(job, lost)).processes.append(process)
    return list(found.values())


def orphans_left_behind(
    snapshot: Snapshot, jobs: Sequence[Job], ledgers: Mapping[str, DeviceLedger]
) -> Iterator[Finding]:
    """Yield a finding for each launcher that has left orphans behind."""
    for left in left_behind(jobs):
        name = called(left.job)
        if len(left.processes) > 1:
            name = f"{len(left.processes)} processes of {name}"
        elif left.job.workload and left.processes[0].command:
            name = f"{left.processes[0].command} of {name}"
        size = sum_of_known(list(left.sizes.values()) or [None])
        amount = "memory" if size is None else human_bytes(size)
        where = gpus_in_words([snapshot.gpus.get(uuid) or uuid for uuid in left.sizes] or ["?"])
        sentence = f"{name} {'holds' if len(left.processes) == 1 else 'hold'} {amount} on {where}; {left.fate}."
        # A job that was started again and again may have left processes behind each time.
        subject = f"{left.job.id} {left.lost.pid or ''}".strip()
        yield finding(
            *("orphan", subject, "Orphan", sentence),
            state="" if left.may_be_needed(ledgers) else "orphan_small",
            job=left.job,
            since_seconds=left.lost.ended_seconds,
            next="See what can be ended: gpumem-exporter terminate --orphans --dry-run",
        )
