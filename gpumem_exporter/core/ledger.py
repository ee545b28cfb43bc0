"""The memory ledger: assigns every byte of a device to a category, from one snapshot.

This equation is exact for each device:

    total = torch_allocated + torch_reclaimable + torch_fragmented + non_torch      (reporting processes)
          + other_processes                                                         (no reporter)
          + driver_reserved + unattributed + free

`unattributed` is NVML's `used` minus every byte that has an owner. It also has the non-torch bytes of a process whose
report and reading do not belong together: see `core.pairing`.

A report enters the ledger of a device if the driver lists its process on that device. If the list of processes is
unknown, every report enters the ledger.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gpumem_client.wire.protocol import DeviceSample
from gpumem_exporter.core.readings import DeviceReading, ProcessMemory
from gpumem_exporter.core.samples import ReportingProcess, Snapshot, once_per_snapshot

CATEGORIES = (
    "torch_allocated",
    "torch_reclaimable",
    "torch_fragmented",
    "non_torch",
    "other_processes",
    "driver_reserved",
    "unattributed",
    "free",
)


_UNKNOWN: tuple[str, None, Mapping[str, DeviceSample]] = ("", None, {})


class ProcessShare(NamedTuple):
    """The memory of one process on one device.

    `non_torch_bytes` is the driver's value minus the reserved bytes; signed, and None if either is unknown, or if the
    two do not belong together.
    """

    pid: str
    used_bytes: int | None
    """NVML's value for the process on this device."""
    process: ReportingProcess | None
    """None for a process without a reporter."""
    sample: DeviceSample | None
    non_torch_bytes: int | None


@dataclass(frozen=True, slots=True)
class DeviceLedger:
    """The ledger of one device.

    `categories` has the known categories in the order of `CATEGORIES`; their sum is the total.
    """

    total_bytes: int
    categories: Mapping[str, int]
    allocatable_bytes: int
    """Free bytes, and the idle cache of the processes that accept a clear; an unknown idle cache adds nothing."""


def fragmented_bytes(sample: DeviceSample) -> int | None:
    """Return the cached bytes that `empty_cache()` cannot release; None if a value is unknown.

    The result is reserved − allocated − reclaimable.
    """
    if sample.reserved_bytes is None or sample.allocated_bytes is None or sample.reclaimable_bytes is None:
        return None
    return sample.reserved_bytes - sample.allocated_bytes - sample.reclaimable_bytes


def idle_cache_bytes(shares: Iterable[ProcessShare]) -> int | None:
    """Return the idle cache of a device: the sum over the processes whose idle cache is known; None if none is."""
    return sum_of_known([share.sample.idle_cache_bytes for share in shares if share.sample is not None] or [None])


@once_per_snapshot
def node_ledgers(snapshot: Snapshot) -> Mapping[str, DeviceLedger]:
    """Compute the ledger of each device whose memory is known, by uuid."""
    shares = node_shares(snapshot)
    devices = snapshot.node.devices if snapshot.node is not None else ()
    ledgers = {device.uuid: device_ledger(device, shares[device.uuid]) for device in devices}
    return {uuid: ledger for uuid, ledger in ledgers.items() if ledger is not None}


@once_per_snapshot
def node_shares(snapshot: Snapshot) -> Mapping[str, Sequence[ProcessShare]]:
    """Compute the memory of each process on each device, by uuid.

    These are the processes that the driver lists, or, if its list is unknown, the processes that report.
    A device whose memory is unknown has no ledger, but it has its processes.
    """
    devices = snapshot.node.devices if snapshot.node is not None else ()
    return {device.uuid: shares for device, shares in shares_on(devices, snapshot)}


def shares_on(
    devices: Iterable[DeviceReading], snapshot: Snapshot
) -> Iterator[tuple[DeviceReading, list[ProcessShare]]]:
    """Yield each of these devices of a snapshot with the memory of each process on it: see `node_shares`."""
    node = snapshot.node
    if node is None:
        return
    # Without the processes whose pid belonged to another process when the driver was read.
    reporting = [each for each in snapshot.names.reporting if node.pid_belongs_to(each[1])]
    # A reporter without a known host pid is left out: `other_processes` already includes its bytes.
    known = {
        process.host_pid: (name, process, {sample.uuid: sample for sample in process.report.devices})
        for name, process in reporting
        if process.host_pid is not None
    }
    for device in devices:
        if device.processes is None:
            yield device, _reported_shares(device.uuid, reporting)
        else:
            yield device, _listed_shares(device.uuid, device.processes, known)


def _reported_shares(uuid: str, reporting: Iterable[tuple[str, ReportingProcess]]) -> list[ProcessShare]:
    """Return the shares of the processes that report, where the driver's list is unknown."""
    return [
        ProcessShare(name, None, process, sample, None)
        for name, process in reporting
        for sample in process.report.devices
        if sample.uuid == uuid
    ]


def _listed_shares(
    uuid: str,
    listed: Iterable[ProcessMemory],
    known: Mapping[int, tuple[str, ReportingProcess, Mapping[str, DeviceSample]]],
) -> list[ProcessShare]:
    """Return the shares of the processes that the driver lists; `known` are the reporting ones by host pid."""
    shares = []
    for owner in listed:
        pid, used_bytes = owner.pid, owner.used_bytes
        name, process, samples = known.get(pid, _UNKNOWN)
        sample = samples.get(uuid)
        if sample is None or process is None:
            shares.append(ProcessShare(str(pid), used_bytes, None, None, None))
            continue
        reserved_bytes, non_torch_bytes = sample.reserved_bytes, None
        if used_bytes is not None and reserved_bytes is not None and uuid not in process.unmatched:
            non_torch_bytes = used_bytes - reserved_bytes
        shares.append(ProcessShare(name, used_bytes, process, sample, non_torch_bytes))
    return shares


def device_ledger(device: DeviceReading, shares: Sequence[ProcessShare]) -> DeviceLedger | None:
    """Compute the ledger of one device; None if its memory is unknown."""
    memory, listed = device.memory, device.processes is not None
    if memory is None:
        return None
    reserved_sum = allocated = 0
    reclaimable: list[int | None] = []
    non_torch: list[int | None] = []
    others: list[int | None] = []
    clearable = 0
    for _, used_bytes, process, sample, non_torch_bytes in shares:
        if sample is not None and process is not None and sample.idle_cache_bytes and process.clears:
            clearable += sample.idle_cache_bytes
        if sample is None or (reserved := sample.reserved_bytes) is None:
            others.append(used_bytes)
            continue
        # A pluggable allocator may not count tensors. All that it reserved then counts as allocated, because nothing
        # shows that any of it can be released.
        cached = sample.reclaimable_bytes
        in_tensors = sample.allocated_bytes if sample.allocated_bytes is not None else reserved - (cached or 0)
        reserved_sum += reserved
        allocated += in_tensors
        if in_tensors < reserved:
            reclaimable.append(cached)
        non_torch.append(non_torch_bytes)
    used = memory.total_bytes - memory.free_bytes - (memory.reserved_bytes or 0)
    # Some drivers report no memory per process (WSL, some vGPU configurations), or hide the memory of some. What is not
    # known has no share in the sums: those bytes are in `unattributed`.
    reclaimable_sum, non_torch_sum, others_sum = map(sum_of_known, (reclaimable, non_torch, others))
    known: dict[str, int | None] = {
        "torch_allocated": allocated,
        "torch_reclaimable": reclaimable_sum,
        # With the caches whose reclaimable bytes are unknown: the allocator owns the bytes, and nothing shows that they
        # can be released.
        "torch_fragmented": reserved_sum - allocated - (reclaimable_sum or 0),
        "non_torch": non_torch_sum if listed else None,
        "other_processes": others_sum if listed else None,
        "driver_reserved": memory.reserved_bytes,
        # Signed and never clamped: the driver reads the device and the processes at slightly different times, and the
        # categories must add up to the total.
        "unattributed": used - reserved_sum - (non_torch_sum or 0) - (others_sum or 0),
        "free": memory.free_bytes,
    }
    categories = {name: value for name in CATEGORIES if (value := known[name]) is not None}
    return DeviceLedger(memory.total_bytes, categories, memory.free_bytes + clearable)


def sum_of_known(parts: Sequence[int | None]) -> int | None:
    """Return the sum of the known parts; None if there are parts and all are unknown."""
    # Not 0, which would be a value. Without any part, 0 is true.
    known = [part for part in parts if part is not None]
    return sum(known) if known or not parts else None
