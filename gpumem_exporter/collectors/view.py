"""A snapshot in the order of the page: the devices, and the processes with their names.

The names are those of `core.naming`, because Prometheus rejects a page with a duplicate series.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gpumem_exporter.core.naming import Names
from gpumem_exporter.core.samples import DeviceReading, NodeReading, Snapshot

__all__ = ["View"]


@dataclass(frozen=True, slots=True)
class View:
    """A snapshot with its devices sorted by index and its processes sorted by pid."""

    snapshot: Snapshot
    node: NodeReading | None
    """The last poll, if it has not expired and the driver answered."""
    devices: tuple[DeviceReading, ...]
    """The devices of `node`."""
    gpu_by_uuid: Mapping[str, str]
    """The `gpu` label of each device; empty if the driver does not answer."""
    names: Names
    """The reporting processes and the silent reporters with their names."""
    hide_identities: bool = False
    """The labels with a user, a command or a pod are empty."""

    @classmethod
    def of(cls, snapshot: Snapshot, *, hide_identities: bool = False) -> View:
        """Sort a snapshot."""
        node = snapshot.node if snapshot.node is not None and snapshot.node.up else None
        devices = tuple(sorted(node.devices, key=_device_order)) if node is not None else ()
        gpu_by_uuid = {device.uuid: device.gpu for device in devices}
        return cls(snapshot, node, devices, gpu_by_uuid, Names.of(snapshot), hide_identities)


def _device_order(device: DeviceReading) -> tuple[tuple[int, ...], str, str]:
    """Return a sort key: by number, with `0:2` (a MIG device) after `0` and before `1`; other texts come first."""
    parts = device.gpu.split(":")
    numbers = tuple(int(part) for part in parts) if all(part.isdecimal() for part in parts) else ()
    return numbers, device.gpu, device.uuid
