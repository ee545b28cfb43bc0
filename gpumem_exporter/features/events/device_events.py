"""The events of devices that the driver loses, and that answer again."""

from __future__ import annotations

from gpumem_exporter.core.event import Event
from gpumem_exporter.core.samples import DeviceReading, NodeReading


class DeviceHistory:
    """Compares each reading with the one before. Not thread-safe.

    A device is lost when it stops answering, and it returns when it answers again. A device without an error that is no
    longer listed was removed on purpose (a GPU was unbound, a MIG device was destroyed).
    """

    def __init__(self) -> None:
        # The number of readings in a row in which the device failed, by uuid; without the devices that are not listed.
        self._failures: dict[str, int] = {}

    def take_reading(self, reading: NodeReading) -> list[Event]:
        """Take a reading of a driver that answers, and return its events."""
        before, self._failures = self._failures, {}
        events = []
        for device in reading.devices:
            if not device.uuid:
                continue  # the driver cannot identify the device, so that its return could not be detected
            known = before.get(device.uuid)
            failures = self._failures[device.uuid] = 0 if device.up else (known or 0) + 1
            # A MIG device may fail once while it is being destroyed, so only the second failure counts.
            if failures == (2 if device.parent_uuid else 1):
                events.append(_event("device_lost", device, reading))
            elif device.up and known != 0:
                # An exporter that starts while a device is lost has no uuid of it before the device returns: whether it
                # was lost depends on its last event.
                only_after = "device_lost" if known is None or device.parent_uuid else ""
                events.append(_event("device_returned", device, reading, only_after))
        return events


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
