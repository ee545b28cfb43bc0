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
So does one whose pid had another process when the driver was asked.

Where the driver says of no process what it holds (WSL, some vGPU set-ups), `non_torch` and `other_processes` are
absent, and what they would hold is in `unattributed`; where it keeps that of some to itself, theirs is. What a process
caches counts as `torch_reclaimable` where that is known, else as `torch_fragmented`: the bytes are the allocator's, and
nothing shows that they would come back. Where it is known of no process that caches anything, `torch_reclaimable` is
absent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from gpumem_exporter.core.naming import Names
from gpumem_exporter.core.samples import (
    DeviceMemory,
    DeviceReading,
    NodeReading,
    ProcessMemory,
    ReportingProcess,
    Snapshot,
)
from gpumem_exporter.wire.protocol import DeviceSample

__all__ = [
    "CATEGORIES",
    "DeviceLedger",
    "ProcessShare",
    "fragmented_bytes",
    "node_ledgers",
    "node_shares",
    "non_torch_bytes",
    "sum_of_known",
]

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


_Samples: TypeAlias = "Mapping[int, DeviceSample]"
"""What is reported of one device, by host pid."""


@dataclass(frozen=True, slots=True)
class DeviceLedger:
    """One device's ledger. `categories` holds the known ones, in `CATEGORIES` order; they add up to the total."""

    device: DeviceReading
    total_bytes: int
    categories: Mapping[str, int]
    non_torch: Mapping[int, int]
    """By host pid, what the driver counts beyond what the process' allocator reserved; signed. Where both are known."""


def fragmented_bytes(sample: DeviceSample) -> int | None:
    """Slack that `empty_cache()` cannot return: reserved − allocated − reclaimable; None when any is unknown."""
    if sample.reserved_bytes is None or sample.allocated_bytes is None or sample.reclaimable_bytes is None:
        return None
    return sample.reserved_bytes - sample.allocated_bytes - sample.reclaimable_bytes


def node_ledgers(snapshot: Snapshot, names: Names | None = None) -> dict[str, DeviceLedger]:
    """The ledger of each device whose memory is known, by uuid.

    Args:
        snapshot: what is known.
        names: those of the snapshot, where the caller has them already.
    """
    node = snapshot.node
    if node is None:
        return {}
    by_device = _samples_by_device(node, _listed_reporters(node, names or Names.of(snapshot)))
    ledgers = {}
    for device in node.devices:
        if device.memory is not None:
            ledgers[device.uuid] = _ledger(device, device.memory, by_device[device.uuid])
    return ledgers


def node_shares(snapshot: Snapshot, names: Names | None = None) -> dict[str, list[ProcessShare]]:
    """Each process' part of each device, by uuid: of those that the driver lists, or, where it lists none, that report.

    A device whose own memory is not known, and which has no ledger therefore, has its processes all the same.

    Args:
        snapshot: what is known.
        names: those of the snapshot, where the caller has them already.
    """
    node = snapshot.node
    if node is None:
        return {}
    processes = _listed_reporters(node, names or Names.of(snapshot))
    by_device = _samples_by_device(node, processes)
    shares: dict[str, list[ProcessShare]] = {}
    for device in node.devices:
        samples = by_device[device.uuid]
        shares[device.uuid] = [
            ProcessShare(
                str(owner.pid),
                owner.used_bytes,
                processes[owner.pid] if sample is not None else None,
                sample,
                _non_torch(owner, sample),
            )
            for owner in _owners(device, samples)
            for sample in (samples.get(owner.pid),)
        ]
    return shares


def non_torch_bytes(node: NodeReading, names: Names, device: DeviceReading) -> dict[int, int]:
    """As `DeviceLedger.non_torch`, for a device that has no ledger: its memory is not known, its processes may be."""
    samples = _samples_by_device(node, _listed_reporters(node, names))[device.uuid]
    return {
        owner.pid: beyond
        for owner in _owners(device, samples)
        if (beyond := _non_torch(owner, samples.get(owner.pid))) is not None
    }


def _listed_reporters(node: NodeReading, names: Names) -> dict[int, ReportingProcess]:
    """Who reports and is, for all that the host says, whom the driver lists; by host pid."""
    return {
        process.host_pid: process
        for _, process in names.reporting
        if process.host_pid is not None and node.lists(process)
    }


def _samples_by_device(
    node: NodeReading, processes: Mapping[int, ReportingProcess]
) -> dict[str, dict[int, DeviceSample]]:
    """What is reported of each device of the node, by host pid."""
    by_device: dict[str, dict[int, DeviceSample]] = {device.uuid: {} for device in node.devices}
    for host_pid, process in processes.items():
        for sample in process.report.devices:
            samples = by_device.get(sample.uuid)
            if samples is not None:
                samples.setdefault(host_pid, sample)
    return by_device


def _non_torch(owner: ProcessMemory, sample: DeviceSample | None) -> int | None:
    if owner.used_bytes is None or sample is None or sample.reserved_bytes is None:
        return None
    return owner.used_bytes - sample.reserved_bytes


def _ledger(device: DeviceReading, memory: DeviceMemory, samples: _Samples) -> DeviceLedger:
    """Add up one device."""
    held = allocated = 0
    beyond: dict[int, int] = {}
    reclaimable: list[int | None] = []
    non_torch: list[int | None] = []
    others: list[int | None] = []
    for owner in _owners(device, samples):
        pid, used_bytes = owner.pid, owner.used_bytes
        sample = samples.get(pid)
        reserved = sample.reserved_bytes if sample is not None else None
        if sample is None or reserved is None:
            others.append(used_bytes)
            continue
        # An allocator that keeps no books of tensors (a pluggable one) still holds what it reserved: unsplit, it counts
        # as allocated, since nothing shows that any of it could be given back.
        cached = sample.reclaimable_bytes
        in_tensors = sample.allocated_bytes if sample.allocated_bytes is not None else reserved - (cached or 0)
        held += reserved
        allocated += in_tensors
        if in_tensors < reserved:
            reclaimable.append(cached)
        over = None if used_bytes is None else used_bytes - reserved
        non_torch.append(over)
        if over is not None:
            beyond[pid] = over
    used = memory.total_bytes - memory.free_bytes - (memory.reserved_bytes or 0)
    returned, beyond_bytes, others_bytes = map(sum_of_known, (reclaimable, non_torch, others))
    known: dict[str, int | None] = {
        "torch_allocated": allocated,
        "torch_reclaimable": returned,
        "torch_fragmented": held - allocated - (returned or 0),
        "non_torch": None if device.processes is None else beyond_bytes,
        "other_processes": None if device.processes is None else others_bytes,
        "driver_reserved": memory.reserved_bytes,
        "unattributed": used - held - (beyond_bytes or 0) - (others_bytes or 0),
        "free": memory.free_bytes,
    }
    categories = {name: value for name in CATEGORIES if (value := known[name]) is not None}
    return DeviceLedger(device, memory.total_bytes, categories, beyond)


def sum_of_known(parts: Sequence[int | None]) -> int | None:
    """The sum of those that are known; None where there are parts and none of them is: 0 would be a figure."""
    known = [part for part in parts if part is not None]
    return sum(known) if known or not parts else None


def _owners(device: DeviceReading, samples: _Samples) -> Sequence[ProcessMemory]:
    """The processes on the device: those that the driver lists, or, where it lists none, those that report."""
    return device.processes if device.processes is not None else [ProcessMemory(pid, None) for pid in samples]
