"""Which devices were lost, and which came back, between two polls of the driver. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from gpumem_exporter.core.samples import DeviceReading, NodeReading
from gpumem_exporter.events.model import Event

__all__ = ["device_changes"]


def device_changes(before: NodeReading | None, after: NodeReading) -> Iterator[Event]:
    """What became of the devices from one reading to a later one, both of a driver that answers.

    A device is lost when it does not answer, and returns when it does again. One that is no longer listed without
    having been in trouble was taken away on purpose (a GPU unbound, a MIG device destroyed) and is not lost; while it
    is being destroyed, a MIG device may fail once, so that of those only the second failure counts. The driver as a
    whole going away is no device's loss. A device that the driver cannot name is left out: nothing would tell its
    return.

    Args:
        before: the earlier reading; None when there is none: then a device's state is news if it is another than that
            of its last event.
        after: the later one.
    """
    if not after.up:
        return
    earlier = {device.uuid: device for device in before.devices} if before is not None else {}
    for device in after.devices:
        if not device.uuid:
            continue
        known = earlier.get(device.uuid)
        if device.up:
            if before is None or (known is not None and not known.up):
                unsure = before is None or device.parent_uuid
                yield _event("device_returned", device, after, only_after="device_lost" if unsure else "")
        elif device.parent_uuid:
            if known is not None and not known.up:
                yield _event("device_lost", device, after)
        elif known is None or known.up:
            yield _event("device_lost", device, after)


def _event(type_: str, device: DeviceReading, reading: NodeReading, only_after: str = "") -> Event:
    return Event(
        type_,
        reading.taken_unix_seconds,
        gpu=device.gpu,
        uuid=device.uuid,
        detail={
            "error": device.error or None,
            "name": device.name,
            "pci_bus_id": device.pci_bus_id,
            "driver_version": reading.driver_version,
        },
        subject=f"device:{device.uuid}",
        only_after=only_after,
    )
