"""A snapshot in the order of the page: the devices, and the processes with their names.

The names are those of `core.naming`, because Prometheus rejects a page with a duplicate series.
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

__all__ = ["OrderedDevices", "View", "gpu_by_uuid", "pid_order"]


@dataclass(frozen=True, slots=True)
class OrderedDevices:
    """The devices of a reading, in order."""

    devices: tuple[DeviceReading, ...]
    listed: tuple[tuple[ProcessMemory, ...], ...]
    """The processes on each of `devices`, sorted by pid and without duplicates; empty if the list is unknown."""

    @classmethod
    def of(cls, node: NodeReading | None) -> OrderedDevices:
        """Sort the devices and processes of a reading; empty if the driver did not answer."""
        devices = _in_order(node.devices) if node is not None and node.up else ()
        return cls(devices, tuple([_listed(device) for device in devices]))


@dataclass(frozen=True, slots=True)
class View:
    """A snapshot with its devices sorted by index and its processes sorted by pid."""

    snapshot: Snapshot
    node: NodeReading | None
    """The last poll, if it has not expired and the driver answered."""
    ordered: OrderedDevices
    gpu_by_uuid: Mapping[str, str]
    names: Names

    @property
    def devices(self) -> tuple[DeviceReading, ...]:
        """The devices of `node` in order."""
        return self.ordered.devices

    @property
    def reporting(self) -> tuple[tuple[str, ReportingProcess], ...]:
        """The reporting processes with their names."""
        return self.names.reporting

    @property
    def silent(self) -> tuple[tuple[str, SilentReporter], ...]:
        """The silent reporters with their names."""
        return self.names.silent

    @classmethod
    def of(cls, snapshot: Snapshot, ordered: OrderedDevices | None = None) -> View:
        """Sort a snapshot.

        Args:
            snapshot: the node and its reports.
            ordered: the sorted devices of its reading; computed if None.
        """
        node = snapshot.node if snapshot.node is not None and snapshot.node.up else None
        return cls(snapshot, node, ordered or OrderedDevices.of(node), gpu_by_uuid(node), Names.of(snapshot))


def gpu_by_uuid(node: NodeReading | None) -> dict[str, str]:
    """Return the `gpu` label of each device; empty if the driver does not answer."""
    return {} if node is None or not node.up else {device.uuid: device.gpu for device in node.devices}


def _listed(device: DeviceReading) -> tuple[ProcessMemory, ...]:
    """Return the processes of a device by pid; of duplicates, the first one with a known value."""
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
    """Return a sort key: by number, with `0:2` (a MIG device) after `0` and before `1`; other texts come first."""
    parts = device.gpu.split(":")
    numbers = tuple(int(part) for part in parts) if all(part.isdecimal() for part in parts) else ()
    return numbers, device.gpu, device.uuid
