"""The driver of the simulated node."""

from __future__ import annotations

from gpumem_exporter.core.samples import DeviceMemory, ProcessMemory
from gpumem_exporter.demo.device import SimulatedDevice
from gpumem_exporter.demo.simulation import Simulation
from gpumem_exporter.errors import NvmlDeviceLostError
from gpumem_exporter.nvml.provider import DeviceIdentity

__all__ = ["DemoProvider"]


class DemoProvider:
    """A `gpumem_exporter.nvml.Provider` for the simulation. Thread-safe; calls never block for long.

    The `read_` methods raise NvmlDeviceLostError for an unknown UUID.
    """

    source = "demo"

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    def open(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""

    def release(self) -> None:
        """Do nothing."""

    def driver_version(self) -> str:
        """Return a version that is marked as simulated."""
        return "580.95.05-demo"

    def devices(self) -> tuple[DeviceIdentity, ...]:
        """Return the simulated devices."""
        return tuple(device.identity for device in self._simulation.devices)

    def read_memory(self, uuid: str) -> DeviceMemory:
        """Return the memory of a device."""
        with self._simulation.lock:
            return self._device(uuid).memory

    def read_processes(self, uuid: str) -> tuple[ProcessMemory, ...]:
        """Return the processes on a device."""
        with self._simulation.lock:
            device = self._device(uuid)
            return tuple(
                ProcessMemory(process.pid, slot.used_bytes)
                for process in self._simulation.processes()
                for slot in process.slots
                if slot.device is device
            )

    def read_utilization_ratio(self, uuid: str) -> float:
        """Return the utilization of a device, 0 to 1."""
        with self._simulation.lock:
            return self._device(uuid).utilization_ratio

    def _device(self, uuid: str) -> SimulatedDevice:
        for device in self._simulation.devices:
            if device.identity.uuid == uuid:
                return device
        raise NvmlDeviceLostError(f"the demo has no device {uuid!r}")
