"""The values of devices and jobs in one snapshot, as rows of a history."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

from gpumem_client.wire.protocol import DeviceSample
from gpumem_exporter.core.history_series import Subject
from gpumem_exporter.core.ledger import idle_cache_bytes, node_ledgers, node_shares
from gpumem_exporter.core.samples import PartKey, ReportingProcess, Snapshot, giving_way, kv_cache_size_bytes
from gpumem_exporter.node.job_ids import job_of_process
from gpumem_exporter.page.jobs import Job, jobs_of

VALUES = ("used", "allocated", "idle_cache", "other_cache", "in_use_peak")
"""The values of a row."""
_Sizes = Sequence[int | None]
_MAX_BYTES = 1 << 42


class Points:
    """Converts snapshots, which must come in their order, to rows. Not thread-safe.

    The in-use peak of a process on a device is the highest allocated bytes that its reports show. The in-use peak of a
    device or a job is the sum of these peaks, which need not coincide.
    """

    def __init__(self) -> None:
        self._peaks: dict[PartKey, int] = {}

    def of(self, snapshot: Snapshot) -> list[tuple[Subject, _Sizes]]:
        """Return the values of the devices and jobs of which a value is known, in whole KiB; None is unknown."""
        in_use = self._in_use(snapshot.processes)
        found = chain(_devices(snapshot, in_use), _jobs(snapshot, in_use), _caches(snapshot))
        rows = ((subject, [units(size) for size in sizes]) for subject, sizes in found)
        return [(subject, row) for subject, row in rows if any(value is not None for value in row)]

    def _in_use(self, processes: Iterable[ReportingProcess]) -> dict[PartKey, int]:
        in_use: dict[PartKey, int] = {}
        before, self._peaks = self._peaks, {}
        for process in giving_way(processes):
            for sample in process.report.devices:
                if sample.allocated_bytes is None:
                    continue
                part = process.part(sample.uuid)
                in_use[part] = sample.allocated_bytes
                # The peak counts memory that is unmapped, and the allocated bytes do not.
                if sample.allocated_peak_bytes is not None and not sample.unmapped_bytes:
                    peak = self._peaks[part] = sample.allocated_peak_bytes
                    # A peak in PyTorch's statistics that differs from the peak before was reached since then; an equal
                    # one may be hours old.
                    if before.get(part, peak) != peak:
                        in_use[part] = max(sample.allocated_bytes, peak)
        return in_use


def _devices(snapshot: Snapshot, in_use: Mapping[PartKey, int]) -> Iterator[tuple[Subject, _Sizes]]:
    shares, ledgers = node_shares(snapshot), node_ledgers(snapshot)
    for device in snapshot.node.devices if snapshot.node is not None else ():
        ledger = ledgers.get(device.uuid)
        if not device.uuid or device.memory is None or ledger is None:
            continue
        reporters = [share.process for share in shares[device.uuid] if share.process is not None]
        peak_bytes = sum(in_use.get(process.part(device.uuid), 0) for process in reporters)
        idle_bytes = idle_cache_bytes(shares[device.uuid])
        cache_bytes = ledger.categories.get("torch_reclaimable", 0) + ledger.categories["torch_fragmented"]
        values = (
            device.memory.used_bytes,
            ledger.categories["torch_allocated"],
            idle_bytes,
            cache_bytes - (idle_bytes or 0),
            # A pluggable allocator counts no tensors: all that it reserved is in the ledger's allocated bytes.
            max(peak_bytes, ledger.categories["torch_allocated"]),
        )
        yield Subject(device.uuid, "", device.name, gpu=device.gpu), values


def _jobs(snapshot: Snapshot, in_use: Mapping[PartKey, int]) -> Iterator[tuple[Subject, _Sizes]]:
    for job in giving_way(jobs_of(snapshot)):
        reporters = job.reporters if len(job.reporters) == len(job.processes) else []
        sampled = [(each.part(sample.uuid), sample) for each in reporters for sample in each.report.devices]
        # A reporter has no sample of a device on which the process has no allocator, such as a device of NCCL.
        values = (
            [part.share.used_bytes if part.share is not None else None for part in job.parts],
            [sample.allocated_bytes for _, sample in sampled],
            [sample.idle_cache_bytes for _, sample in sampled],
            [_other_cache(sample) for _, sample in sampled],
            [in_use.get(part) for part, _ in sampled],
        )
        yield _subject(job), [_sum(sizes) for sizes in values]


def _caches(snapshot: Snapshot) -> Iterator[tuple[Subject, _Sizes]]:
    """Yield the key-value cache of each process on each of its devices, of which the use is known."""
    for name, process in snapshot.names.reporting:
        workload, job, ticks = process.report.process.workload, job_of_process(process), process.start_time_ticks
        for sample in process.report.devices:
            if (used := sample.kv_cache_bytes.get("used")) is not None:
                cache = f"{name} {sample.uuid}"
                subject = Subject("", job, workload, owner=process.key.share, start_time_ticks=ticks, part=cache)
                yield subject, (used, kv_cache_size_bytes(sample), None, None, used)


def _other_cache(sample: DeviceSample) -> int | None:
    """Return the cache that is not idle, also while it is not known which is; None if the cache is unknown."""
    if sample.reserved_bytes is None or sample.allocated_bytes is None:
        return None
    return sample.reserved_bytes - sample.allocated_bytes - (sample.idle_cache_bytes or 0)


def _sum(parts: _Sizes) -> int | None:
    """Return the sum; None if a part is unknown."""
    # A sum of the other parts would show a drop that never happened.
    known = [part for part in parts if part is not None]
    return sum(known) if known and len(known) == len(parts) else None


def _subject(job: Job) -> Subject:
    first = job.processes[0]
    known = first.reporter or first.silent
    uid = first.facts.uid if first.facts is not None else None
    owner = known.key.share if known is not None else "unattested" if uid is None else f"uid:{uid}"
    started = None if job.workload else known or first.facts
    ticks = started.start_time_ticks if started is not None else 0
    return Subject("", job.id, job.workload or "", job.command or "", owner=owner, start_time_ticks=ticks)


def units(size: int | None) -> int | None:
    """Return bytes in whole KiB; None if they are unknown. 4 TiB and more are unknown."""
    return size >> 10 if size is not None and 0 <= size < _MAX_BYTES else None
