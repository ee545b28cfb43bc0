"""Compare two polls of the driver for lost and returned devices."""

from __future__ import annotations

from collections.abc import Iterator

from gpumem_exporter.core.samples import DeviceReading, NodeReading
from gpumem_exporter.events.model import Event


class DeviceHistory:
    """Compares each reading with the one before. Not thread-safe."""

    def __init__(self) -> None:
        self._reading: NodeReading | None = None
        """The last reading of a driver that answered."""
        self._last_types: dict[str, str] = {}
        """The type of the last event of each device, by subject."""

    def take_reading(self, reading: NodeReading) -> list[Event]:
        """Take a reading of a driver that answers, and return its events."""
        changes = [
            event
            for event in _device_changes(self._reading, reading)
            if self._last_types.get(event.subject) != event.type
        ]
        self._reading = reading
        present = {f"device:{device.uuid}" for device in reading.devices}
        self._last_types = {subject: type_ for subject, type_ in self._last_types.items() if subject in present}
        self._last_types.update({event.subject: event.type for event in changes})
        return changes


def _device_changes(before: NodeReading | None, after: NodeReading) -> Iterator[Event]:
    """Return the events for devices that were lost or returned between two readings.

    A device is lost when it stops answering, and it returns when it answers again. These cases produce no event:

    - A device without an error is no longer listed: it was removed on purpose (a GPU was unbound, a MIG device was
      destroyed).
    - A MIG device fails once. It may fail while it is being destroyed, so only the second failure counts.
    - The driver cannot identify the device, so that its return could not be detected.

    Without an earlier reading, the state of a device is compared with its last event.
    """
    earlier = {device.uuid: device for device in before.devices} if before is not None else {}
    for device in after.devices:
        if not device.uuid:
            continue
        known = earlier.get(device.uuid)
        if device.up:
            if before is None or (known is not None and not known.up):
                loss_is_uncertain = before is None or device.parent_uuid
                yield _event("device_returned", device, after, only_after="device_lost" if loss_is_uncertain else "")
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
