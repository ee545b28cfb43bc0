"""When the driver last showed that a process used a device."""

from __future__ import annotations

from collections.abc import Mapping

from gpumem_exporter.core.readings import DeviceReading, DriverActivity, NodeReading

_MPS_SERVER = "nvidia-cuda-mps-server"


class Activity:
    """Follows the processes from reading to reading. Not thread-safe: the store's lock protects it."""

    def __init__(self) -> None:
        self.found: Mapping[int, DriverActivity] = {}
        """By host pid, without the processes on a device whose utilization the driver does not show by process.

        Replaced, never changed.
        """
        self._known: Mapping[tuple[str, int], DriverActivity] = {}

    def put_reading(self, reading: NodeReading) -> None:
        """Take the utilization of a reading."""
        now = reading.taken_seconds
        known: dict[tuple[str, int], DriverActivity] = {}
        found: dict[int, DriverActivity] = {}
        unknown: set[int] = set()
        for device in reading.devices:
            listed = {process.pid for process in device.processes or ()}
            active = _active(device, reading)
            if active is None:
                unknown |= listed
                continue
            for pid in listed:
                before = self._known.get((device.uuid, pid), DriverActivity(False, now))
                started = facts.started_seconds if (facts := reading.facts.get(pid)) is not None else None
                if started is not None and started > before.seconds:
                    before = DriverActivity(False, started)  # the pid was reused
                latest = known[device.uuid, pid] = DriverActivity(True, now) if pid in active else before
                found[pid] = max(latest, found.get(pid, latest))
        self._known = known
        self.found = {pid: activity for pid, activity in found.items() if pid not in unknown}


def _active(device: DeviceReading, reading: NodeReading) -> frozenset[int] | None:
    """Return the processes that used a device; None if that is not known."""
    listed = frozenset(process.pid for process in device.processes or ())
    active = device.active_pids
    if active is None and len(listed) == 1 and device.utilization_ratio is not None:
        return listed if device.utilization_ratio > 0 else frozenset()  # what the device does, its only process does
    # The driver counts the work of all clients of MPS for the server.
    if any(facts.command.startswith(_MPS_SERVER) for pid in active or () if (facts := reading.facts.get(pid))):
        return listed
    return active
