"""Where every byte of a device went. Pure arithmetic over one snapshot.

For each device

    total = torch_allocated + torch_reclaimable + torch_fragmented + non_torch      (reporting processes)
          + other_processes                                                         (no reporter)
          + driver_reserved + unattributed + free

holds to the byte, because `unattributed` is what is left of NVML's `used` when everything that has an owner is taken
off. It is signed and never clamped: driver and processes are read moments apart, and the difference is shown, not
hidden. It is negative, for instance, for as long as a reporter already counts what the driver's last reading lacks.

A report's bytes enter a device's ledger only where the driver lists the process on that device, or where the driver
lists no processes at all. A reporter whose host pid is unknown stays out: its bytes already stand in `other_processes`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gpumem_exporter.core.samples import DeviceReading, ProcessMemory, ReportingProcess, Snapshot
from gpumem_exporter.protocol import DeviceSample

__all__ = ["CATEGORIES", "DeviceLedger", "ProcessShare", "device_ledger", "fragmented_bytes", "node_ledgers"]

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


@dataclass(frozen=True, slots=True)
class ProcessShare:
    """One process' part of a device. `non_torch` = driver's figure − reserved, signed; None when either is unknown."""

    pid: str
    used_bytes: int | None
    """NVML's figure for the process on this device."""
    process: ReportingProcess | None
    """None for a process without a reporter."""
    sample: DeviceSample | None
    non_torch_bytes: int | None


@dataclass(frozen=True, slots=True)
class DeviceLedger:
    """One device's ledger. `categories` holds the known ones, in `CATEGORIES` order; they add up to the total."""

    gpu: str
    uuid: str
    total_bytes: int
    categories: Mapping[str, int]
    shares: tuple[ProcessShare, ...]


def fragmented_bytes(sample: DeviceSample) -> int | None:
    """Slack that `empty_cache()` cannot return: reserved − allocated − reclaimable; None when any is unknown."""
    if sample.reserved_bytes is None or sample.allocated_bytes is None or sample.reclaimable_bytes is None:
        return None
    return sample.reserved_bytes - sample.allocated_bytes - sample.reclaimable_bytes


def node_ledgers(snapshot: Snapshot) -> dict[str, DeviceLedger]:
    """The ledger of each device whose memory is known, by uuid."""
    if snapshot.node is None:
        return {}
    ledgers = {}
    for device in snapshot.node.devices:
        ledger = device_ledger(device, snapshot.processes)
        if ledger is not None:
            ledgers[device.uuid] = ledger
    return ledgers


def device_ledger(device: DeviceReading, processes: Iterable[ReportingProcess]) -> DeviceLedger | None:
    """Add up one device; None when the driver does not give its memory."""
    memory = device.memory
    if memory is None:
        return None
    shares = _shares(device, processes)
    allocated = reclaimable = fragmented = non_torch = others = 0
    for share in shares:
        if share.sample is None or share.sample.reserved_bytes is None:
            others += share.used_bytes or 0
            continue
        reserved = share.sample.reserved_bytes
        # An allocator that keeps no books of tensors (a pluggable one) still holds what it reserved: unsplit, it counts
        # as allocated, since nothing shows that any of it could be given back.
        in_tensors = reserved if share.sample.allocated_bytes is None else share.sample.allocated_bytes
        returnable = share.sample.reclaimable_bytes or 0
        allocated += in_tensors
        reclaimable += returnable
        fragmented += reserved - in_tensors - returnable
        non_torch += share.non_torch_bytes or 0
    reserved_by_driver = memory.reserved_bytes or 0
    used = memory.total_bytes - memory.free_bytes - reserved_by_driver
    known: dict[str, int | None] = {
        "torch_allocated": allocated,
        "torch_reclaimable": reclaimable,
        "torch_fragmented": fragmented,
        "non_torch": None if device.processes is None else non_torch,
        "other_processes": None if device.processes is None else others,
        "driver_reserved": memory.reserved_bytes,
        "unattributed": used - allocated - reclaimable - fragmented - non_torch - others,
        "free": memory.free_bytes,
    }
    categories = {name: value for name in CATEGORIES if (value := known[name]) is not None}
    return DeviceLedger(device.gpu, device.uuid, memory.total_bytes, categories, shares)


def _shares(device: DeviceReading, processes: Iterable[ReportingProcess]) -> tuple[ProcessShare, ...]:
    reporting = {}
    for process in processes:
        sample = process.sample(device.uuid)
        if sample is not None:
            reporting[process.host_pid] = (process, sample)
    if device.processes is None:
        return tuple(
            ProcessShare(process.label_pid, None, process, sample, None)
            for pid, (process, sample) in reporting.items()
            if pid is not None
        )
    return tuple(_listed_share(listed, reporting.get(listed.pid)) for listed in device.processes)


def _listed_share(listed: ProcessMemory, reporter: tuple[ReportingProcess, DeviceSample] | None) -> ProcessShare:
    pid = str(listed.pid)
    if reporter is None:
        return ProcessShare(pid, listed.used_bytes, None, None, None)
    process, sample = reporter
    known = sample.reserved_bytes is not None and listed.used_bytes is not None
    non_torch = listed.used_bytes - sample.reserved_bytes if known else None  # type: ignore[operator]
    return ProcessShare(pid, listed.used_bytes, process, sample, non_torch)
