"""What ran out of memory and why: the memory of the device at that moment, the cause, and advice. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

from gpumem_client.wire.units import human_bytes
from gpumem_exporter.core.samples import PartKey, Snapshot
from gpumem_exporter.page.documents import Part
from gpumem_exporter.page.growth import Growth
from gpumem_exporter.page.jobs import Job, jobs_by_device, sums_of

NEAR_SECONDS = 5.0
"""A device's state of this age is the state at the error: other jobs seldom change within it."""
OF_DEVICE = ("used_bytes", "idle_cache_bytes")
"""What a device shows of each job on it."""
_MAX_JOBS = 32
# Of the jobs as JSON, half of what an event may have. An event that is too long is not stored, and users choose the
# names of their jobs: a character of a name takes up to 12 bytes.
_MAX_JOBS_BYTES = 32 << 10

Document = dict[str, Any]


@dataclass
class DeviceUse:
    """The memory of a device and the processes on it."""

    uuid: str
    total_bytes: int | None
    jobs: Sequence[tuple[Job, Sequence[Part]]]

    @cached_property
    def _documents(self) -> Mapping[str, Document]:
        """The jobs by id, each with all of its processes on the device."""
        # A user can report hundreds of errors a minute, on devices with thousands of processes. So the documents are
        # built once, for the first error: with 512 processes that takes 15 ms of the event loop.
        return {job.id: _document(job, parts) for job, parts in self.jobs}

    @cached_property
    def _parts_beside(self) -> Mapping[str, tuple[str, Sequence[Part]]]:
        """The id of the job of each process, and the processes of the job."""
        return {str(part.process.pid): (job.id, parts) for job, parts in self.jobs for part in parts}

    def document(self, pid: str, growth_of: Callable[[PartKey], Growth | None]) -> Document:
        """Return what an event of an error in this process stores: the device, and the other processes by job."""
        own, there = self._parts_beside.get(pid, (None, ()))
        jobs = [document for key, document in self._documents.items() if key != own]
        if own is not None:
            parts = [part for part in there if str(part.process.pid) != pid]
            jobs += [{**self._documents[own], **_values(parts)}] if parts else []
        jobs.sort(key=lambda each: -(each["used_bytes"] or 0))
        failed = next((part.process.reporter for part in there if str(part.process.pid) == pid), None)
        grows = growth_of(failed.part(self.uuid)) if failed is not None else None
        kept = _that_fit(jobs[:_MAX_JOBS])
        return {
            "total_bytes": self.total_bytes,
            "growth_bytes_per_hour": grows.bytes_per_hour if grows is not None else None,
            "jobs": kept,
            "jobs_left_out": len(jobs) - len(kept),
        }


def uses_of(snapshot: Snapshot, jobs: Iterable[Job]) -> dict[str, DeviceUse]:
    """Return the use of each device of a snapshot, by uuid."""
    devices = snapshot.node.devices if snapshot.node is not None else ()
    there = jobs_by_device(jobs)
    return {
        device.uuid: DeviceUse(
            device.uuid, device.memory.total_bytes if device.memory else None, there.get(device.uuid, ())
        )
        for device in devices
    }


def _that_fit(jobs: Sequence[Document]) -> list[Document]:
    """Return the first jobs, up to `_MAX_JOBS_BYTES`."""
    sizes = accumulate(len(json.dumps(job)) for job in jobs)
    return [job for job, size in zip(jobs, sizes, strict=True) if size <= _MAX_JOBS_BYTES]


def _document(job: Job, parts: Sequence[Part]) -> Document:
    return {
        "job": job.id,
        "workload": job.workload,
        "command": job.command,
        "user": job.owner()["user"],
        **_values(parts),
    }


def _values(parts: Sequence[Part]) -> Document:
    return {"pid": parts[0].process.pid, **sums_of(parts, OF_DEVICE)}


class _Error(NamedTuple):
    """The values of an error. None is unknown."""

    requested_bytes: int | None
    free_bytes: int | None
    limit_bytes: int | None
    reserved_bytes: int | None
    allocated_bytes: int | None
    fragmented_bytes: int | None
    total_bytes: int | None
    growth_bytes_per_hour: int | None
    jobs: Sequence[Mapping[str, Any]] | None
    """The other jobs on the device; None if the device's state at the error is unknown."""

    @property
    def limit_room_bytes(self) -> int | None:
        """What the process' own limit left; the device's memory limits each process."""
        known = self.limit_bytes is not None and self.reserved_bytes is not None
        return self.limit_bytes - self.reserved_bytes if known else None  # type: ignore[operator]

    def of_others(self, name: str) -> int:
        """Return the sum of a value over the other jobs."""
        return sum(job.get(name) or 0 for job in self.jobs or ())

    def largest(self, name: str) -> str:
        """Return the name of the other job with the largest value."""
        return name_of(max(self.jobs or (), key=lambda job: job.get(name) or 0))


def explanation(detail: Mapping[str, Any]) -> Document:
    """Return cause, verdict, advice and the parts of the device's memory at an error; `detail` is of its event."""
    allocator, device = detail.get("allocator") or {}, detail.get("device") or {}
    error = _Error(
        *(detail.get(name) for name in ("requested_bytes", "device_free_bytes", "limit_bytes")),
        *(allocator.get(name) for name in ("reserved_bytes", "allocated_bytes", "fragmented_bytes")),
        *(device.get(name) for name in ("total_bytes", "growth_bytes_per_hour", "jobs")),
    )
    cause, verdict, advice = _cause(error)
    return {"cause": cause, "verdict": verdict, "advice": advice, "parts": _parts(error, allocator)}


def _cause(error: _Error) -> tuple[str, str, str]:
    """Return cause, verdict and advice: the cheapest remedy that would have been enough, as in docs/events.md."""
    requested, free, within = error.requested_bytes, error.free_bytes, error.limit_room_bytes
    if requested is None or free is None:
        return "unknown", "The cause is not known: PyTorch counted the error, but its values are missing.", ""
    within = requested if within is None else within
    size, idle, used = human_bytes(requested), error.of_others("idle_cache_bytes"), error.of_others("used_bytes")
    if min(free, within) >= requested:
        verdict = f"The device had {human_bytes(free)} free a moment later, which would have been enough."
        return "passed", verdict, "Another process used the memory for a short time. Try the same step again."
    if idle and free + idle >= requested <= within:
        holder = error.largest("idle_cache_bytes")
        verdict = f"Idle cache of other jobs: a clear would have freed {human_bytes(idle)}, most of it in {holder}."
        return "idle_cache", verdict, f"Clear {holder}: the memory stays free. Then start the failed work again."
    fragmented = error.fragmented_bytes or 0
    if min(free, within) + fragmented >= requested:
        gaps = f"{human_bytes(fragmented)} of the process' own cache was unused, but in gaps between tensors"
        return "fragmented", f"Fragmentation: {gaps} that were too small for {size}.", _EXPANDABLE
    if error.growth_bytes_per_hour:
        grew = human_bytes(error.growth_bytes_per_hour)
        return "growth", f"The process grew by {grew} an hour until no memory was left.", _LEAK
    if free >= requested:
        had = f"it had reserved {human_bytes(error.reserved_bytes)} of {human_bytes(error.limit_bytes)}"
        verdict = f"The process' own limit: {had}, while {human_bytes(free)} of the device was free."
        return "limit", verdict, _LIMIT
    if used and free + used >= requested <= within:
        largest = error.largest("used_bytes")
        verdict = f"Other jobs used {human_bytes(used)} of the device, most of it {largest}."
        return "others", verdict, _SPREAD
    if error.jobs is None and error.limit_room_bytes is not None and requested <= within:
        elsewhere = human_bytes(error.limit_room_bytes - free)
        verdict = f"Other processes and the driver used {elsewhere} of the device. Which processes is not known."
        return "others", verdict, _SPREAD
    total = f"; the device has {human_bytes(error.total_bytes)}" if error.total_bytes is not None else ""
    allocated = human_bytes(error.allocated_bytes)
    return "too_large", f"Too large: {allocated} was allocated, and {size} more was requested{total}.", _SMALLER


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


def name_of(job: Mapping[str, Any]) -> str:
    """Return the name of a job in an event, with its user: `notebook (carol)`."""
    name = job.get("workload") or job.get("command") or f"pid {job.get('pid')}"
    return f"{name} ({job['user']})" if job.get("user") else str(name)


_OWN = (
    ("torch_allocated", "Allocated by the process", "allocated_bytes"),
    ("torch_reclaimable", "Its reclaimable cache", "reclaimable_bytes"),
    ("torch_fragmented", "Its fragmented cache", "fragmented_bytes"),
)


def _parts(error: _Error, allocator: Mapping[str, Any]) -> list[Document]:
    """Return the parts of the device's memory, without unknown and empty ones."""
    own = [_part(key, label, allocator.get(name)) for key, label, name in _OWN]
    jobs = [
        {**_part("job", name_of(job), job.get("used_bytes")), "job": job["job"], "idle": job.get("idle_cache_bytes")}
        for job in error.jobs or ()
    ]
    rest = None
    if None not in (error.total_bytes, error.free_bytes, error.reserved_bytes):
        rest = error.total_bytes - error.free_bytes - error.reserved_bytes  # type: ignore[operator]
        # Free memory and the process' own memory are of the moment of the error. The sizes of other jobs are a second
        # older or younger: if they do not fit into the rest, they are left out.
        of_jobs = error.of_others("used_bytes")
        jobs = jobs if of_jobs <= rest else []
        rest -= of_jobs if jobs else 0
    label = "Driver and CUDA contexts" if error.jobs is not None and (jobs or not error.jobs) else "Other use"
    parts = [*own, *jobs, _part("rest", label, rest), _part("free", "Free", error.free_bytes)]
    return [part for part in parts if part["bytes"]]


def _part(key: str, label: str, size: int | None) -> Document:
    return {"key": key, "label": label, "bytes": size, "job": None, "idle": None}
