"""The simulated node as a driver shows it."""

from __future__ import annotations

from gpumem_exporter.core.samples import DeviceMemory, ProcessMemory
from gpumem_exporter.demo.device import SimulatedDevice
from gpumem_exporter.demo.simulation import Simulation
from gpumem_exporter.errors import NvmlDeviceLostError
from gpumem_exporter.nvml.provider import DeviceIdentity

__all__ = ["DemoProvider"]


class DemoProvider:
    """A `gpumem_exporter.nvml.Provider` over the simulation. Any thread may call it; nothing blocks for long."""

    source = "demo"

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    def open(self) -> None:
        """There is nothing to initialise."""

    def close(self) -> None:
        """There is nothing to end."""

    def release(self) -> None:
        """There is nothing to let go of."""

    def driver_version(self) -> str:
        """A version that says what it is."""
        return "580.95.05-demo"

    def devices(self) -> tuple[DeviceIdentity, ...]:
        """The simulated devices."""
        return tuple(device.identity for device in self._simulation.devices)

    def read_memory(self, uuid: str) -> DeviceMemory:
        """One device's memory.

        Raises:
            NvmlDeviceLostError: there is no such device.
        """
        with self._simulation.lock:
            return self._device(uuid).memory

    def read_processes(self, uuid: str) -> tuple[ProcessMemory, ...]:
        """The processes on one device.

        Raises:
            NvmlDeviceLostError: there is no such device.
        """
        with self._simulation.lock:
            device = self._device(uuid)
            return tuple(
                ProcessMemory(process.pid, used_bytes)
                for process in self._simulation.processes()
                if (used_bytes := process.used_bytes(device)) is not None
            )

    def read_utilization_ratio(self, uuid: str) -> float:
        """How busy one device is, 0 to 1.

        Raises:
            NvmlDeviceLostError: there is no such device.
        """
        with self._simulation.lock:
            return self._device(uuid).utilization_ratio

    def _device(self, uuid: str) -> SimulatedDevice:
        device = self._simulation.device(uuid)
        if device is None:
            raise NvmlDeviceLostError(f"the demo has no device {uuid!r}")
        return device
