"""What ran out of memory and why: the memory of the device at that moment, the cause, and advice. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, TypeAlias

from gpumem_client.wire.units import human_bytes
from gpumem_exporter.core.samples import Snapshot, once_per_snapshot
from gpumem_exporter.page.documents import Document, Part
from gpumem_exporter.page.jobs import jobs_by_device, jobs_of, sums_of

OF_DEVICE = ("used_bytes", "idle_cache_bytes")
"""What a device shows of each job on it."""
_MAX_JOBS = 32
# Of the jobs as JSON, half of what an event may have. An event that is too long is not stored, and users choose the
# names of their jobs: a character of a name takes up to 12 bytes.
_MAX_JOBS_BYTES = 32 << 10

_Use: TypeAlias = Sequence[tuple[Sequence[Part], Document]]
"""The processes of each job on a device, and what an event stores of the job."""


@once_per_snapshot
def uses_of(snapshot: Snapshot) -> Mapping[str, _Use]:
    """Return the jobs on each device with what an event stores of them, by uuid."""
    # Once for all errors: one report has up to 64 of them, and with 512 processes on 8 devices this takes 20 ms of the
    # event loop.
    found: dict[str, list[tuple[Sequence[Part], Document]]] = {}
    for uuid, there in jobs_by_device(jobs_of(snapshot)).items():
        for job, parts in there:
            named = {"job": job.id, "workload": job.workload, "command": job.command, "user": job.owner["user"]}
            found.setdefault(uuid, []).append((parts, {**named, **_values(parts)}))
    return found


def jobs_beside(there: _Use, failed: Part | None) -> Document:
    """Return what the event of an error in a process stores of the others on its device, by job."""
    jobs: list[Document] = []
    for parts, document in there:
        others = [part for part in parts if part is not failed]
        if len(others) == len(parts):
            jobs.append(document)
        elif others:
            jobs.append({**document, **_values(others)})
    jobs.sort(key=lambda each: -(each["used_bytes"] or 0))
    sizes = accumulate(len(json.dumps(job)) for job in jobs[:_MAX_JOBS])
    kept = [job for job, size in zip(jobs, sizes, strict=False) if size <= _MAX_JOBS_BYTES]
    return {"jobs": kept, "jobs_left_out": len(jobs) - len(kept)}


def _values(parts: Sequence[Part]) -> Document:
    return {"pid": parts[0].process.pid, **sums_of(parts, OF_DEVICE)}


def explanation(detail: Mapping[str, Any]) -> Document:
    """Return cause, verdict, advice and the parts of the device's memory at an error; `detail` is of its event."""
    allocator, device = detail.get("allocator") or {}, detail.get("device") or {}
    cause, verdict, advice = _cause(detail, allocator, device)
    parts = _parts(detail.get("device_free_bytes"), allocator, device)
    return {"cause": cause, "verdict": verdict, "advice": advice, "parts": parts}


def _cause(detail: Mapping[str, Any], allocator: Mapping[str, Any], device: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return cause, verdict and advice: the cheapest remedy that would have been enough, as in docs/events.md."""
    requested, free, limit = (detail.get(name) for name in ("requested_bytes", "device_free_bytes", "limit_bytes"))
    if requested is None or free is None:
        return "unknown", "The cause is not known: PyTorch counted the error, but its values are missing.", ""
    reserved, jobs = allocator.get("reserved_bytes"), device.get("jobs")
    # What the process' own limit left; the device's memory limits each process.
    within = requested if limit is None or reserved is None else limit - reserved
    size, idle, used = human_bytes(requested), _of_others(jobs, "idle_cache_bytes"), _of_others(jobs, "used_bytes")
    if min(free, within) >= requested:
        verdict = f"The device had {human_bytes(free)} free a moment later, which would have been enough."
        return "passed", verdict, "Another process used the memory for a short time. Try the same step again."
    if idle and free + idle >= requested <= within:
        holder = _largest(jobs, "idle_cache_bytes")
        verdict = f"Idle cache of other jobs: a clear would have freed {human_bytes(idle)}, most of it in {holder}."
        return "idle_cache", verdict, f"Clear {holder}: the memory stays free. Then start the failed work again."
    fragmented = allocator.get("fragmented_bytes") or 0
    if min(free, within) + fragmented >= requested:
        gaps = f"{human_bytes(fragmented)} of the process' own cache was unused, but in gaps between tensors"
        return "fragmented", f"Fragmentation: {gaps} that were too small for {size}.", _EXPANDABLE
    if grew := device.get("growth_bytes_per_hour"):
        return "growth", f"The process grew by {human_bytes(grew)} an hour until no memory was left.", _LEAK
    if free >= requested:
        had = f"it had reserved {human_bytes(reserved)} of {human_bytes(limit)}"
        verdict = f"The process' own limit: {had}, while {human_bytes(free)} of the device was free."
        return "limit", verdict, _LIMIT
    if used and free + used >= requested <= within:
        verdict = f"Other jobs used {human_bytes(used)} of the device, most of it {_largest(jobs, 'used_bytes')}."
        return "others", verdict, _SPREAD
    if jobs is None and limit is not None and reserved is not None and requested <= within:
        elsewhere = human_bytes(within - free)
        verdict = f"Other processes and the driver used {elsewhere} of the device. Which processes is not known."
        return "others", verdict, _SPREAD
    total = device.get("total_bytes")
    of_device = f"; the device has {human_bytes(total)}" if total is not None else ""
    allocated = human_bytes(allocator.get("allocated_bytes"))
    return "too_large", f"Too large: {allocated} was allocated, and {size} more was requested{of_device}.", _SMALLER


_EXPANDABLE = (
    "Start the job with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True. Not if it uses SGLang, torch_memory_saver or "
    "a torch.cuda.MemPool."
)
_LEAK = (
    "Look for tensors that each step keeps, such as losses in a list. `gpumem-exporter snapshot` shows which code "
    "allocated them."
)
_LIMIT = (
    "Raise the limit that the program or `gpumem-exporter fraction` set (torch.cuda.set_per_process_memory_fraction), "
    "or use a smaller batch."
)
_SPREAD = "Run the jobs on different devices, or with smaller batches."
_SMALLER = "Use a smaller batch with more accumulation, activation checkpointing, or a larger device."


def _of_others(jobs: Iterable[Mapping[str, Any]] | None, name: str) -> int:
    """Return the sum of a value over the other jobs."""
    return sum(job.get(name) or 0 for job in jobs or ())


def _largest(jobs: Iterable[Mapping[str, Any]] | None, name: str) -> str:
    """Return the name of the other job with the largest value."""
    return _name(max(jobs or (), key=lambda job: job.get(name) or 0))


def _name(job: Mapping[str, Any]) -> str:
    """Return the name of a job in an event, with its user: `notebook (carol)`."""
    name = job.get("workload") or job.get("command") or f"pid {job.get('pid')}"
    return f"{name} ({job['user']})" if job.get("user") else str(name)


def _parts(free: int | None, allocator: Mapping[str, Any], device: Mapping[str, Any]) -> list[Document]:
    """Return the parts of the device's memory, without unknown and empty ones."""
    known = device.get("jobs")
    jobs = [
        {**_part("job", _name(job), job.get("used_bytes")), "job": job["job"], "idle": job.get("idle_cache_bytes")}
        for job in known or ()
    ]
    rest, total, reserved = None, device.get("total_bytes"), allocator.get("reserved_bytes")
    if total is not None and free is not None and reserved is not None:
        rest = total - free - reserved
        # Free memory and the process' own memory are of the moment of the error. The sizes of other jobs are a second
        # older or younger: if they do not fit into the rest, they are left out.
        of_jobs = _of_others(known, "used_bytes")
        jobs = jobs if of_jobs <= rest else []
        rest -= of_jobs if jobs else 0
    parts = [
        _part("torch_allocated", "Allocated by the process", allocator.get("allocated_bytes")),
        _part("torch_reclaimable", "Its reclaimable cache", allocator.get("reclaimable_bytes")),
        _part("torch_fragmented", "Its fragmented cache", allocator.get("fragmented_bytes")),
        *jobs,
        _part("rest", "Driver and CUDA contexts" if known is not None and (jobs or not known) else "Other use", rest),
        _part("free", "Free", free),
    ]
    return [part for part in parts if part["bytes"]]


def _part(key: str, label: str, size: int | None) -> Document:
    return {"key": key, "label": label, "bytes": size, "job": None, "idle": None}
