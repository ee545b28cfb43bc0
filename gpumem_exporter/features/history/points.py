"""The values of devices and jobs in one snapshot, as rows of a history."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from gpumem_client.wire.protocol import DeviceSample
from gpumem_exporter.core.ledger import idle_cache_bytes, node_ledgers, node_shares
from gpumem_exporter.core.samples import ProcessKey, ReportingProcess, Snapshot, giving_way, kv_cache_size_bytes
from gpumem_exporter.core.series import Subject
from gpumem_exporter.node.job_ids import job_of_process
from gpumem_exporter.page.documents import SeenProcess
from gpumem_exporter.page.jobs import Job, jobs_of

# The maximum number of peaks that are kept, about 1 MiB. The in-use peaks of further parts come from samples alone.
_MAX_PEAKS = 4096

VALUES = ("used", "allocated", "idle_cache", "other_cache", "in_use_peak")
"""The values of a row."""
Row = list[int | None]
"""The values of a second in whole KiB; None is unknown."""
UNIT_BITS = 10
_MAX_UNITS = 1 << 32


Point = tuple[Subject, Row]
# A process on a device: its key, its session and the uuid.
_Part = tuple[ProcessKey, str, str]


class Points:
    """Converts snapshots, which must come in their order, to rows. Not thread-safe.

    The in-use peak of a process on a device is the highest allocated bytes that its reports show. The in-use peak of a
    device or a job is the sum of these peaks, which need not coincide.
    """

    def __init__(self) -> None:
        self._peaks: dict[_Part, int] = {}

    def of(self, snapshot: Snapshot) -> list[Point]:
        """Return the rows of the devices and jobs of which a value is known."""
        in_use = self._in_use(snapshot.processes)
        return [*_devices(snapshot, in_use), *_jobs(snapshot, in_use), *_caches(snapshot)]

    def _in_use(self, processes: Iterable[ReportingProcess]) -> dict[_Part, int]:
        in_use: dict[_Part, int] = {}
        peaks: dict[_Part, int] = {}
        for process in giving_way(processes):
            for sample in process.report.devices:
                if sample.allocated_bytes is None:
                    continue
                part = _part(process, sample.uuid)
                in_use[part] = sample.allocated_bytes
                # The peak counts memory that is unmapped, and the allocated bytes do not.
                peak = None if sample.unmapped_bytes else sample.allocated_peak_bytes
                if peak is not None and len(peaks) < _MAX_PEAKS:
                    peaks[part] = peak
                    # A peak in PyTorch's statistics that differs from the peak before was reached since then; an equal
                    # one may be hours old.
                    if self._peaks.get(part, peak) != peak:
                        in_use[part] = max(sample.allocated_bytes, peak)
        self._peaks = peaks
        return in_use


def _part(process: ReportingProcess, uuid: str) -> _Part:
    return process.key, process.report.process.session, uuid


def _devices(snapshot: Snapshot, in_use: dict[_Part, int]) -> Iterator[Point]:
    shares, ledgers = node_shares(snapshot), node_ledgers(snapshot)
    for device in snapshot.node.devices if snapshot.node is not None else ():
        ledger = ledgers.get(device.uuid)
        if not device.uuid or device.memory is None or ledger is None:
            continue
        peaks = [
            in_use[part]
            for share in shares[device.uuid]
            if share.process is not None and (part := _part(share.process, device.uuid)) in in_use
        ]
        idle_bytes = idle_cache_bytes(shares[device.uuid])
        cache_bytes = ledger.categories.get("torch_reclaimable", 0) + ledger.categories["torch_fragmented"]
        values = (
            device.memory.used_bytes,
            ledger.categories["torch_allocated"],
            idle_bytes,
            cache_bytes - (idle_bytes or 0),
            # A pluggable allocator counts no tensors: all that it reserved is in the ledger's allocated bytes.
            max(sum(peaks), ledger.categories["torch_allocated"]),
        )
        if (row := row_of(values)) is not None:
            yield Subject(device.uuid, "", device.name, gpu=device.gpu), row


def _jobs(snapshot: Snapshot, in_use: dict[_Part, int]) -> Iterator[Point]:
    for job in giving_way(jobs_of(snapshot)):
        # A reporter has no sample of a device on which the process has no allocator, such as a device of NCCL.
        reports = all(process.reporter is not None for process in job.processes)
        sampled = [(p.process, p.uuid, p.sample) for p in job.parts if p.sample is not None] if reports else []
        values = (
            [part.share.used_bytes if part.share is not None else None for part in job.parts],
            [sample.allocated_bytes for _, _, sample in sampled],
            [sample.idle_cache_bytes for _, _, sample in sampled],
            [_other_cache(sample) for _, _, sample in sampled],
            [in_use.get(_part(each.reporter, uuid)) for each, uuid, _ in sampled if each.reporter is not None],
        )
        if (row := row_of(map(_sum, values))) is not None:
            yield _subject(job), row


def _caches(snapshot: Snapshot) -> Iterator[Point]:
    """Yield the key-value cache of each process on each of its devices, of which the use is known."""
    for name, process in snapshot.names.reporting:
        for sample in process.report.devices:
            cache = sample.kv_cache_bytes
            if "used" not in cache:
                continue
            if row := row_of((cache["used"], kv_cache_size_bytes(sample), None, None, cache["used"])):
                yield _subject_of_cache(process, f"{name} {sample.uuid}"), row


def _subject_of_cache(process: ReportingProcess, cache: str) -> Subject:
    workload, job, ticks = process.report.process.workload, job_of_process(process), process.start_time_ticks
    return Subject("", job, workload, owner=process.key.share, start_time_ticks=ticks, part=cache)


def _other_cache(sample: DeviceSample) -> int | None:
    """Return the cache that is not idle, also while it is not known which is; None if the cache is unknown."""
    if sample.reserved_bytes is None or sample.allocated_bytes is None:
        return None
    return sample.reserved_bytes - sample.allocated_bytes - (sample.idle_cache_bytes or 0)


def _sum(parts: list[int | None]) -> int | None:
    """Return the sum; None if a part is unknown."""
    # A sum of the other parts would show a drop that never happened.
    known = [part for part in parts if part is not None]
    return sum(known) if known and len(known) == len(parts) else None


def _subject(job: Job) -> Subject:
    first = job.processes[0]
    return Subject(
        "",
        job.id,
        job.workload or "",
        job.command or "",
        owner=_share(first),
        start_time_ticks=0 if job.workload else _start(first),
    )


def _share(process: SeenProcess) -> str:
    known = process.reporter or process.silent
    if known is not None:
        return known.key.share
    uid = process.facts.uid if process.facts is not None else None
    return "unattested" if uid is None else f"uid:{uid}"


def _start(process: SeenProcess) -> int:
    known = process.reporter or process.silent or process.facts
    return known.start_time_ticks if known is not None else 0


def units(size: int | None) -> int | None:
    """Return bytes in whole KiB; None if they are unknown. 4 TiB and more are unknown."""
    return size >> UNIT_BITS if size is not None and 0 <= size >> UNIT_BITS < _MAX_UNITS - 1 else None


def row_of(values: Iterable[int | None]) -> Row | None:
    """Return the row of one second from bytes; None if no value is known."""
    row = [units(value) for value in values]
    return None if all(value is None for value in row) else row
