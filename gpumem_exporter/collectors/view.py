"""What all subjects of a scrape share: the devices in order, and the name that each process carries on the page.

The names are those of `core.naming`: Prometheus refuses a whole page for one doubled series.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter

from gpumem_exporter.core.naming import Names, pid_order
from gpumem_exporter.core.samples import (
    DeviceReading,
    NodeReading,
    ProcessMemory,
    ReportingProcess,
    SilentReporter,
    Snapshot,
)

__all__ = ["Devices", "View", "gpu_by_uuid", "pid_order"]


@dataclass(frozen=True, slots=True)
class Devices:
    """The devices of a reading, in order."""

    devices: tuple[DeviceReading, ...]
    listed: tuple[tuple[ProcessMemory, ...], ...]
    """The processes on each of `devices`, in the same order, by pid, each once; none where the list is not known."""

    @classmethod
    def of(cls, node: NodeReading | None) -> Devices:
        """Put a reading in order; nothing where the driver did not answer."""
        devices = _in_order(node.devices) if node is not None and node.up else ()
        return cls(devices, tuple([_listed(device) for device in devices]))


@dataclass(frozen=True, slots=True)
class View:
    """A snapshot, put in order: devices by index, processes by pid."""

    snapshot: Snapshot
    node: NodeReading | None
    """The last poll, if it is recent and the driver answered it."""
    on: Devices
    gpu_by_uuid: Mapping[str, str]
    names: Names

    @property
    def devices(self) -> tuple[DeviceReading, ...]:
        """Those of `node`, in order."""
        return self.on.devices

    @property
    def reporting(self) -> tuple[tuple[str, ReportingProcess], ...]:
        """Each with the pid it carries."""
        return self.names.reporting

    @property
    def silent(self) -> tuple[tuple[str, SilentReporter], ...]:
        """Each with the pid it carries."""
        return self.names.silent

    @classmethod
    def of(cls, snapshot: Snapshot, on: Devices | None = None) -> View:
        """Put a snapshot in order.

        Args:
            snapshot: what is known.
            on: the devices of its reading, where the caller has them in order already.
        """
        node = snapshot.node if snapshot.node is not None and snapshot.node.up else None
        return cls(snapshot, node, on or Devices.of(node), gpu_by_uuid(node), Names.of(snapshot))


def gpu_by_uuid(node: NodeReading | None) -> dict[str, str]:
    """The `gpu` label of each device; empty while the driver does not answer."""
    return {} if node is None or not node.up else {device.uuid: device.gpu for device in node.devices}


def _listed(device: DeviceReading) -> tuple[ProcessMemory, ...]:
    """By pid; one that the driver lists twice counts once, the first time that its figure is known."""
    processes = device.processes or ()
    pids = [process.pid for process in processes]
    if pids == sorted(set(pids)):
        return processes
    distinct: dict[int, ProcessMemory] = {}
    for process in processes:
        known = distinct.setdefault(process.pid, process)
        if known.used_bytes is None:
            distinct[process.pid] = process
    return tuple(sorted(distinct.values(), key=attrgetter("pid")))


def _in_order(devices: Iterable[DeviceReading]) -> tuple[DeviceReading, ...]:
    distinct: dict[tuple[str, str], DeviceReading] = {}
    for device in devices:
        distinct.setdefault((device.gpu, device.uuid), device)
    return tuple(sorted(distinct.values(), key=_device_order))


def _device_order(device: DeviceReading) -> tuple[tuple[int, ...], str, str]:
    """By number, `0:2` (a MIG device) after `0` and before `1`; what is no number comes first, by its text."""
    parts = device.gpu.split(":")
    numbers = tuple(int(part) for part in parts) if all(part.isdecimal() for part in parts) else ()
    return numbers, device.gpu, device.uuid
